"""View 5: what all processes wrote, merged by time."""

from pdctl.tui.lines import Line, box
from pdctl.tui.model import LEVELS, Model
from pdctl.tui.views import tables
from pdctl.tui.views.common import fill


def draw(model: Model, width: int, height: int) -> list[Line]:
    """Following: the newest lines. Held: the selected line is the last one shown."""
    entries = model.logs()
    room = height - 2
    last = len(entries) if model.follow else model.index("logs", len(entries)) + 1
    lines = tables.log_lines(entries[max(0, last - room) : last], width - 4, wrap=model.wrap, is_brief=not model.wrap)[
        -room:
    ]
    if not model.follow and lines:
        lines[-1] = lines[-1].all_as("select")
    word = model.filter_of("logs")
    how = "follow" if model.follow else f"held at {last} of {len(entries)}"
    hint = f"{how}{'  wrap' if model.wrap else ''}  ≥{LEVELS[model.level]}  filter {word or '/'}"
    return fill(box(f"Log  {len(entries)} lines", lines, width, height, hint), width, height)
