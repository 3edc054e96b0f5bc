"""One moment of a stack, typed: what every view draws, whether it came live, from a file or from a test."""

from typing import Any

import msgspec

from pdctl.snapshot import Json, LogLine


class Figures(msgspec.Struct, frozen=True):
    """Of the last minute, ms."""

    p50: float | None = None
    p95: float | None = None
    n: int = 0

    @classmethod
    def of(cls, value: Any) -> "Figures":
        """As /admin/state has them; anything else is nothing measured."""
        return cls(value.get("p50"), value.get("p95"), int(value.get("n") or 0)) if isinstance(value, dict) else cls()


class Worker(msgspec.Struct, frozen=True):
    """One process, as supervisor and router see it together."""

    name: str
    role: str
    state: str
    pid: int = 0
    where: str = "-"
    queue: int | None = None
    running: int | None = None
    running_max: int | None = None
    kv: float | None = None
    tok_s: float | None = None
    step: Figures = Figures()
    transfer: Figures = Figures()
    busy: float | None = None
    up_s: float = 0.0
    stage: str = ""
    share: float = 0.0
    restarts: int = 0
    reason: str = ""
    open: int = 0
    instance: str = ""
    address: str = ""
    log: str = ""
    load: Json = {}
    heartbeat: Json = {}
    detail: Json = {}


class Pool(msgspec.Struct, frozen=True):
    """All workers of a role; the router is a pool of one."""

    role: str
    ready: int
    total: int
    queue: int = 0
    queue_low: float | None = None
    queue_high: float | None = None
    running: int = 0
    running_max: int | None = None
    kv: float | None = None
    kv_worst: float | None = None
    kv_low: float | None = None
    kv_high: float | None = None
    rate: float | None = None
    step: Figures = Figures()


class Knob(msgspec.Struct, frozen=True):
    name: str
    now: Any
    boot: Any
    range: str = ""
    unit: str = ""
    applies: str = ""
    help: str = ""
    low: float | None = None
    high: float | None = None
    step: int = 1
    words: tuple[str, ...] = ()
    measured: int | None = None  # what `auto` comes to now
    is_live: bool = True


class Change(msgspec.Struct, frozen=True):
    """One line of the audit log; `changes` holds (knob, old, new)."""

    rev: int
    at: float
    op: str
    who: str
    reason: str
    changes: tuple[tuple[str, Any, Any], ...]
    revert_at: float = 0.0
    pending: tuple[str, ...] = ()


class Frame(msgspec.Struct, frozen=True):
    at: float
    name: str
    state: str
    url: str
    model: str
    up_s: float
    supervisor: str
    supervisor_pid: int
    rev: int
    router: Pool
    pools: dict[str, Pool]
    workers: tuple[Worker, ...]
    knobs: tuple[Knob, ...]
    changes: tuple[Change, ...]
    requests: tuple[Json, ...]
    logs: tuple[LogLine, ...]
    stats: Json
    slo_ttft_ms: float
    slo_tpot_ms: float
    latency_warn_ms: float
    transfer: str = "-"
    is_read_only: bool = False
    reason: str = ""
    problem: str = ""

    def worker(self, name: str) -> Worker | None:
        return next((worker for worker in self.workers if worker.name == name), None)

    def knob(self, name: str) -> Knob | None:
        return next((knob for knob in self.knobs if knob.name == name), None)

    def figures(self, name: str) -> Figures:
        return Figures.of(self.stats.get(f"{name}_ms"))

    @property
    def is_starting(self) -> bool:
        return self.state == "starting"
