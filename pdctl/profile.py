"""Profiles: where they are looked for, how layers are merged, which layer a value came from.

1. find: a path, ./NAME.toml, ./profiles, $XDG_CONFIG_HOME/pdctl/profiles, /etc/pdctl/profiles, then those we ship.
2. read: TOML, or YAML through the same model.
3. merge: defaults < extends < file < PDCTL__SECTION__KEY < flags < --set; tables key by key, everything else whole.
4. check: `profile_check` turns what the model refuses into file, line and the nearest right key; all problems at once.
"""

import difflib
import math
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from pathlib import Path
from typing import Any

from pdctl.profile_check import Problem, ProfileErrors, check
from pdctl.profile_lines import KeyPath, lines_of
from server.config import Config
from server.errors import ConfigError

ENV_PREFIX = "PDCTL__"
SUFFIXES = (".toml", ".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was said: "demo.toml:12", "PDCTL__ROUTER__PORT", "--set", "default"."""

    source: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile that can be started."""

    config: Config
    file: Path
    origins: Mapping[KeyPath, Origin]

    def origin(self, path: KeyPath) -> Origin:
        """The origin of a key, else of the table or list that holds it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return Origin("default")


@dataclass(slots=True)
class _Layers:
    """The merged tables so far, and who said each leaf."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)

    def put(self, path: KeyPath, value: Any, origin: Origin) -> None:
        table = self.values
        for key in path[:-1]:
            inner = table.get(key)
            if not isinstance(inner, dict):
                inner = table[key] = {}
            table = inner
        table[path[-1]] = value
        self.origins[path] = origin


def load(name: str, *, sets: Sequence[str] = (), flags: Mapping[str, Any] | None = None) -> Profile:
    """Everything that decides what runs, merged and checked. Raises ConfigError."""
    file = find(name)
    layers = _Layers()
    _add_file(layers, file, seen=())
    for path, value, origin in _from_environment(os.environ):
        layers.put(path, value, origin)
    for key, value in (flags or {}).items():
        layers.put(tuple(key.split(".")), value, Origin(f"--{key.rpartition('.')[2].replace('_', '-')}"))
    for text in sets:
        path, value = parse_set(text)
        layers.put(path, value, Origin("--set"))
    if "name" not in layers.values:
        layers.put(("name",), file.stem, Origin(f"{file.name} (its file name)"))
    return Profile(check(layers.values, layers.origins), file, layers.origins)


def parse_set(text: str) -> tuple[KeyPath, Any]:
    """'decode.cpus=[1]' -> (("decode", "cpus"), [1]); what is no TOML value is a plain string."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"{text}: expected section.key=value", help="for example router.queue_high=80")
    parsed = parse_value(value.strip())
    if isinstance(parsed, float) and not math.isfinite(parsed):
        raise ConfigError(f"{text}: expected a finite number")
    return tuple(key.strip().split(".")), parsed


def parse_value(text: str) -> Any:
    """As TOML reads it, but for dates and times, which no key takes: text then, as what TOML cannot read."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if isinstance(value, date | time) else value


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[KeyPath, Any, Origin]]:
    """Only the double underscore after the prefix counts: Kubernetes sets PDCTL_PORT for a service called pdctl.
    Raises ConfigError for a name that lacks it and can mean nothing but a key."""
    for name in sorted(environ):
        section, separator, key = name.removeprefix("PDCTL_").partition("__")
        if name.startswith("PDCTL_") and separator and section.lower() in Config.model_fields:
            raise ConfigError(f"{name} is not read", help=f"{ENV_PREFIX}{section}__{key}: two underscores after PDCTL")
        if name.startswith(ENV_PREFIX):
            path = tuple(name[len(ENV_PREFIX) :].lower().split("__"))
            yield path, parse_value(environ[name]), Origin(name)


def _add_file(layers: _Layers, file: Path, seen: tuple[Path, ...]) -> None:
    if file in seen:
        chain = " -> ".join(path.name for path in (*seen, file))
        raise ConfigError(f"{file}: extends goes round in a circle: {chain}")
    values, lines = read(file)
    base = values.pop("extends", None)
    if base is not None:
        _add_file(layers, _base_file(file, base, lines), (*seen, file))
    for path, value in leaves(values):
        # A list or inline table inside is not a key of its own; the line of what holds it is near enough.
        line = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), 0)
        layers.put(path, value, Origin(str(file), line))


def _base_file(file: Path, base: Any, lines: Mapping[KeyPath, int]) -> Path:
    where = f"{file}:{lines.get(('extends',), 1)}"
    if not isinstance(base, str):
        raise ConfigError(f"{where}: extends must be the name or path of one profile")
    beside = file.parent / base
    if beside.is_file():
        return beside
    try:
        return find(base)
    except ConfigError as error:
        raise ConfigError(f"{where}: extends {base!r}: {error.message}", help=error.help) from error


def leaves(values: Mapping[str, Any], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value that is no table, with its path. An empty table is a leaf, so that it is not lost."""
    for key, value in values.items():
        path = (*prefix, str(key))
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def read(file: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """The tables of one file and the line of each key. Raises ConfigError with the line of a syntax error."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    values = _parse_yaml(file, text) if file.suffix in (".yaml", ".yml") else _parse_toml(file, text)
    return values, lines_of(file, text)


def _parse_toml(file: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what, _, place = str(error).partition(" (at line ")
        line = place.partition(",")[0] or str(text.count("\n") + 1)
        raise ConfigError(f"{file}:{line}: not TOML: {what}") from error


def _parse_yaml(file: Path, text: str) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{line}: not YAML: {getattr(error, 'problem', error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: a profile is a table of sections")
    return values


def own_folder() -> Path:
    """Where this user's profiles lie."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "pdctl/profiles"


def is_shipped(file: Path) -> bool:
    return file.resolve().parent in (folder.resolve() for folder in _shipped())


def search_path() -> list[Path]:
    return [Path(), Path("profiles"), own_folder(), Path("/etc/pdctl/profiles"), *_shipped()]


def _shipped() -> list[Path]:
    """The wheel's own; an editable install has none and uses those of the source tree."""
    package = Path(__file__).resolve().parent
    return [folder for folder in (package / "profiles", package.parent / "profiles") if folder.is_dir()][:1]


def find(name: str) -> Path:
    """The file called `name`. Raises ConfigError with close names and where it was looked for."""
    direct = Path(name).expanduser()
    if direct.suffix in SUFFIXES and direct.is_file():
        return direct
    # A bare name is not the path of some file that happens to be called so.
    if "/" not in name and direct.suffix not in SUFFIXES:
        for folder in search_path():
            for suffix in SUFFIXES:
                if (file := folder / f"{name}{suffix}").is_file():
                    return file
    close = difflib.get_close_matches(Path(name).stem, available(), n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(available())}"
    raise ConfigError(f"there is no profile {name!r}", help=hint)


def available() -> dict[str, Path]:
    """Every profile that a bare name finds, in the order in which it would."""
    found: dict[str, Path] = {}
    for folder in search_path()[1:]:
        for suffix in SUFFIXES:
            for file in sorted(folder.glob(f"*{suffix}")):
                found.setdefault(file.stem, file)
    return found


def purpose(file: Path) -> str:
    """The comment that a profile opens with, on one line."""
    words = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("#:"):
            words.append(line.lstrip("# ").strip())
    return " ".join(filter(None, words))


def difference(one: Config, other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Keys whose resolved values differ: (key, in `one`, in `other`)."""
    left, right = dict(leaves(one.model_dump(mode="json"))), dict(leaves(other))
    return [
        (".".join(p), left.get(p), right.get(p))
        for p in sorted(left.keys() | right.keys())
        if left.get(p) != right.get(p)
    ]


__all__ = [
    "Origin",
    "Problem",
    "Profile",
    "ProfileErrors",
    "available",
    "difference",
    "find",
    "load",
    "purpose",
    "read",
]
