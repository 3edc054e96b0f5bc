"""Charts as inline SVG, with nothing but strings: lines over axes, and horizontal bars.

Colours are Okabe and Ito's, told apart by colour-blind readers too; what belongs to one colour differs by
its dashes, which a print in black and white shows too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

DASHES = (("solid", ""), ("dashed", "6 3"), ("dotted", "2 3"), ("double", "12 3 2 3"))  # in the legend, in the plot
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
WIDTH, HEIGHT = 460, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 42, 46


@dataclass(frozen=True, slots=True)
class Series:
    label: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dash: int = 0
    is_step: bool = False
    has_dots: bool = False
    names: Sequence[str] = ()  # of its points, written beside them


@dataclass(frozen=True, slots=True)
class Axis:
    label: str
    low: float
    high: float
    is_log: bool = False

    def place(self, value: float, start: float, length: float) -> float:
        if self.is_log:
            low, high = math.log10(self.low), math.log10(self.high)
            return start + length * (math.log10(max(value, self.low)) - low) / (high - low)
        return start + length * (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.is_log else _ticks(self.low, self.high)


def axis(label: str, values: Sequence[float], *, is_log: bool = False, high: float | None = None) -> Axis:
    """Around the values; from 0 unless logarithmic."""
    top = high if high is not None else max(values, default=1.0) * 1.05
    if not is_log:
        return Axis(label, 0.0, top or 1.0)
    positive = [v for v in values if v > 0] or [1.0]
    low, top = min(positive) * 0.9, max(positive) * 1.1
    return Axis(label, low, max(top, low * 2), True)


def lines(title: str, series: Sequence[Series], x: Axis, y: Axis, marks: Sequence[tuple[float, str]] = ()) -> str:
    """`marks` are vertical lines: an objective."""
    inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    body = [_frame(title, x, y)]
    for value, label in marks:
        if x.low < value < x.high:
            at = x.place(value, LEFT, inner_w)
            body.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{TOP + inner_h}" class="mark"/>')
            side = "end" if at > LEFT + inner_w * 0.75 else ""
            body.append(f'<text x="{at:.1f}" y="{TOP - 3}" class="tick {side}">{escape(label)}</text>')
    for s in series:
        points = [(x.place(px, LEFT, inner_w), y.place(py, TOP + inner_h, -inner_h)) for px, py in s.points]
        if s.is_step:
            points = [q for a, b in pairwise(points) for q in (a, (b[0], a[1]))] + points[-1:]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        colour, dash = COLOURS[s.colour % len(COLOURS)], DASHES[s.dash % len(DASHES)][1]
        body.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        if s.has_dots:
            body += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points]
        body += [
            f'<text x="{px + 5:.1f}" y="{py - 5:.1f}" class="tick">{escape(name)}</text>'
            for (px, py), name in zip(points, s.names, strict=False)
        ]
    return _figure(body, HEIGHT, legend([(s.label, s.colour, s.dash) for s in series]))


def bars(
    title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float, float]]]], label: str, names: Sequence[str]
) -> str:
    """Each row: (label, [(name, from, to)]); the colour of a part is the place of its name in `names`."""
    height, left = 34 + 24 * len(rows) + BOTTOM, 150
    x = axis(label, [to for _, parts in rows for *_, to in parts])
    inner = WIDTH - left - RIGHT
    body = [f'<text x="10" y="18" class="title">{escape(title)}</text>']
    for tick in x.ticks():
        at = x.place(tick, left, inner)
        body.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="26" y2="{height - BOTTOM}" class="grid"/>')
        body.append(f'<text x="{at:.1f}" y="{height - BOTTOM + 15}" class="tick mid">{_number(tick)}</text>')
    for place, (row, parts) in enumerate(rows):
        y = 32 + 24 * place
        body.append(f'<text x="{left - 6}" y="{y + 12}" class="tick end">{escape(row)}</text>')
        for name, start, stop in parts:
            a, b = x.place(start, left, inner), x.place(stop, left, inner)
            body.append(
                f'<rect x="{a:.1f}" y="{y}" width="{max(1.0, b - a):.1f}" height="16" '
                f'fill="{COLOURS[names.index(name) % len(COLOURS)]}">'
                f"<title>{escape(name)} {stop - start:.1f} ms</title></rect>"
            )
    body.append(f'<text x="{left + inner / 2:.0f}" y="{height - 8}" class="label mid">{escape(label)}</text>')
    return _figure(body, height, legend([(name, i, 0) for i, name in enumerate(names)]))


def legend(entries: Sequence[tuple[str, int, int]]) -> str:
    items = []
    for label, colour, dash in entries:
        style = DASHES[dash % len(DASHES)][0]
        items.append(
            f'<span><i style="border-top:3px {style} {COLOURS[colour % len(COLOURS)]}"></i>{escape(label)}</span>'
        )
    return f'<div class="legend">{"".join(items)}</div>'


def _figure(body: Sequence[str], height: int, below: str) -> str:
    return f'<figure><svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(body)}</svg>{below}</figure>'


def _frame(title: str, x: Axis, y: Axis) -> str:
    inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    out = [f'<text x="10" y="18" class="title">{escape(title)}</text>']
    for tick in y.ticks():
        at = y.place(tick, TOP + inner_h, -inner_h)
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>')
        out.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" class="tick end">{_number(tick)}</text>')
    for tick in x.ticks():
        at = x.place(tick, LEFT, inner_w)
        out.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{TOP + inner_h}" class="grid"/>')
        out.append(f'<text x="{at:.1f}" y="{TOP + inner_h + 15}" class="tick mid">{_number(tick)}</text>')
    out.append(f'<text x="{LEFT + inner_w / 2:.0f}" y="{HEIGHT - 8}" class="label mid">{escape(x.label)}</text>')
    middle = TOP + inner_h / 2
    out.append(
        f'<text x="13" y="{middle:.0f}" class="label mid" transform="rotate(-90 13 {middle:.0f})">'
        f"{escape(y.label)}</text>"
    )
    return "".join(out)


def _ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first = math.ceil(low / step)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = (1, 2, 5) if math.log10(high / low) < 2.2 else (1,)
    return [m * 10.0**p for p in powers for m in fine if low <= m * 10.0**p <= high]


def _number(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:g}"
