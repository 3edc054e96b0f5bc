"""From what was read to what is drawn.

`frame` makes a `Frame` of a `Snapshot` and is pure, so that a replayed file, an export and a live screen cannot differ.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pdctl.snapshot import Json, Snapshot
from pdctl.tui.frame import Change, Figures, Frame, Knob, Pool, Worker

KNOBS = (
    "router.queue_high",
    "prefill.token_budget",
    "prefill.chunk_tokens",
    "prefill.max_seqs",
    "prefill.queue_high",
    "transfer.chunk_tokens",
    "transfer.max_inflight",
    "decode.kv_low",
    "decode.kv_high",
    "decode.queue_low",
    "decode.queue_high",
    "decode.max_running",
    "decode.prefill_tokens",
    "decode.idle_swap_s",
    "hybrid.threshold_tokens",
)


def frame(snapshot: Snapshot) -> Frame:
    stack, state = snapshot.stack or {}, snapshot.state or {}
    profile: Json = stack.get("profile") or {}
    stats: Json = state.get("stats") or {}
    knobs = read_knobs(snapshot.knobs, profile)
    values = {knob.name: knob.now for knob in knobs}
    workers = _workers(snapshot, stack, state, stats, values)
    router = state.get("router") or {}
    port = stack.get("port")
    slo: Json = profile.get("slo") or {}
    verdict = str(stack.get("state") or router.get("state") or "unknown")
    return Frame(
        at=snapshot.at,
        name=str(stack.get("name") or "stack"),
        state=verdict if snapshot.supervisor == "ready" else f"supervisor {snapshot.supervisor}",
        url=f":{port}/v1" if port else str(stack.get("url") or ""),
        model=", ".join(router.get("models") or []) or str((profile.get("model") or {}).get("path", "")),
        up_s=max(0.0, snapshot.at - stack["ready_at"]) if stack.get("ready_at") else float(router.get("up_s") or 0),
        supervisor=snapshot.supervisor,
        supervisor_pid=int(stack.get("pid") or 0),
        rev=int((snapshot.knobs or {}).get("rev") or state.get("rev") or 0),
        router=_router(workers, router, stats, values),
        pools={role: _pool(role, workers, stats, values) for role in ("prefill", "decode", "colocated")},
        workers=workers,
        knobs=knobs,
        changes=tuple(_change(entry) for entry in snapshot.audit),
        requests=tuple(snapshot.requests),
        logs=tuple(snapshot.logs),
        stats=stats,
        slo_ttft_ms=float(slo.get("ttft_p95", 0.8)) * 1000,
        slo_tpot_ms=float(slo.get("tpot_p95", 0.04)) * 1000,
        latency_warn_ms=float((profile.get("transfer") or {}).get("latency_warn", 0.05)) * 1000,
        transfer=str((profile.get("transfer") or {}).get("backend", "-")),
        is_read_only=bool((snapshot.knobs or {}).get("read_only")),
        reason=str(stack.get("reason") or ""),
        problem=snapshot.problem,
    )


def _workers(
    snapshot: Snapshot, stack: Json, state: Json, stats: Json, values: Mapping[str, Any]
) -> tuple[Worker, ...]:
    seen = {str(worker.get("name")): worker for worker in state.get("workers") or []}
    by_worker: Json = stats.get("workers") or {}
    processes: list[Json] = list(stack.get("processes") or [])
    if not processes:  # by URL alone: the router is the only witness
        processes = [{"name": "router", "role": "router", "pid": (state.get("router") or {}).get("pid")}]
        processes += [{"name": name, "role": worker.get("role")} for name, worker in seen.items()]
    found = []
    for process in sorted(processes, key=_order):
        name = str(process["name"])
        if process.get("role") == "router":
            found.append(_router_row(snapshot, process, state, stats))
        else:
            found.append(_worker(snapshot, process, seen.get(name) or {}, by_worker.get(name) or {}, values))
    return tuple(found)


def _order(process: Json) -> tuple[int, str, int]:
    roles = ("router", "prefill", "decode", "colocated")
    role, (stem, _, number) = str(process.get("role")), str(process["name"]).rpartition("-")
    return (roles.index(role) if role in roles else 9, stem, int(number) if number.isdecimal() else 0)


def _process_fields(snapshot: Snapshot, process: Json) -> Json:
    started = process.get("ready_at") or process.get("started_at") or 0.0
    gpus, cpus = process.get("gpus") or [], process.get("cpus") or []
    where = f"gpu {','.join(map(str, gpus))}" if gpus else f"cpu {','.join(map(str, cpus))}" if cpus else "-"
    exits = process.get("exits") or []
    return {
        "name": str(process["name"]),
        "role": str(process.get("role") or ""),
        "pid": int(process.get("pid") or 0),
        "where": where,
        "up_s": max(0.0, snapshot.at - started) if started else 0.0,
        "stage": str(process.get("stage") or ""),
        "share": float(process.get("share") or 0.0),
        "restarts": int(process.get("restarts") or 0),
        "log": str(process.get("log") or ""),
        "detail": process.get("detail") or {},
        "reason": str(exits[-1]["reason"]) if exits and process.get("state") != "ready" else "",
    }


def _router_row(snapshot: Snapshot, process: Json, state: Json, stats: Json) -> Worker:
    router: Json = state.get("router") or {}
    return Worker(
        **_process_fields(snapshot, process),
        state=str(process.get("state") or router.get("state") or "unknown"),
        queue=router.get("waiting"),
        running=router.get("running"),
        tok_s=stats.get("req_s"),
        step=Figures.of(stats.get("ttft_ms")),
        instance=str(router.get("instance") or ""),
    )


def _worker(snapshot: Snapshot, process: Json, seen: Json, stats: Json, values: Mapping[str, Any]) -> Worker:
    load: Json = seen.get("load") or {}
    total = load.get("blocks_total") or 0
    role = str(process.get("role") or "")
    limit = values.get("prefill.max_seqs" if role == "prefill" else f"{role}.max_running")
    fields = _process_fields(snapshot, process)
    fields["pid"] = fields["pid"] or int(seen.get("pid") or 0)
    fields["reason"] = fields["reason"] or str(seen.get("reason") or "")
    return Worker(
        **fields,
        state=_state(str(process.get("state") or "ready"), seen),
        queue=(load.get("waiting") or 0) + (load.get("receiving") or 0) if load else None,
        running=load.get("running"),
        running_max=int(limit) if isinstance(limit, int) else None,
        kv=((load.get("blocks_used") or 0) + (load.get("blocks_granted") or 0)) / total if total else None,
        tok_s=stats.get("tok_s"),
        step=Figures.of(stats.get("step_ms")),
        transfer=Figures.of(stats.get("transfer_ms")),
        busy=load.get("busy_share"),
        open=int(seen.get("open") or 0),
        instance=str(seen.get("instance") or ""),
        address=str(seen.get("address") or ""),
        load=load,
        heartbeat=seen.get("heartbeat") or {},
    )


def _state(process: str, seen: Json) -> str:
    """The supervisor knows whether it lives; the router, whether it can be used."""
    if process != "ready" or not seen:
        return process
    said = str(seen.get("state") or "")
    if seen.get("is_draining") or said in ("draining", "drained"):
        return "draining" if said != "drained" else said
    return {"connected": "ready"}.get(said, said or process)


def _router(workers: Sequence[Worker], router: Json, stats: Json, values: Mapping[str, Any]) -> Pool:
    row = next((worker for worker in workers if worker.role == "router"), None)
    return Pool(
        role="router",
        ready=int(row is not None and row.state == "ready"),
        total=1,
        queue=int(router.get("waiting") or 0),
        queue_high=_number(values.get("router.queue_high", router.get("queue_high"))),
        running=int(router.get("running") or 0),
        rate=stats.get("req_s"),
        step=Figures.of(stats.get("ttft_ms")),
    )


def _pool(role: str, workers: Sequence[Worker], stats: Json, values: Mapping[str, Any]) -> Pool:
    mine = [worker for worker in workers if worker.role == role]
    shares = [worker.kv for worker in mine if worker.kv is not None]
    total = sum(int(worker.load.get("blocks_total") or 0) for worker in mine)
    used = sum(int(w.load.get("blocks_used") or 0) + int(w.load.get("blocks_granted") or 0) for w in mine)
    limits = [worker.running_max for worker in mine if worker.running_max is not None]
    rate = stats.get("prefill_tok_s" if role == "prefill" else "output_tok_s")
    return Pool(
        role=role,
        ready=sum(worker.state == "ready" for worker in mine),
        total=len(mine),
        queue=sum(worker.queue or 0 for worker in mine),
        queue_low=_number(values.get(f"{role}.queue_low")),
        queue_high=_number(values.get(f"{role}.queue_high")),
        running=sum(worker.running or 0 for worker in mine),
        running_max=sum(limits) if limits else None,
        kv=used / total if total else None,
        kv_worst=max(shares, default=None),
        kv_low=_number(values.get(f"{role}.kv_low")),
        kv_high=_number(values.get(f"{role}.kv_high")),
        rate=rate,
        step=Figures.of(stats.get("prefill_ms" if role == "prefill" else "itl_ms")),
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_knobs(value: Json | None, profile: Json) -> tuple[Knob, ...]:
    """What the router says; a router that has no such API leaves the profile's values, to look at only."""
    if value is None:
        return tuple(_from_profile(profile))
    knobs = value.get("knobs")
    return tuple(_knob(name, entry) for name, entry in knobs.items()) if isinstance(knobs, dict) else ()


def _knob(name: str, entry: Json) -> Knob:
    """docs/admin-api.md, Knobs."""
    low, high = (entry.get("range") or [None, None])[:2]
    step = int(entry.get("step") or 1)
    words = ("auto",) if entry.get("auto") else ()
    text = "-" if low is None or high is None else f"{low:g}..{high:g}"
    text += (f" x{step}" if step > 1 else "") + "".join(f"|{word}" for word in words)
    return Knob(
        name=name,
        now=entry.get("now"),
        boot=entry.get("boot"),
        range=text,
        unit=str(entry.get("unit") or ""),
        applies=str(entry.get("applies") or ""),
        help=str(entry.get("help") or ""),
        low=_number(low),
        high=_number(high),
        step=step,
        words=words,
        measured=entry.get("measured"),
    )


def _from_profile(profile: Json) -> list[Knob]:
    found = []
    for name in KNOBS:
        section, _, key = name.partition(".")
        if key in (table := profile.get(section) or {}):
            found.append(Knob(name, table[key], table[key], applies="not here", is_live=False))
    return found


def _change(entry: Json) -> Change:
    before, after = entry.get("before") or {}, entry.get("after") or {}
    return Change(
        rev=int(entry.get("rev") or 0),
        at=float(entry.get("at") or 0.0),
        op=str(entry.get("op") or "set"),
        who=str(entry.get("by") or ""),
        reason=str(entry.get("reason") or ""),
        changes=tuple((str(name), before.get(name), after[name]) for name in after),
        revert_at=float(entry.get("revert_at") or 0.0),
        pending=tuple(entry.get("pending") or ()),
    )
