"""Every key with its action; `[tui.keymap]` gives an id another one.

ctrl+a and ctrl+b belong to screen and tmux, ctrl+s and ctrl+q to flow control, ctrl+z suspends: none is bound here.
"""

from textual.binding import Binding, BindingType

_KEYS = (
    ("q,ctrl+c", "quit", "quit", "leave; the servers keep running"),
    ("question_mark,f1", "help", "help", "this list"),
    ("colon,ctrl+p", "palette", "command_palette", "find an action by its name"),
    ("escape", "back", "back", "close; clear the filter; back to overview"),
    ("enter", "open", "open", "open the selected row; in Tune: edit"),
    ("tab", "panel", "panel", "overview: workers or knobs"),
    ("1", "view_overview", "view('overview')", "overview"),
    ("2", "view_workers", "view('workers')", "workers"),
    ("3", "view_requests", "view('requests')", "requests"),
    ("4", "view_tune", "view('tune')", "tune and history"),
    ("5", "view_logs", "view('logs')", "logs"),
    ("down,j", "down", "move(1)", "one row down"),
    ("up,k", "up", "move(-1)", "one row up"),
    ("pagedown", "page_down", "move(10)", "ten rows down"),
    ("pageup", "page_up", "move(-10)", "ten rows up"),
    ("home", "first", "move(-100000)", "first row; paused: the oldest frame"),
    ("end", "last", "move(100000)", "last row; paused: the newest frame"),
    ("left,h", "scrub_back", "scrub(1)", "paused: a frame back"),
    ("right", "scrub_on", "scrub(-1)", "paused: a frame on"),
    ("shift+left,H", "scrub_back_far", "scrub(60)", "paused: sixty frames back"),
    ("shift+right", "scrub_on_far", "scrub(-60)", "paused: sixty frames on"),
    ("slash", "filter", "filter", "show only rows with a word"),
    ("less_than_sign", "sort_back", "sort(-1)", "sort by the column before"),
    ("greater_than_sign", "sort_on", "sort(1)", "sort by the next column"),
    ("m", "maximise", "maximise", "the table over the whole view"),
    ("left_square_bracket", "window_less", "window(-1)", "shorter time window of charts"),
    ("right_square_bracket", "window_more", "window(1)", "longer time window of charts"),
    ("plus", "faster", "refresh_rate(-1)", "refresh more often"),
    ("minus", "slower", "refresh_rate(1)", "refresh less often"),
    ("p", "pause", "pause", "hold this frame; arrows go back in time"),
    ("l", "logs", "logs", "logs of the selected worker"),
    ("f", "follow", "follow", "logs: follow or hold"),
    ("w", "wrap", "wrap", "logs: wrap long lines"),
    ("v", "level", "level", "logs: from which level on"),
    ("n", "next_error", "next_error", "logs: the next error back"),
    ("c", "copy", "copy", "copy the selected row (OSC 52)"),
    ("s", "snapshot", "snapshot", "save screen (SVG) and frame (JSON)"),
    ("ctrl+r", "record", "record", "record frames into a file for --replay"),
    ("a", "ack", "ack", "show alerts and acknowledge them"),
    ("t", "tune", "tune", "knobs"),
    ("d", "diff", "change('diff')", "what is staged"),
    ("A", "apply", "change('apply')", "apply what is staged, with a reason"),
    ("z", "discard", "change('discard')", "forget what is staged"),
    ("u", "undo", "change('undo')", "take the last change back"),
    ("0", "boot", "change('boot')", "stage the value of the start"),
    ("x", "drain", "change('drain')", "drain the selected worker, or resume it"),
    ("R", "restart", "change('restart')", "restart the selected worker"),
    ("K", "kill", "change('kill')", "kill the selected worker"),
    ("T", "theme", "theme", "next theme"),
)
CHANGES = frozenset({"diff", "apply", "undo", "drain", "restart", "kill", "discard", "boot"})
_SHOWN = {
    "question_mark": "?",
    "colon": ":",
    "slash": "/",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "plus": "+",
    "minus": "-",
    "escape": "esc",
}


def bindings() -> list[BindingType]:
    return [Binding(keys, action, text, id=id, show=False) for keys, id, action, text in _KEYS]


def ids() -> set[str]:
    return {id for _, id, _, _ in _KEYS}


def commands() -> list[tuple[str, str, str]]:
    """(id, action, what it does), for the palette."""
    return [(id, action, text) for _, id, action, text in _KEYS]


def help_text(keymap: dict[str, str], *, is_read_only: bool, columns: int = 1) -> str:
    """Keys and what they do, in so many columns; what a read-only console cannot do is not listed."""
    rows = []
    for keys, id, _, text in _KEYS:
        if is_read_only and id in CHANGES:
            continue
        shown = " ".join(_SHOWN.get(key, key) for key in keymap.get(id, keys).split(","))
        rows.append(f"{shown:<16}{text}")
    height = -(-len(rows) // columns)
    parts = [rows[i : i + height] for i in range(0, len(rows), height)]
    return "\n".join("".join(part[i].ljust(57) for part in parts if i < len(part)).rstrip() for i in range(height))
