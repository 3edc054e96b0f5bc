"""View 4: every live knob, what is staged, and who changed what, when and why."""

import time

from pdctl.tui.frame import Change
from pdctl.tui.lines import Line, box, cell
from pdctl.tui.model import Model
from pdctl.tui.views import tables
from pdctl.tui.views.common import fill


def draw(model: Model, width: int, height: int) -> list[Line]:
    frame = model.frame
    assert frame is not None
    rows = len(model.knobs())
    size = height if model.is_maximised else min(rows + 3, max(6, height - 9))
    table = tables.knobs(model, width - 4, size - 2, has_focus=True)
    staged = f"  {len(model.staged)} staged: d diff, A apply, z discard" if model.staged else ""
    word = model.filter_of("tune")
    out = box(f"Tune  rev {frame.rev}{staged}", table, width, size, f"filter {word or '/'}")
    left = height - size
    if left > 3:
        knob = model.knob()
        about = [Line()]
        if knob is not None:
            about = [
                Line(f"{knob.name}  ", "bold").add(f"{knob.range} {knob.unit}, applies {knob.applies}"),
                Line(knob.help, "dim"),
            ]
        lines = [*about, *[_change(model, change) for change in reversed(frame.changes)]]
        out += box("History", lines, width, left, "u: undo the last")
    return fill(out, width, height)


def _change(model: Model, change: Change) -> Line:
    at = time.strftime("%H:%M:%S", time.localtime(change.at))
    line = (
        Line(f"{at} ", "dim")
        .add(f"r{change.rev:<4}", "accent")
        .add(cell(change.op, 7))
        .add(cell(tables.safe(change.who), 16) + " ", "dim")
    )
    line.add(", ".join(f"{name} {tables.value(old)}→{tables.value(new)}" for name, old, new in change.changes))
    if change.reason:
        line.add(f"  “{tables.safe(change.reason)}”", "dim")
    if change.revert_at > (model.now or change.at):
        line.add(f"  reverts in {int(change.revert_at - model.now)} s", "warn")
    return line.add(f"  waits for {', '.join(change.pending)}", "warn") if change.pending else line
