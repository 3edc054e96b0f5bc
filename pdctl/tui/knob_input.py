"""From what is typed to a value a knob may have. The router checks again, and across knobs: this is for the eyes."""

from typing import Any

from pdctl.tui.frame import Knob

_TRUE_RANGE = "between {low:g} and {high:g}"


def read(knob: Knob, text: str) -> tuple[Any, str]:
    """(value, ""), or (None, why not)."""
    word = text.strip()
    if not word:
        return None, "type a value"
    if word in knob.words:
        return word, ""
    is_percent = word.endswith("%") and _is_share(knob)
    try:
        value: int | float = float(word.rstrip("%")) / 100 if is_percent else _number(word)
    except ValueError:
        more = f" or {' or '.join(knob.words)}" if knob.words else ""
        return None, f"not a number{more}"
    if not _is_share(knob) and value != int(value) and isinstance(knob.boot, int):
        return None, "a whole number"
    value = int(value) if value == int(value) and not isinstance(knob.boot, float) else value
    if knob.low is not None and value < knob.low:
        return None, f"below {knob.low:g}"
    if knob.high is not None and value > knob.high:
        return None, f"above {knob.high:g}"
    if knob.step > 1 and value % knob.step:
        low = int(value // knob.step) * knob.step
        return None, f"not a multiple of {knob.step}: {low} or {low + knob.step}"
    return value, ""


def _is_share(knob: Knob) -> bool:
    return isinstance(knob.boot, float) and (knob.high or 0.0) <= 1.0


def _number(word: str) -> int | float:
    try:
        return int(word)
    except ValueError:
        return float(word)
