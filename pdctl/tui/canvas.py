"""The one widget that shows lines: a role becomes a style here, and only lines that changed are painted again."""

from collections.abc import Callable, Mapping, Sequence

from rich.segment import Segment
from rich.style import Style
from textual.events import Click, MouseScrollDown, MouseScrollUp, Resize
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from pdctl.tui.lines import Line, Span
from pdctl.tui.themes import to_ascii

Draw = Callable[[int, int], Sequence[Line]]


class Canvas(Widget, can_focus=True):
    """Shows what `draw(width, height)` gives. It knows no model: the app tells it when to draw again."""

    DEFAULT_CSS = "Canvas { width: 1fr; height: 1fr; }"

    class Scrolled(Message):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.rows = rows

    class Clicked(Message):
        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, draw: Draw, styles: Mapping[str, Style], *, is_ascii: bool = False) -> None:
        super().__init__()
        self._draw = draw
        self._roles = styles
        self._is_ascii = is_ascii
        self._shown: list[list[Span]] = []

    def use(self, styles: Mapping[str, Style]) -> None:
        self._roles = styles
        self.refresh()

    def redraw(self) -> None:
        """Only lines that differ are painted again: most of a screen is the same from one second to the next."""
        size = self.size
        new = [line.spans for line in self._draw(size.width, size.height)]
        old, self._shown = self._shown, new
        if len(old) != len(new):
            self.refresh()
            return
        changed = [Region(0, y, size.width, 1) for y, spans in enumerate(new) if spans != old[y]]
        if changed:
            self.refresh(*changed)

    @property
    def text(self) -> str:
        return "\n".join("".join(text for text, _ in spans).rstrip() for spans in self._shown)

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        plain = self._roles[""]
        if y >= len(self._shown):
            return Strip.blank(width, plain)
        segments = [
            Segment(to_ascii(text) if self._is_ascii else text, self._roles.get(role, plain))
            for text, role in self._shown[y]
        ]
        return Strip(segments).adjust_cell_length(width, plain)

    def on_resize(self, _: Resize) -> None:
        self._shown = []
        self.redraw()

    def on_mouse_scroll_down(self, _: MouseScrollDown) -> None:
        self.post_message(self.Scrolled(1))

    def on_mouse_scroll_up(self, _: MouseScrollUp) -> None:
        self.post_message(self.Scrolled(-1))

    def on_click(self, event: Click) -> None:
        if event.y < len(self._shown):
            self.post_message(self.Clicked("".join(text for text, _ in self._shown[event.y])))
