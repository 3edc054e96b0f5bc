"""The whole screen: header, the view that is chosen, footer."""

from pdctl.tui.lines import Line
from pdctl.tui.model import Model
from pdctl.tui.views import logs, overview, requests, startup, tune, workers
from pdctl.tui.views.common import center, fill, footer, header

_DRAW = {
    "overview": overview.draw,
    "workers": workers.draw,
    "requests": requests.draw,
    "tune": tune.draw,
    "logs": logs.draw,
}


def draw(model: Model, width: int, height: int) -> list[Line]:
    """`height` lines of `width` cells, whatever the size."""
    if width < 1 or height < 1:
        return []
    if height < 3:
        return fill([header(model, width)], width, height)
    body = _body(model, width, height - 2)
    if model.lost_at:
        # The last frame stays, and does not look like a live one.
        body = [line.all_as("lost") for line in body]
    return [header(model, width), *body, footer(model, width)]


def _body(model: Model, width: int, height: int) -> list[Line]:
    if model.frame is None:
        lines = [Line(f"looking for {model.name} ...", "dim"), Line(model.lost_why, "warn")]
        return fill(center(lines, width, height), width, height)
    if model.view == "overview" and model.frame.is_starting:
        return startup.draw(model, width, height)
    return _DRAW[model.view](model, width, height)
