"""View 1: the pools in the order of a request's life, workers, knobs, one chart and the log's last lines.

What goes first when there is less room: the chart, the log, the knobs, columns. Under 60x15 one status line a pool.
"""

from collections.abc import Callable

from pdctl.tui import charts, numbers
from pdctl.tui.frame import Frame, Pool
from pdctl.tui.history import Point
from pdctl.tui.lines import Line, box, cell, columns, rule
from pdctl.tui.model import Model
from pdctl.tui.views import tables
from pdctl.tui.views.common import TINY, WIDE, fill

QUEUE_SCALE = 1.2  # a queue's gauge goes on beyond its high mark
BOX_HEIGHT = 10
Read = Callable[[Point], float | None]


def draw(model: Model, width: int, height: int) -> list[Line]:
    frame = model.frame
    assert frame is not None
    if width < TINY[0] or height < TINY[1] - 2:
        return fill(_tiny(model, frame, width), width, height)
    wide = width >= WIDE and height >= 30
    return fill(_wide(model, frame, width, height) if wide else _narrow(model, frame, width, height), width, height)


def _wide(model: Model, frame: Frame, width: int, height: int) -> list[Line]:
    part = width // 4
    widths = (part, part, part, width - 3 * part)
    bodies = (_router(model, frame, part - 4), _prefill(model, frame, part - 4), _transfer(model, frame, part - 4))
    titles = (
        "1 ROUTER",
        "2 PREFILL",
        "3 KV TRANSFER",
        "4 DECODE" if not frame.pools["colocated"].total else "4 COLOCATED",
    )
    blocks = [
        box(title, body, size, BOX_HEIGHT, "p50/p95")
        for title, body, size in zip(titles, (*bodies, _decode(model, frame, widths[3] - 4)), widths, strict=True)
    ]
    out = columns(blocks)
    left = height - BOX_HEIGHT
    rows = max(1, len(model.workers()))
    workers_height = min(rows + 3, max(6, left - 14))
    table = tables.workers(model, width - 4, workers_height - 2, has_focus=model.panel == "workers")
    out += box(f"Workers ({rows})", table, width, workers_height, _table_hint(model, "workers"))
    left -= workers_height
    tune_height = min(9, max(5, left - 7))
    tune_width = min(max(74, width // 2), width - 40)
    staged = f"  {len(model.staged)} staged" if model.staged else ""
    knobs = tables.knobs(model, tune_width - 4, tune_height - 2, has_focus=model.panel == "tune")
    tune = box(f"Tune  rev {frame.rev}{staged}", knobs, tune_width, tune_height, "t: full list")
    chart = ttft_chart(model, frame, width - tune_width - 4, tune_height - 2)
    minutes = numbers.clock(model.window_s)
    out += columns([tune, box(f"TTFT p95  {minutes}", chart, width - tune_width, tune_height, "▽ change ┄ SLO [ ]")])
    left -= tune_height
    lines = tables.log_lines(model.logs()[-max(0, left - 2) :], width - 4, is_brief=True)[-max(0, left - 2) :]
    return out + box("Log", lines, width, left, _log_hint(model))


def _table_hint(model: Model, view: str) -> str:
    word = model.filter_of(view)
    return f"sort {model.sort_of(view)} <>" + (f"  filter {word}" if word else "  filter /")


def _log_hint(model: Model) -> str:
    return f"{'follow' if model.follow else 'held'}  ≥{('debug', 'info', 'warn', 'error')[model.level]}  l: all"


def _spark(model: Model, read: Read, width: int, top: float | None = None, unit: str = "") -> Line:
    """60 s, with the top of its scale beside it: a line without a scale says nothing."""
    room = max(4, width - 15)
    values = model.history.last(60, room, read)
    top = top or charts.nice_top(max((value for value in values if value is not None), default=0.0))
    scale = cell(f" ≤{numbers.tick(top)}{unit}", width - 6 - room)
    return Line("60s   ", "dim").add(charts.spark(values, room, top), "spark").add(scale, "dim")


def _queue(pool: Pool, width: int) -> Line:
    top = (pool.queue_high or max(4, pool.queue)) * QUEUE_SCALE
    shown = f"{pool.queue}/{pool.queue_high:g}" if pool.queue_high else str(pool.queue)
    bar = charts.gauge(pool.queue, max(4, width - 14), top, pool.queue_low, pool.queue_high)
    role = charts.level_role(pool.queue, pool.queue_low, pool.queue_high)
    return Line("queue ", "dim").extend(bar).add(cell(shown, -8), role)


def _kv(pool: Pool, width: int) -> Line:
    role = charts.level_role(pool.kv, pool.kv_low, pool.kv_high)
    warn = " ▲" if role in ("warn", "bad") else ""
    bar = charts.gauge(pool.kv, max(4, width - 14), 1.0, pool.kv_low, pool.kv_high)
    return Line("kv    ", "dim").extend(bar).add(cell(numbers.share(pool.kv) + warn, -8), role)


def _latency(name: str, p50: float | None, p95: float | None, width: int, limit: float | None = None) -> Line:
    line = Line(cell(name, 6), "dim")
    is_over = limit is not None and p95 is not None and p95 > limit
    line.add(cell(numbers.pair(p50, p95), 14), "warn" if is_over else "")
    if limit is not None:
        mark = "-" if p95 is None else "▲" if is_over else "✓"
        shown = numbers.span(limit).replace(" ", "")
        gap = " " if len(shown) + 2 <= width - 20 else ""
        line.add(cell(f"{mark}{gap}{shown}", -(width - 20)), "warn" if is_over else "good" if p95 else "dim")
    return line


def _figures(model: Model, frame: Frame, name: str, label: str, width: int, limit: float | None = None) -> Line:
    found = frame.figures(name)
    return _latency(label, found.p50, found.p95, width, limit)


def _two(left: str, right: str, width: int) -> Line:
    return Line(cell(left, max(0, width - len(right) - 1)) + " ").add(right, "bold")


def _router(model: Model, frame: Frame, width: int) -> list[Line]:
    pool = frame.router
    error, good = frame.stats.get("error_share"), frame.stats.get("slo_share")
    return [
        _two(f"req/s {numbers.count(pool.rate)}", f"run {pool.running}", width),
        _queue(pool, width),
        _spark(model, lambda point: point.req_s, width, unit="/s"),
        _figures(model, frame, "ttft", "TTFT", width, frame.slo_ttft_ms),
        _figures(model, frame, "tpot", "TPOT", width, frame.slo_tpot_ms),
        _figures(model, frame, "e2e", "e2e", width),
        _figures(model, frame, "queue", "wait", width),
        Line(f"err {numbers.share(error)}", "bad" if error else "").add(f"   in SLO {numbers.share(good)}"),
    ]


def _prefill(model: Model, frame: Frame, width: int) -> list[Line]:
    pool = frame.pools["prefill"]
    if not pool.total:
        return [Line("no prefill pool:", "dim"), Line("one worker does it all", "dim")]
    held = sum(int(w.load.get("pushing") or 0) for w in frame.workers if w.role == "prefill")
    budget = frame.knob("prefill.token_budget")
    shown = tables.value(budget.now) if budget else "-"
    return [
        _two(f"workers {pool.ready}/{pool.total}", f"{numbers.count(pool.rate)} tok/s", width),
        _queue(pool, width),
        _spark(model, lambda point: point.prefill_s, width, unit="t/s"),
        _figures(model, frame, "prefill", "read", width),
        _figures(model, frame, "prefill_queue", "wait", width),
        _figures(model, frame, "grant_wait", "grant", width),
        _kv(pool, width),
        Line(f"run {pool.running}  held {held}  budget {shown}"),
    ]


def _transfer(model: Model, frame: Frame, width: int) -> list[Line]:
    def total(key: str, role: str) -> int:
        return sum(int(worker.load.get(key) or 0) for worker in frame.workers if worker.role == role)

    slots, free = total("slots_total", "decode"), total("slots_free", "decode")
    stats = frame.stats
    bandwidth = stats.get("kv_bytes_s")
    failed = sum(int((w.load.get("counters") or {}).get("checksum_failures") or 0) for w in frame.workers)
    bar = charts.gauge(slots - free, max(4, width - 14), float(slots or 1))
    return [
        _two(f"in flight {total('receiving', 'decode')}", f"wait {total('expected', 'decode')}", width),
        _figures(model, frame, "transfer", "lat", width, frame.latency_warn_ms),
        _spark(model, lambda point: point.kv_bytes_s, width, unit="B/s"),
        Line("bw    ", "dim").add(f"{numbers.count(bandwidth)}B/s" if bandwidth else "-").add("  each", "dim"),
        Line("size  ", "dim").add(f"{numbers.size(stats.get('kv_bytes_per_seq'))}/req"),
        Line("ring  ", "dim").extend(bar).add(cell(f"{slots - free}/{slots}" if slots else "-", -8)),
        Line("resent ", "dim")
        .add(str((stats.get("totals") or {}).get("resends") or 0))
        .add("  bad sums ", "dim")
        .add(str(failed), "bad" if failed else ""),
        Line("backend ", "dim").add(frame.transfer),
    ]


def _decode(model: Model, frame: Frame, width: int) -> list[Line]:
    pool = frame.pools["colocated"] if frame.pools["colocated"].total else frame.pools["decode"]
    mine = [worker for worker in frame.workers if worker.role == pool.role]
    preempted = sum(int(worker.load.get("preemptions") or 0) for worker in mine)
    closed = sum(bool(worker.load.get("over_high")) for worker in mine)
    limit = f"/{pool.running_max}" if pool.running_max else ""
    marks = f"lo {numbers.share(pool.kv_low)} ┊  hi {numbers.share(pool.kv_high)} ┃" if pool.kv_low else "-"
    return [
        _two(f"workers {pool.ready}/{pool.total}", f"{numbers.count(pool.rate)} tok/s", width),
        Line(f"run {pool.running}{limit}".ljust(14)).add(f"wait {pool.queue}", "warn" if pool.queue else ""),
        _spark(model, lambda point: point.output_s, width, unit="t/s"),
        _figures(model, frame, "itl", "ITL", width, frame.slo_tpot_ms),
        _figures(model, frame, "second_token", "gap", width),
        _kv(pool, width),
        Line("marks ", "dim").add(marks),
        Line(f"preempted {preempted}  ").add(
            f"▲ {closed} closed" if closed else "grants open", "bad" if closed else "good"
        ),
    ]


def ttft_chart(model: Model, frame: Frame, width: int, height: int) -> list[Line]:
    """TTFT p95 over the window, its objective and where something was changed."""
    plot = max(4, width - 6)
    values = model.history.last(model.window_s, plot * 2, lambda point: point.ttft95)
    highest = max((value for value in values if value is not None), default=0.0)
    top = charts.nice_top(max(highest, frame.slo_ttft_ms * 1.05))
    newest = model.history.newest or frame.at
    marks = [
        plot - 1 - int((newest - c.at) / model.window_s * plot)
        for c in frame.changes
        if 0 <= newest - c.at < model.window_s
    ]
    lines = charts.area(values, plot, max(1, height - 1), top, limit=frame.slo_ttft_ms, marks=marks)
    labels = {0: numbers.ms(top), (height - 1) // 2: numbers.ms(top / 2)}
    out = [Line(cell(labels.get(row, ""), -5) + " ", "dim").extend(line.spans) for row, line in enumerate(lines)]
    left, middle = f"-{numbers.clock(model.window_s)}", f"-{numbers.clock(model.window_s / 2)}"
    axis = left.ljust(plot // 2) + middle
    return [*out, Line("      " + axis.ljust(max(0, plot - 3)) + "now", "dim")]


def _narrow(model: Model, frame: Frame, width: int, height: int) -> list[Line]:
    out = [_fitting(_pool_head(), width, "head")]
    out += [_fitting(_pool_parts(model, frame, name, max(8, width - 72)), width) for name in _pools(frame)]
    left = height - len(out)
    rows = len(model.workers())
    workers_height = min(rows + 1, max(3, left - 8))
    out.append(rule(f"Workers ({rows})", width, _table_hint(model, "workers")))
    out += tables.workers(model, width, workers_height, has_focus=model.panel == "workers")
    left -= workers_height + 1
    if left >= 5:
        staged = f" ({len(model.staged)} staged)" if model.staged else ""
        out.append(rule(f"Tune rev {frame.rev}{staged}", width, "t: full list"))
        knobs = tables.knobs(model, width, 2 if height < 30 else 7, has_focus=model.panel == "tune")[1:]
        out += knobs
        left -= 1 + len(knobs)
    if left >= 2:
        lines = tables.log_lines(model.logs()[-(left - 1) :], width, is_brief=True)[-(left - 1) :]
        out.append(rule("Log", width, _log_hint(model)))
        out += lines
    return out


def _pools(frame: Frame) -> list[str]:
    if frame.pools["colocated"].total:
        return ["router", "colocated"]
    return ["router", "prefill", "kv-xfer", "decode"]


def _fitting(parts: list[Line], width: int, role: str = "") -> Line:
    """Whole columns only: what does not fit is left out, the least missed first."""
    kept, room = set[int](), width
    for index in (0, 1, 2, 3, 5, 6, 4, 7):  # name, queue, running and KV; latency, rate, the gauge, its last minute
        if parts[index].width <= room:
            kept.add(index)
            room -= parts[index].width
    line = Line()
    for index in sorted(kept):
        line.extend(parts[index].spans)
    return line.all_as(role) if role else line


def _pool_head() -> list[Line]:
    titles = (f" {'POOL':<9}", f"{'Q/hi':>6} ", f"{'RUN':>7} ", f"{'KV%':>4} ", f"{'KV  lo┊ hi┃':<13}")
    return [Line(title) for title in (*titles, f"{'p50/p95':>14}      ", f"{'RATE':>7} ", "60s".ljust(8))]


def _pool_parts(model: Model, frame: Frame, name: str, spark_width: int) -> list[Line]:
    """One line a pool, in its columns."""
    rates: dict[str, Read] = {
        "router": lambda point: point.req_s,
        "prefill": lambda point: point.prefill_s,
        "kv-xfer": lambda point: point.kv_bytes_s,
        "decode": lambda point: point.output_s,
        "colocated": lambda point: point.output_s,
    }
    values = model.history.last(60, spark_width, rates[name])
    top = charts.nice_top(max((value for value in values if value is not None), default=0.0))
    if name == "kv-xfer":
        decode = [worker for worker in frame.workers if worker.role == "decode"]
        queue = sum(int(worker.load.get("expected") or 0) for worker in decode)
        moving = sum(int(worker.load.get("receiving") or 0) for worker in decode)
        pool = Pool(role=name, ready=0, total=0, queue=queue, running=moving, rate=frame.stats.get("kv_bytes_s"))
        series, label = frame.figures("transfer"), "lat"
    else:
        pool = frame.router if name == "router" else frame.pools[name]
        series, label = pool.step, {"router": "ttft", "prefill": "read"}.get(name, "itl")
    queue_text = f"{pool.queue}/{pool.queue_high:g}" if pool.queue_high else str(pool.queue)
    run = f"{pool.running}/{pool.running_max}" if pool.running_max and name != "prefill" else str(pool.running)
    role = charts.level_role(pool.kv, pool.kv_low, pool.kv_high)
    gauge = Line(" " * 13)
    if pool.kv is not None:
        bar = charts.gauge(pool.kv, 11, 1.0, pool.kv_low, pool.kv_high)
        gauge = Line().extend(bar).add("▲ " if role in ("warn", "bad") else "  ", role)
    queue_role = charts.level_role(pool.queue, pool.queue_low, pool.queue_high) if pool.queue_high else ""
    return [
        Line(f" {name:<9}", "bold"),
        Line(cell(queue_text, -6) + " ", queue_role),
        Line(cell(run, -7) + " "),
        Line(cell("-" if pool.kv is None else f"{pool.kv * 100:.0f}", -4) + " ", role),
        gauge,
        Line(cell(numbers.pair(series.p50, series.p95).replace(" / ", "/"), -14)).add(f" {label:<4} ", "dim"),
        Line(cell(numbers.count(pool.rate), -7) + " "),
        Line(charts.spark(values, spark_width, top), "spark"),
    ]


def _tiny(model: Model, frame: Frame, width: int) -> list[Line]:
    out = []
    for name in _pools(frame):
        if name == "kv-xfer":
            moved = frame.figures("transfer")
            out.append(Line("kv-xfer ", "bold").add(f"lat {numbers.pair(moved.p50, moved.p95)}"))
            continue
        pool = frame.router if name == "router" else frame.pools[name]
        ready = "●" if pool.ready == pool.total else "▲"
        line = Line(f"{name:<8} ", "bold").add(
            f"{ready} {pool.ready}/{pool.total} ", "good" if ready == "●" else "warn"
        )
        line.add(f"q {pool.queue} run {pool.running} ")
        out.append(
            line.add("" if pool.kv is None else f"kv {numbers.share(pool.kv)} ").add(
                numbers.pair(pool.step.p50, pool.step.p95)
            )
        )
    return out + [Line(f"▲ {alert.text}", "warn") for alert in model.watch.open]
