"""The profile model's refusals in the words of the person who wrote the profile: place, key, what is allowed."""

import difflib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from pdctl.profile_lines import KeyPath
from server.config import Config, parse_bytes, parse_seconds
from server.errors import ConfigError

EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the profile: what it takes and what it is for."""

    allowed: str
    default: Any
    description: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One line of error, one of help."""

    message: str
    help: str = ""


class ProfileErrors(ConfigError):
    """Everything that is wrong with a profile, not just the first thing."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(problem.message for problem in problems), help=problems[0].help)
        self.problems = problems


def check(values: Mapping[str, Any], origins: Mapping[KeyPath, Any]) -> Config:
    """`values` as a Config. Raises ProfileErrors."""
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ProfileErrors(_problems(error, origins)) from error
    if config.router.host in EVERYWHERE and not config.router.api_key_file:
        place = _place(("router", "host"), origins)
        message = f"{place}router.host = {config.router.host!r} lets every host in, so it needs router.api_key_file"
        raise ProfileErrors([Problem(message, "write a key into a file of mode 0600, or use host 127.0.0.1")])
    return config


@cache
def keys() -> dict[KeyPath, Key]:
    """Every key that a profile may hold."""
    return dict(_keys(Config, ()))


def _keys(model: type[BaseModel], prefix: KeyPath) -> Iterator[tuple[KeyPath, Key]]:
    for name, info in model.model_fields.items():
        path = (*prefix, name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _keys(info.annotation, path)
            continue
        default = info.get_default(call_default_factory=True, validated_data={})
        annotation = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
        yield path, Key(_allowed(annotation), None if default is PydanticUndefined else default, info.description or "")


def _allowed(annotation: Any) -> str:
    """ "0.05..1", "auto or a size of 0 or more", "round-robin | least-loaded"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _with_limits(arguments[0], arguments[1:])
    if origin is Literal:
        return " | ".join(str(argument) for argument in arguments)
    if origin in (Union, types.UnionType):
        parts = [_allowed(argument) for argument in arguments if argument is not type(None)]
        return " or ".join(parts)
    if origin is list:
        return f"a list of {'integers' if arguments[0] is int else 'strings'}"
    if origin is dict:
        return "a table of strings" if arguments[1] is str else "a table of tables"
    return {int: "an integer", float: "a number", str: "a string", bool: "true | false"}.get(annotation, "a value")


def _with_limits(kind: Any, metadata: tuple[Any, ...]) -> str:
    limits = [inner for item in metadata for inner in (item, *getattr(item, "metadata", ()))]
    low, high = _first(limits, "ge", "gt"), _first(limits, "le", "lt")
    parsers = [getattr(item, "func", None) for item in limits]
    what = _allowed(kind)
    if parse_bytes in parsers:
        what = "a size such as 256MiB"
    elif parse_seconds in parsers:
        what = "a duration such as 30s"
    elif low is not None and high is not None:
        return _number(low) if low == high else f"{_number(low)}..{_number(high)}"
    if isinstance(low, int | float) and low != 0:
        return f"{what} of {_number(low)} or more"
    return what


def _first(limits: list[Any], *names: str) -> Any:
    """The first bound of these kinds (annotated_types.Ge has .ge, and so on)."""
    return next(
        (value for limit in limits for name in names if (value := getattr(limit, name, None)) is not None), None
    )


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _problems(error: ValidationError, origins: Mapping[KeyPath, Any]) -> list[Problem]:
    found: dict[KeyPath, Problem] = {}
    for item in error.errors(include_url=False):
        path = _key_path(tuple(str(part) for part in item["loc"]), item["type"])
        # "integer or auto" reports once for each alternative; one answer is enough.
        found.setdefault(path, _problem(path, item, origins))
    return [found[path] for path in sorted(found, key=lambda path: _line(path, origins))]


def _key_path(loc: KeyPath, kind: str) -> KeyPath:
    """Without what pydantic adds about alternatives and list positions."""
    if kind == "extra_forbidden" or loc[:1] == ("hosts",):
        return loc
    known = keys()
    return next((loc[:length] for length in range(len(loc), 0, -1) if loc[:length] in known), loc)


def _problem(path: KeyPath, item: Any, origins: Mapping[KeyPath, Any]) -> Problem:
    place, dotted = _place(path, origins), ".".join(path)
    if item["type"] == "extra_forbidden":
        return Problem(f"{place}{dotted} is not a key", _nearest(path))
    known = keys().get(path)
    if known is None:
        text = str(item.get("ctx", {}).get("error") or item["msg"])
        if item["type"] in ("model_type", "dict_type"):
            text = f"{dotted} is a table"
        named = [p for p in origins if p[: len(path)] == path and p[-1] in text]
        first = min(named, key=lambda p: _line(p, origins), default=path)
        return Problem(f"{_place(first, origins)}{text if dotted in text else f'{dotted}: {text}'.removeprefix(': ')}")
    verb = "is out of range" if "than" in item["type"] else "is not allowed"
    value = item["input"]
    reason = f" ({item['ctx']['error']})" if item["type"] == "value_error" else ""
    return Problem(f"{place}{dotted} = {_shown(value)} {verb}{reason}", f"allowed: {known.allowed}")


def _shown(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value).replace("'", '"')


def _line(path: KeyPath, origins: Mapping[KeyPath, Any]) -> int:
    return min((origin.line for p, origin in origins.items() if p[: len(path)] == path), default=0)


def _place(path: KeyPath, origins: Mapping[KeyPath, Any]) -> str:
    for length in range(len(path), 0, -1):
        under = [origins[p] for p in sorted(origins) if p[:length] == path[:length]]
        if under:
            first = min(under, key=lambda origin: origin.line)
            return f"{first} " if str(first).startswith("--") else f"{first}: "
    return ""


def _nearest(path: KeyPath) -> str:
    known = {".".join(p): key for p, key in keys().items()}
    sections = {p[0] for p in keys() if len(p) > 1}
    if len(path) == 1 and (near := difflib.get_close_matches(path[0], sections, n=1)):
        return f"did you mean {near[0]}?"
    # A right name in the wrong section comes before a similar one in the right section.
    close = [name for name in known if name.rpartition(".")[2] == path[-1]]
    close = close or difflib.get_close_matches(".".join(path), known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}? ({known[close[0]].allowed})"
    section = [name.partition(".")[2] for name in known if name.startswith(f"{path[0]}.")]
    return f"keys of [{path[0]}]: {', '.join(section)}" if section else "see: pdctl config schema"
