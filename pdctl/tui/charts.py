"""Bars, sparklines and a braille chart as text. Scales are given, never taken from the last value alone: a chart that
rescales itself every second shows nothing."""

import math
from collections.abc import Sequence

from pdctl.tui.lines import Line, Span

EIGHTHS = " ▏▎▍▌▋▊▉█"
STEPS = "▁▂▃▄▅▆▇█"
# Bit of each dot in a braille cell: rows from the top, left and right column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def nice_top(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50 ... above `value`: a top that changes rarely."""
    if value <= 0:
        return 1.0
    base = 10.0 ** math.floor(math.log10(value))
    return next(step * base for step in (1, 2, 5, 10) if step * base >= value)


def spark(values: Sequence[float | None], width: int, top: float) -> str:
    """The last `width` values, newest right. Nothing known: a space; nothing there: the lowest step."""
    shown = list(values[-width:]) if width > 0 else []
    cells = [" "] * (width - len(shown))
    for value in shown:
        if value is None:
            cells.append(" ")
        else:
            cells.append(STEPS[min(7, max(0, int(value / top * 8)))] if top > 0 else STEPS[0])
    return "".join(cells)


def gauge(
    value: float | None, width: int, top: float, low: float | None = None, high: float | None = None
) -> list[Span]:
    """A bar over 0..top with ┊ at the low mark and ┃ at the high one.

    A mark's cell is where its value is on the scale, also under the bar: a gauge that has passed its mark shows so.
    """
    role = level_role(value, low, high)
    filled = 0.0 if value is None or top <= 0 else min(1.0, max(0.0, value / top)) * width
    cells: list[Span] = []
    for index in range(width):
        part = min(8, max(0, int((filled - index) * 8 + 0.5)))
        cells.append((EIGHTHS[part], role) if part else ("░", "dim"))
    for mark, glyph, name in ((low, "┊", "mark-low"), (high, "┃", "mark-high")):
        if mark is not None and top > 0:
            cells[mark_cell(mark, width, top)] = (glyph, name)
    return _merge(cells)


def mark_cell(mark: float, width: int, top: float) -> int:
    return min(width - 1, max(0, int(mark / top * width)))


def level_role(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "dim"
    if high is not None and value >= high:
        return "bad"
    return "warn" if low is not None and value >= low else "good"


def _merge(cells: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for text, role in cells:
        if merged and merged[-1][1] == role:
            merged[-1] = (merged[-1][0] + text, role)
        else:
            merged.append((text, role))
    return merged


def area(
    values: Sequence[float | None],
    width: int,
    height: int,
    top: float,
    *,
    limit: float | None = None,
    marks: Sequence[int] = (),
) -> list[Line]:
    """A filled chart of width x height cells, two values a cell, newest right.

    `limit` draws a ┄ line at that value; `marks` are cells, from the left, where something was changed (▽ on top).
    """
    newest = list(values[-width * 2 :])
    empty: list[float | None] = [None] * (width * 2 - len(newest))
    shown = empty + newest
    heights = [0 if v is None else max(1, round(min(1.0, v / top) * height * 4)) for v in shown]
    limit_row = None if limit is None or limit > top else min(height - 1, int((1 - limit / top) * height))
    lines = []
    for row in range(height):
        floor = (height - 1 - row) * 4
        spans: list[Span] = []
        for column in range(width):
            bits = 0
            for side in (0, 1):
                dots = min(4, max(0, heights[column * 2 + side] - floor))
                for dot in range(dots):
                    bits |= _DOTS[3 - dot][side]
            if row == 0 and column in marks:
                spans.append(("▽", "accent"))
            elif row == limit_row and not (bits and column % 3):  # it shines through what is over it
                spans.append(("┄", "mark-high"))
            elif bits:
                spans.append((chr(0x2800 + bits), "spark"))
            else:
                spans.append((" ", ""))
        lines.append(Line().extend(_merge(spans)))
    return lines
