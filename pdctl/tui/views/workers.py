"""View 2: every worker, and all that is known of the selected one. Enter opens its argv, counters and probes."""

from pdctl.tui import charts, numbers
from pdctl.tui.frame import Frame, Worker
from pdctl.tui.history import Point
from pdctl.tui.lines import Line, box, cell, columns, tail
from pdctl.tui.model import Model
from pdctl.tui.views import tables
from pdctl.tui.views.common import fill
from pdctl.tui.views.overview import ttft_chart

COUNTS = ("preemptions", "prefix_hit_tokens", "swapped_out_bytes", "swapped_in_bytes")


def draw(model: Model, width: int, height: int) -> list[Line]:
    frame = model.frame
    assert frame is not None
    rows = len(model.workers())
    size = height if model.is_maximised else min(rows + 3, max(5, height // 2))
    table = tables.workers(model, width - 4, size - 2, has_focus=True)
    word = model.filter_of("workers")
    out = box(f"Workers ({rows})", table, width, size, f"sort {model.sort_of('workers')} <>  filter {word or '/'}")
    worker = model.worker()
    left = height - size
    if worker is not None and left > 2:
        out += _detail(model, frame, worker, width, left)
    return fill(out, width, height)


def _detail(model: Model, frame: Frame, worker: Worker, width: int, height: int) -> list[Line]:
    half = max(width // 2, min(50, width - 30))
    facts = _facts(worker, half - 4) if model.opened_worker != worker.name else _counters(worker)
    title = worker.name + ("  counters" if model.opened_worker == worker.name else "")
    return columns(
        [
            box(title, facts, half, height, "⏎ more" if model.opened_worker != worker.name else "⏎ less"),
            box(
                f"{'TTFT p95' if worker.role == 'router' else 'KV'}  {numbers.clock(model.window_s)}",
                _chart(model, frame, worker, width - half - 4, height - 2),
                width - half,
                height,
                "[ ]",
            ),
        ]
    )


def _facts(worker: Worker, width: int) -> list[Line]:
    load, beat = worker.load, worker.heartbeat
    age = numbers.span((beat.get("step_age_s") or 0) * 1000)
    rows = [
        ("state", f"{worker.state} {worker.reason}".strip()),
        ("stage", worker.stage),
        ("pid", f"{worker.pid}   up {numbers.clock(worker.up_s)}"),
        ("on", f"{worker.where}   restarts {worker.restarts}"),
        ("instance", worker.instance),
        ("address", worker.address),
        ("sequences", f"open {worker.open}  waiting {load.get('waiting', '-')}  running {load.get('running', '-')}"),
        ("hand-over", "  ".join(f"{key} {load.get(key, '-')}" for key in ("expected", "receiving", "pushing"))),
        (
            "blocks",
            "  ".join(f"{key[7:]} {load.get(key, '-')}" for key in ("blocks_used", "blocks_granted", "blocks_total")),
        ),
        (
            "gave way",
            "  ".join(f"{key} {load.get(key, '-')}" for key in ("swapped", "paused", "host_blocks_used")),
        ),
        ("step", f"{numbers.pair(worker.step.p50, worker.step.p95)}   now {age} old"),
        ("transfer", numbers.pair(worker.transfer.p50, worker.transfer.p95)),
        ("busy", numbers.share(worker.busy) + (f"  {beat.get('busy')}" if beat.get("busy") else "")),
        ("integrity", str(load.get("integrity") or "ok")),
        ("log", worker.log),
    ]
    if worker.role == "router":
        rows = [row for row in rows if row[0] in ("state", "stage", "pid", "on", "instance", "log")]
        rows.insert(-1, ("ttft", numbers.pair(worker.step.p50, worker.step.p95)))
        rows.insert(-1, ("requests", f"waiting {numbers.count(worker.queue)}  running {numbers.count(worker.running)}"))
    return [Line(cell(name, 11), "dim").add(tail(text, width - 11)) for name, text in rows if text]


def _counters(worker: Worker) -> list[Line]:
    counters = {**(worker.load.get("counters") or {})}
    counters |= {key: worker.load[key] for key in COUNTS if key in worker.load}
    lines = [Line(cell(str(name), 26), "dim").add(numbers.count(float(value))) for name, value in counters.items()]
    for name, size in (worker.detail.get("memory") or {}).items():
        lines.append(Line(cell(f"memory: {name}", 26), "dim").add(f"{size / 2**20:.0f} MiB"))
    facts = {name: value for name, value in worker.detail.items() if not isinstance(value, dict)}
    return lines + [Line(cell(str(name), 26), "dim").add(str(value)) for name, value in facts.items()]


def _chart(model: Model, frame: Frame, worker: Worker, width: int, height: int) -> list[Line]:
    if worker.role == "router":
        return ttft_chart(model, frame, width, height)
    if worker.kv is None:
        return [Line("no figures yet", "dim")]
    pool = frame.pools.get(worker.role)

    def read(point: Point) -> float | None:
        return point.kv.get(worker.name)

    values = model.history.last(model.window_s, max(2, (width - 6) * 2), read)
    limit = pool.kv_high if pool else None
    lines = charts.area(values, max(1, width - 6), max(1, height), 1.0, limit=limit)
    labels = {0: "100%", height - 1: "0%"}
    return [Line(cell(labels.get(row, ""), -5) + " ", "dim").extend(line.spans) for row, line in enumerate(lines)]
