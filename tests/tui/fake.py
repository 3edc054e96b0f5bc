"""A stack that never ran: snapshots made by hand, and a source that gives them and remembers what it was told."""

import threading
from typing import Any

from pdctl.snapshot import Json, LogLine, Snapshot
from server.errors import PdctlError

START = 1_764_450_000.0


def figures(p50: float, p95: float, n: int = 50) -> Json:
    return {"p50": p50, "p95": p95, "n": n}


def load(waiting: int, running: int, used: int, total: int = 1000, **more: Any) -> Json:
    return {
        "waiting": waiting,
        "running": running,
        "expected": 1,
        "receiving": 0,
        "pushing": 1,
        "blocks_total": total,
        "blocks_used": used,
        "blocks_granted": 0,
        "slots_total": 64,
        "slots_free": 60,
        "over_high": False,
        "preemptions": 0,
        "busy_share": 0.5,
        "counters": {"failed": 0.0, "checksum_failures": 0.0},
        "integrity": "",
        **more,
    }


def knob(now: Any, boot: Any, low: float, high: float, **more: Any) -> Json:
    return {
        "now": now,
        "boot": boot,
        "range": [low, high],
        "step": 1,
        "auto": False,
        "unit": "tokens",
        "applies": "now",
        "help": "what it is for",
        **more,
    }


def process(name: str, role: str, pid: int, **more: Any) -> Json:
    return {
        "name": name,
        "role": role,
        "state": "ready",
        "pid": pid,
        "stage": "ready",
        "share": 1.0,
        "started_at": START - 8000,
        "ready_at": START - 7990,
        "gpus": [] if role == "router" else [str(pid % 4)],
        "log": f"/state/logs/{name}.log",
        **more,
    }


def knobs(rev: int = 3, **now: Any) -> Json:
    found = {
        "router.queue_high": knob(50, 50, 1, 4096, unit="requests"),
        "prefill.token_budget": knob(2048, 4096, 64, 8192, applies="next step"),
        "prefill.queue_high": knob(8, 8, 1, 4096, unit="prompts"),
        "transfer.chunk_tokens": knob(64, 64, 16, 8192, step=16, applies="next push"),
        "decode.kv_low": knob(0.8, 0.8, 0.05, 1.0, unit="share"),
        "decode.kv_high": knob(0.92, 0.92, 0.05, 1.0, unit="share"),
        "decode.max_running": knob(64, 64, 1, 64, unit="sequences", applies="drains"),
        "hybrid.threshold_tokens": knob("auto", 256, 0, 8192, auto=True),
    }
    for name, value in now.items():
        found[name.replace("__", ".")]["now"] = value
    return {"version": 1, "rev": rev, "read_only": False, "knobs": found}


def stats(requests: int = 100) -> Json:
    return {
        "ttft_ms": figures(212, 640),
        "itl_ms": figures(18, 24),
        "second_token_ms": figures(21, 30),
        "tpot_ms": figures(18, 24),
        "e2e_ms": figures(2900, 7100),
        "queue_ms": figures(0.4, 2.5),
        "prefill_queue_ms": figures(12, 80),
        "grant_wait_ms": figures(0.9, 4.2),
        "prefill_ms": figures(41, 66),
        "transfer_ms": figures(7.2, 19),
        "req_s": 18.4,
        "error_share": 0.001,
        "slo_share": 0.97,
        "prompt_tok_s": 41000.0,
        "prefill_tok_s": 38200.0,
        "output_tok_s": 3100.0,
        "kv_bytes_s": 12_670_153_523,
        "kv_bytes_per_seq": 100_663_296,
        "totals": {
            "requests": requests,
            "errors": 0,
            "resends": 2,
            "prompt_tokens": requests * 2100,
            "prefill_tokens": requests * 2000,
            "output_tokens": requests * 170,
            "kv_bytes": requests * 10**8,
        },
        "workers": {
            "prefill-0": {"tok_s": 19600, "step_ms": figures(41, 66), "transfer_ms": figures(7, 19)},
            "prefill-1": {"tok_s": 18600, "step_ms": figures(40, 61), "transfer_ms": figures(7, 18)},
            "decode-0": {"tok_s": 1600, "step_ms": figures(18, 25), "transfer_ms": figures(7, 19)},
            "decode-1": {"tok_s": 1500, "step_ms": figures(17, 23), "transfer_ms": figures(7, 17)},
        },
    }


def worker(name: str, role: str, state: str, found: Json) -> Json:
    return {
        "name": name,
        "role": role,
        "state": state,
        "instance": f"{name}-instance",
        "address": f"unix:/run/{name}.sock",
        "open": 3,
        "load": found,
        "heartbeat": {"steps": 9, "step_age_s": 0.01, "predicted_s": 0.04, "busy": ""},
    }


def request(id: str, **more: Any) -> Json:
    return {
        "id": id,
        "request_id": f"r-{id}",
        "state": "done",
        "age_s": 4.0,
        "path": "pd",
        "prefill": "prefill-0",
        "decode": "decode-0",
        "prompt_tokens": 2000,
        "output_tokens": 170,
        "ttft_ms": 212.0,
        "tpot_ms": 18.0,
        "total_ms": 3300.0,
        "reason": "stop",
        **more,
    }


def snapshot(at: float = START, requests: int = 100, **more: Any) -> Snapshot:
    """Two prefill and two decode workers; decode-0 is over its low mark, decode-1 drains."""
    workers = [
        worker("prefill-0", "prefill", "connected", load(3, 2, 410)),
        worker("prefill-1", "prefill", "connected", load(1, 1, 350)),
        worker("decode-0", "decode", "connected", load(2, 26, 860)),
        worker("decode-1", "decode", "draining", load(0, 22, 760)),
    ]
    processes = [process(w["name"], w["role"], 4188 + i) for i, w in enumerate(workers)]
    processes.append(process("router", "router", 4130))
    stack = {
        "name": "llama8b-2p2d",
        "state": "ready",
        "pid": 4121,
        "ready_at": START - 7980,
        "port": 8000,
        "profile": {"slo": {"ttft_p95": 0.8, "tpot_p95": 0.04}, "transfer": {"backend": "nixl", "latency_warn": 0.05}},
        "processes": processes,
    }
    router = {"state": "ready", "waiting": 6, "running": 61, "queue_high": 50, "models": ["llama-3.1-8b"], "up_s": 7980}
    fields: Json = {
        "stack": stack,
        "state": {"rev": 3, "router": router, "workers": workers, "stats": stats(requests)},
        "knobs": knobs(),
        "requests": [
            request("chatcmpl-1", state="running", reason="", total_ms=900.0),
            request("chatcmpl-2", ttft_ms=640.0),
            request("cmpl-3", path="colocated", prefill="", prompt_tokens=12),
        ],
        "audit": [
            {
                "rev": 3,
                "at": START - 30,
                "op": "set",
                "by": "alice@box",
                "before": {"prefill.token_budget": 4096},
                "after": {"prefill.token_budget": 2048},
                "reason": "long prompts",
                "revert_at": 0.0,
                "pending": [],
            }
        ],
        "logs": [
            LogLine("prefill-0", START - 9, "info", "chunk 7/9 req=c1f2 2048 tok 40 ms"),
            LogLine("decode-0", START - 8, "warn", "kv 86% > low mark 80%: admission slowed"),
            LogLine("router", START - 7, "error", "worker decode-1 fell silent"),
            LogLine("router", START - 6, "info", "a line with \x1b[31mcolours\x1b[0m of its own"),
        ],
    }
    return Snapshot(at, **(fields | more))


class FakeSource:
    """Gives `snapshot`; `lost` makes it silent. What it was told is in `calls`; each poll releases `polled`."""

    name = "llama8b-2p2d"

    def __init__(self, first: Snapshot | None = None, *, is_read_only: bool = False) -> None:
        self.is_read_only = is_read_only
        self.snapshot = first or snapshot()
        self.lost = ""
        self.refusal = ""
        self.calls: list[tuple[Any, ...]] = []
        self.polled = threading.Semaphore(0)

    def poll(self) -> Snapshot:
        self.polled.release()
        if self.lost:
            raise PdctlError(self.lost)
        return self.snapshot

    def earlier(self) -> list[Snapshot]:
        return [snapshot(START - 60 + i, 40 + i) for i in range(60)]

    def _note(self, *call: Any) -> Json:
        self.calls.append(call)
        if self.refusal:
            raise PdctlError(self.refusal)
        return {"rev": 4, "changed": {}, "pending": []}

    def change(self, values: Json, *, if_rev: int, reason: str, revert_after_s: float | None) -> Json:
        self._note("change", values, if_rev, reason, revert_after_s)
        return {"rev": 4, "changed": {name: {"from": None, "to": new} for name, new in values.items()}}

    def undo(self) -> Json:
        return self._note("undo")

    def drain(self, worker: str) -> None:
        self._note("drain", worker)

    def resume(self, worker: str) -> None:
        self._note("resume", worker)

    def restart(self, worker: str) -> None:
        self._note("restart", worker)

    def kill(self, worker: str) -> None:
        self._note("kill", worker)

    def request(self, id: str) -> Json:
        self._note("request", id)
        record = {
            "path": "pd",
            "prefill": "prefill-0",
            "decode": "decode-0",
            "prompt_tokens": 2000,
            "cached_tokens": 0,
            "queue_ms": 1.0,
            "grant_wait_ms": 2.0,
            "prefill_start_ms": 13.0,
            "first_chunk_ms": 60.0,
            "prefill_end_ms": 200.0,
            "first_token_ms": 212.0,
            "kv_ready_ms": 219.0,
            "second_token_ms": 240.0,
            "kv_bytes": 100_663_296,
            "chunks": 32,
            "overlap": 0.9,
        }
        return {"id": id, "pdctl": record}

    def close(self) -> None:
        return
