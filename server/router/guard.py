"""`tune.auto_revert`: a change after which requests are slower than it allows is taken back by itself.

After each `set`, for as long as `within` says, the requests that arrived since are looked at whenever one ends. Those
that were there before the change do not count: they were slow, or fast, for other reasons.
"""

import time
from collections.abc import Callable

from server.config import AutoRevert, Slo
from server.router.timing import Record

MIN_REQUESTS = 8


class Guard:
    """`on_breach(rev, why)` is called once for a revision."""

    def __init__(self, rule: AutoRevert | None, slo: Slo, on_breach: Callable[[int, str], None]) -> None:
        self._rule = rule
        self._limit_s = rule.limit_s(slo) if rule else 0.0
        self._on_breach = on_breach
        self._rev = 0  # under watch; 0 = none
        self._since = 0.0
        self._seconds: list[float] = []

    def begin(self, rev: int) -> None:
        """The newest change is the one to blame: an earlier one is no longer watched."""
        if self._rule is not None:
            self._rev, self._since, self._seconds = rev, time.perf_counter(), []

    def end(self) -> None:
        self._rev = 0

    def observe(self, record: Record) -> None:
        rule = self._rule
        if rule is None or not self._rev or record.arrival < self._since:
            return
        if time.perf_counter() - self._since > rule.within:
            self._rev = 0
            return
        value = _value(rule.metric, record)
        if value is None:
            return
        self._seconds.append(value)
        found = sorted(self._seconds)[min(len(self._seconds) - 1, len(self._seconds) * rule.percentile // 100)]
        if len(self._seconds) >= MIN_REQUESTS and found > self._limit_s:
            rev, self._rev = self._rev, 0
            self._on_breach(rev, f"{rule.condition}: {found:.3f} s over {len(self._seconds)} requests")


def _value(metric: str, record: Record) -> float | None:
    if metric == "ttft":
        return record.first - record.arrival if record.first else None
    return (record.last - record.first) / (record.output_tokens - 1) if record.output_tokens > 1 else None
