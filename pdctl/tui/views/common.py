"""What every view has: the header and footer lines, glyph and word of a state, tables."""

from collections.abc import Sequence

from pdctl.tui import numbers
from pdctl.tui.lines import Line, cell
from pdctl.tui.model import Model

# A glyph and a word beside each colour: a screen without colours says the same.
STATES = {
    "ready": ("●", "good"),
    "starting": ("◌", "warn"),
    "waiting": ("◌", "dim"),
    "draining": ("◌", "warn"),
    "drained": ("◌", "warn"),
    "stopping": ("◌", "warn"),
    "degraded": ("▲", "warn"),
    "restarting": ("▲", "warn"),
    "busy": ("◌", "warn"),
    "frozen": ("✗", "bad"),
    "lost": ("✗", "bad"),
    "refused": ("✗", "bad"),
    "dead": ("✗", "bad"),
    "failed": ("✗", "bad"),
    "stopped": ("○", "dim"),
}
WIDE, NARROW = 110, 76
TINY = (60, 15)

Column = tuple[str, int]  # title, width; negative is right-aligned


def glyph(state: str) -> tuple[str, str]:
    return STATES.get(state, ("▲", "warn"))


def header(model: Model, width: int) -> Line:
    frame = model.frame
    line = Line(" pdctl ", "brand")
    if frame is None:
        return line.add(f" {model.name}  ", "bold").add(model.lost_why or "connecting", "warn").fit(width)
    mark, role = glyph(frame.state)
    line.add(f" {frame.name} ", "bold").add(f" {mark} {frame.state.upper()} ", role)
    prefill, decode, colocated = (frame.pools[name] for name in ("prefill", "decode", "colocated"))
    parts = [
        f"{pool.ready}/{pool.total}{letter}"
        for pool, letter in ((prefill, "P"), (decode, "D"), (colocated, "C"))
        if pool.total
    ]
    line.add(" ".join(parts) + "  ", "")
    url = "" if frame.url == frame.name else f"{frame.url} "
    where = f"{url}{frame.model}  " if width >= WIDE else url if width >= NARROW else ""
    line.add(where, "dim")
    line.add(f"up {numbers.clock(frame.up_s)} ", "")
    right = _right(model, wide=width >= WIDE)
    gap = width - line.width - right.width - 1
    return line.add(" " * max(1, gap)).extend(right.spans).fit(width)


def _right(model: Model, *, wide: bool) -> Line:
    line = Line()
    if model.lost_at:
        line.add(f" ✗ NO CONNECTION, last {numbers.clock(model.now - model.lost_at)} ago ", "bad")
    elif model.paused:
        age = f"-{numbers.clock(model.now - model.frame.at)}" if model.frame else ""
        line.add(f" ‖ PAUSED {age} ", "warn")
    else:
        line.add(
            f" {'REPLAY' if model.is_replay else 'LIVE'} ▶ {model.refresh_s:g}s "
            if wide
            else f" ▶{model.refresh_s:g}s ",
            "good",
        )
    line.add(" RO " if model.is_read_only else " RW ", "dim")
    if model.recording:
        line.add(" ● REC ", "bad")
    if count := len(model.watch.open):
        line.add(f" ▲{count}{' alert' if wide else ''}{'s' if wide and count > 1 else ''} ", "warn")
    if wide and model.frame and model.frame.supervisor_pid:
        line.add(f" pid {model.frame.supervisor_pid} ", "dim")
    return line


# By view, what is missed most first; those that change something are not there in a read-only console.
_QUIT = "q Quit(servers keep running)"
_FOOTER = {
    "overview": ": Palette|1-5 View|⏎ Open|/ Filter|p Pause|t Tune|A Apply|u Undo|x Drain",
    "workers": "⏎ More|x Drain/resume|R Restart|K Kill|l Logs|<> Sort|/ Filter|[ ] Window",
    "requests": "⏎ Waterfall|esc Back|<> Sort|/ Filter|c Copy id|p Pause",
    "tune": "⏎ Edit|A Apply|u Undo|d Diff|z Discard|0 Boot value|/ Filter|esc Back",
    "logs": "f Follow|w Wrap|n Next error|v Level|/ Filter|c Copy|esc Back",
}
_CHANGES = ("x ", "R ", "K ", "A ", "u ", "z ", "0 ", "d ", "⏎ Edit")


def footer(model: Model, width: int) -> Line:
    if model.busy:
        return Line(f" … {model.busy}", "warn").fit(width)
    if model.message:
        return Line(f" {model.message}", model.message_role).fit(width)
    if model.paused:
        back = f"{model.scrub} of {model.scrub_count} back" if model.scrub_count else ""
        return Line(f" ‖ paused  ← → scrub  home/end oldest/newest  p go on   {back}", "warn").fit(width)
    words = [w for w in _FOOTER[model.view].split("|") if not (model.is_read_only and w.startswith(_CHANGES))]
    return Line(" " + _keys(words, width - 1), "dim").fit(width)


def _keys(words: list[str], width: int) -> str:
    """As many as there is room for; quit and help always."""
    for quit, gap in ((_QUIT, "  "), ("q Quit", "  "), ("q Quit", " ")):
        text = gap.join([quit, "? Help", *words])
        if len(text) <= width:
            return text
    return _keys(words[:-1], width) if words else text


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[tuple[str, str]]],
    *,
    selected: int = -1,
    first: int = 0,
    has_focus: bool = True,
) -> list[Line]:
    """Header line and rows; each cell is (text, role). The selected row is marked by a glyph as well as by colour."""
    head = Line(" ")
    for title, width in columns:
        head.add(cell(title, width) + " ", "head")
    lines = [head]
    for number, row in enumerate(rows, first):
        is_selected = number == selected
        line = Line("▸" if is_selected else " ", "accent")
        for (text, role), (_, width) in zip(row, columns, strict=True):
            line.add(cell(text, width) + " ", role)
        lines.append(line.all_as("select") if is_selected and has_focus else line)
    return lines


def center(lines: Sequence[Line], width: int, height: int) -> list[Line]:
    """In the middle of an empty space."""
    top = max(0, (height - len(lines)) // 2)
    out = [Line() for _ in range(top)]
    out += [Line(" " * max(0, (width - line.width) // 2)).extend(line.spans) for line in lines]
    return out


def fill(lines: Sequence[Line], width: int, height: int) -> list[Line]:
    """Exactly `height` lines of exactly `width` cells: nothing can tear."""
    shown = [line.fit(width) for line in lines[:height]]
    return shown + [Line().fit(width) for _ in range(height - len(shown))]
