"""Structured output: from the fields of a request to the one grammar that its output must match.

response_format       {"type": "text" | "json_object"}, {"type": "json_schema", "json_schema": {"schema", "strict"}}
structured_outputs    one of json, json_object, regex, choice, grammar
guided_json, guided_regex, guided_choice, guided_grammar      the same, as older clients spell it

`read` gives the field and the grammar; whether the grammar is sound, `Text.check_grammar` says, off the event loop.
"""

import json
from collections.abc import Callable
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from server.grammar import json_grammar, lark_grammar, regex_grammar
from server.router.errors import ApiError, bad_request
from server.router.openai import Request

MAX_CHOICES = 1000
MAX_GRAMMAR_TEXT = 64 * 2**10  # what is read as GBNF holds the event loop: a tenth of a second for as much


def read(r: Request) -> tuple[str, str]:
    """(field, grammar); ("", "") for free text. Raises ApiError 400."""
    found = [(name, grammar) for name, grammar in _constraints(r) if grammar]
    if len(found) > 1:
        raise bad_request(found[1][0], f"{found[1][0]}: only one structured constraint, {found[0][0]} is another")
    return found[0] if found else ("", "")


def refused(field: str, why: str, code: str | None = None) -> ApiError:
    return bad_request(field, f"{field}: {why}", code)


def _constraints(r: Request) -> list[tuple[str, str]]:
    out = [("response_format", _response_format(r.response_format))]
    options = {key: value for key, value in (r.structured_outputs or {}).items() if value is not None}
    kinds = [key for key in options if key in _KINDS]
    if r.structured_outputs is not None and not kinds:
        raise refused("structured_outputs", f"needs one of {', '.join(_KINDS)}")
    out += [("structured_outputs", _KINDS[kind]("structured_outputs", options[kind])) for kind in kinds]
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(r, f"guided_{kind}")
        if value is not None:
            out.append((f"guided_{kind}", _KINDS[kind](f"guided_{kind}", value)))
    return out


def _response_format(form: dict[str, Any] | None) -> str:
    kind = None if form is None else form.get("type")
    if form is None or kind == "text":
        return ""
    if kind == "json_object":
        return json_grammar({"type": "object"})
    if kind != "json_schema":
        raise refused("response_format", "type must be text, json_object or json_schema")
    # The Responses API has schema and strict one level up.
    inner = form.get("json_schema", form)
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict | bool):
        raise refused("response_format", "json_schema.schema must be a JSON schema")
    # Without strict, what of the schema can be held to is; with it, all of it must be.
    return _of_schema("response_format", inner["schema"], lenient=inner.get("strict") is not True)


def _json(field: str, value: Any) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise refused(field, "the schema is not valid JSON") from error
        except RecursionError as error:
            raise refused(field, "the schema is nested too deeply") from error
    if not isinstance(value, dict | bool):
        raise refused(field, "the schema must be an object")
    return _of_schema(field, value)


def _of_schema(field: str, schema: Any, *, lenient: bool = False) -> str:
    try:
        return json_grammar(schema, lenient=lenient)
    except ValueError as error:
        raise refused(field, f"the schema: {error}") from error


def _json_object(field: str, value: Any) -> str:
    if not isinstance(value, bool):
        raise refused(field, "json_object must be true or false")
    return json_grammar({"type": "object"}) if value else ""


def _regex(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise refused(field, "regex must be a string that is not empty")
    return regex_grammar(value)


def _choice(field: str, value: Any) -> str:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICES:
        raise refused(field, f"choice must be a list of 1 to {MAX_CHOICES} strings")
    if not all(isinstance(item, str) and item for item in value):
        raise refused(field, "choice must hold strings that are not empty")
    return lark_grammar("start: " + " | ".join(quote(item) for item in value))


def quote(text: str) -> str:
    """A string literal of Lark. JSON's own escapes suit it, but for a character beyond the basic plane, left raw."""
    return json.dumps(text, ensure_ascii=False)


def _grammar(field: str, value: Any) -> str:
    """Lark, or GBNF as llama.cpp and vLLM's users write it."""
    if not isinstance(value, str) or not value.strip():
        raise refused(field, "grammar must be a string that is not empty")
    if len(value) > MAX_GRAMMAR_TEXT:
        raise refused(field, f"grammar must have at most {MAX_GRAMMAR_TEXT} characters")
    try:
        return lark_grammar(any_to_lark(value))
    except Exception as error:  # the converter raises what it likes
        raise refused(field, "the grammar is neither Lark nor GBNF") from error


_KINDS: dict[str, Callable[[str, Any], str]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
