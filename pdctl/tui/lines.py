"""Lines of styled text, before any theme: a span is (text, role), and a theme says what a role looks like.

Views build these; the canvas turns them into what a terminal shows. A test reads them as plain text.
"""

from collections.abc import Iterable, Sequence
from typing import Self

from rich.cells import cell_len, set_cell_size

Span = tuple[str, str]


class Line:
    """Spans from left to right."""

    __slots__ = ("spans",)

    def __init__(self, text: str = "", role: str = "") -> None:
        self.spans: list[Span] = [(text, role)] if text else []

    def add(self, text: str, role: str = "") -> Self:
        if text:
            self.spans.append((text, role))
        return self

    def extend(self, spans: Iterable[Span]) -> Self:
        self.spans.extend(spans)
        return self

    @property
    def plain(self) -> str:
        return "".join(text for text, _ in self.spans)

    @property
    def width(self) -> int:
        return sum(cell_len(text) for text, _ in self.spans)

    def fit(self, width: int) -> "Line":
        """Exactly `width` cells: cut or padded, never wrapped. A wide character that is cut in half becomes a space."""
        line, left = Line(), width
        for text, role in self.spans:
            size = cell_len(text)
            if size > left:
                line.add(set_cell_size(text, left), role)
                return line
            line.add(text, role)
            left -= size
        return line.add(" " * left, self.spans[-1][1] if self.is_selected else "")

    @property
    def is_selected(self) -> bool:
        return bool(self.spans) and self.spans[-1][1] == "select"

    def all_as(self, role: str) -> "Line":
        return Line(self.plain, role)


def columns(blocks: Sequence[Sequence[Line]]) -> list[Line]:
    """Blocks of the same height beside each other; each is as wide as its lines are."""
    out = []
    for parts in zip(*blocks, strict=True):
        line = Line()
        for part in parts:
            line.extend(part.spans)
        out.append(line)
    return out


def box(title: str, lines: Sequence[Line], width: int, height: int, hint: str = "") -> list[Line]:
    """A frame of `width` x `height` with `lines` inside, cut or padded."""
    inner = width - 4
    room = max(0, inner - 1)
    title = title[:room]
    hint = hint if len(hint) + 1 <= room - len(title) else ""
    top = Line("╭─ ", "border").add(title, "title").add(" ", "border")
    fill = width - 2 - top.width - (len(hint) + 2 if hint else 0)
    top.add("─" * max(0, fill), "border")
    if hint:
        top.add(f" {hint} ", "dim")
    top.add("─╮", "border")
    out = [top.fit(width)]
    blank = Line()
    for index in range(max(0, height - 2)):
        body = lines[index] if index < len(lines) else blank
        out.append(Line("│ ", "border").extend(body.fit(inner).spans).add(" │", "border"))
    return [*out, Line("╰" + "─" * (width - 2) + "╯", "border")]


def rule(title: str, width: int, hint: str = "") -> Line:
    """The narrow layouts' title: one line, no sides."""
    line = Line("─ ", "border").add(title, "title").add(" ", "border")
    fill = width - line.width - (len(hint) + 1 if hint else 0)
    line.add("─" * max(0, fill), "border")
    return line.add(f" {hint}", "dim").fit(width) if hint else line.fit(width)


def window(count: int, selected: int, height: int) -> range:
    """Which of `count` rows to show in `height` lines, so that the selected one is among them."""
    if count <= height:
        return range(count)
    first = min(max(0, selected - height // 2), count - height)
    return range(first, first + height)


def tail(text: str, width: int) -> str:
    """The end of a path that is too long, for that is what tells it from others; other text is left to be cut."""
    is_path = text.startswith(("/", "unix:/")) and cell_len(text) > width > 1
    return f"…{text[1 - width :]}" if is_path else text


def cell(text: str, width: int) -> str:
    """Left, or with a negative width right; cut to fit, with an ellipsis that says so."""
    size = abs(width)
    if cell_len(text) > size:
        text = set_cell_size(text, max(0, size - 1)) + "…" if size else ""
    return text.rjust(size) if width < 0 else text.ljust(size)
