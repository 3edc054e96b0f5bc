"""While a stack starts: a bar a process with its stage, and what the slowest has still to do."""

from pdctl.tui import numbers
from pdctl.tui.frame import Frame, Worker
from pdctl.tui.lines import Line, box, cell
from pdctl.tui.model import Model
from pdctl.tui.views import tables
from pdctl.tui.views.common import fill, glyph


def draw(model: Model, width: int, height: int) -> list[Line]:
    frame = model.frame
    assert frame is not None
    rows = [_bar(frame, worker, width - 4) for worker in frame.workers]
    size = min(len(rows) + 2, max(3, height - 5))
    out = box(
        f"{frame.name} {frame.state}",
        rows,
        width,
        size,
        f"{sum(w.state == 'ready' for w in frame.workers)} of {len(rows)} ready",
    )
    left = height - size
    lines = tables.log_lines(frame.logs[-max(0, left - 2) :], width - 4)[-max(0, left - 2) :]
    return fill(out + box("Log", lines, width, left), width, height)


def _bar(frame: Frame, worker: Worker, width: int) -> Line:
    is_ready = worker.state == "ready"
    share = 1.0 if is_ready else min(1.0, worker.share)
    length = max(8, min(30, width - 60))
    filled = int(share * length)
    mark, role = glyph(worker.state)
    line = (
        Line(cell(worker.name, 14) + " ", "bold")
        .add(f"{mark} ", role)
        .add("█" * filled, role)
        .add("░" * (length - filled), "dim")
    )
    said = "ready" if is_ready else worker.stage or worker.state
    left_s = worker.up_s / share * (1 - share) if 0.05 < share < 1 else 0.0
    eta = f"  about {numbers.clock(left_s)} left" if left_s else ""
    return line.add(f" {share * 100:3.0f}%  ", "dim").add(
        f"{said}{eta}" + (f": {worker.reason}" if worker.reason else ""), role
    )
