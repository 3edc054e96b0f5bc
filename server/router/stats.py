"""What the last minute looked like: percentiles and rates for /admin/state, beside the counters since the start.

1. A `Record` tells its `Stats` of every token (one append) and, once, of its end.
2. `Window` keeps (time, value) pairs of the last minute, the newest few thousand of them.
3. `Stats.as_dict` sorts them when somebody asks: once a second and console, not once a token.

A console that computed these from Prometheus' buckets would show bucket borders; what it shows here was measured.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

WINDOW_S = 60.0
# A minute of tokens of a busy router is more than this; then the window is shorter, and says so by `span_s`.
KEPT = 8192
SERIES = ("ttft", "itl", "second_token", "tpot", "e2e", "queue", "prefill_queue", "grant_wait", "transfer", "prefill")


class Window:
    """Values with the time they came."""

    def __init__(self, clock: Callable[[], float], kept: int = KEPT, since: float | None = None) -> None:
        self._clock = clock
        self._since = clock() if since is None else since
        self._items: deque[tuple[float, float]] = deque(maxlen=kept)

    def add(self, value: float, now: float | None = None) -> None:
        self._items.append((self._clock() if now is None else now, value))

    def values(self) -> list[float]:
        self._drop()
        return [value for _, value in self._items]

    @property
    def span_s(self) -> float:
        """A router younger than a minute has a shorter one."""
        return min(WINDOW_S, max(1.0, self._clock() - self._since))

    def rate(self) -> float:
        """Sum a second, over the minute, the router's age, or what is kept of it."""
        self._drop()
        if not self._items:
            return 0.0
        is_full = len(self._items) == self._items.maxlen
        span = max(1.0, self._clock() - self._items[0][0]) if is_full else self.span_s
        return sum(value for _, value in self._items) / span

    def _drop(self) -> None:
        since = self._clock() - WINDOW_S
        while self._items and self._items[0][0] < since:
            self._items.popleft()


def percentile(values: list[float], share: float) -> float:
    """Nearest rank of sorted `values`, so that every figure shown is one that was measured."""
    return values[max(0, math.ceil(share * len(values)) - 1)]


def figures(window: Window) -> dict[str, float | int | None]:
    """In ms; None without a sample, for nothing measured is not 0."""
    values = sorted(window.values())
    if not values:
        return {"p50": None, "p95": None, "n": 0}
    return {
        "p50": round(percentile(values, 0.50) * 1000, 3),
        "p95": round(percentile(values, 0.95) * 1000, 3),
        "n": len(values),
    }


class _WorkerStats:
    def __init__(self, clock: Callable[[], float], since: float) -> None:
        self.tokens = Window(clock, since=since)  # since the router's start, not since its first token
        self.step = Window(clock)  # prefill: reading a prompt; decode: the gap between two tokens
        self.transfer = Window(clock)

    def as_dict(self) -> dict[str, Any]:
        return {
            "tok_s": round(self.tokens.rate(), 3),
            "step_ms": figures(self.step),
            "transfer_ms": figures(self.transfer),
        }


class Stats:
    """One router's last minute."""

    def __init__(self, slo: tuple[float, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._slo = slo  # seconds: TTFT, TPOT
        self._clock = clock
        self._started = clock()
        self._series = {name: Window(clock) for name in SERIES}
        self._errors = Window(clock)
        self._good = Window(clock)
        self._prompt_tokens, self._output_tokens = Window(clock), Window(clock)
        self._prefill_tokens = Window(clock)  # read by prefill workers; other prompts are read where they decode
        self._kv_bytes = Window(clock)
        self._bandwidth = Window(clock)
        self._workers: dict[str, _WorkerStats] = {}
        self._totals = dict.fromkeys(
            ("requests", "errors", "resends", "prompt_tokens", "prefill_tokens", "output_tokens", "kv_bytes"), 0
        )

    def first_token(self, seconds: float) -> None:
        self._series["ttft"].add(seconds)
        self._output_tokens.add(1.0)
        self._totals["output_tokens"] += 1

    def next_token(self, worker: str, gap: float) -> None:
        now, stats = self._clock(), self._of(worker)
        self._series["itl"].add(gap, now)
        self._output_tokens.add(1.0, now)
        self._totals["output_tokens"] += 1
        stats.tokens.add(1.0, now)
        stats.step.add(gap, now)

    def request_over(self, status: str) -> None:
        """ "cancelled" is the client's own wish; 4xx are its mistakes; what is left at 5xx and 429 is ours."""
        is_error = status.startswith("5") or status == "429"
        self._errors.add(float(is_error))
        self._totals["requests"] += 1
        self._totals["errors"] += is_error

    def sequence_over(
        self,
        *,
        prefill: str,
        decode: str,
        prompt_tokens: int,
        read_tokens: int,
        seconds: dict[str, float],
        kv_bytes: int,
        resends: int,
    ) -> None:
        """`seconds` by stage, what is known of them; `read_tokens` are those of the prompt that no cache had."""
        for name, value in seconds.items():
            if name != "itl" and name != "ttft" and name in self._series:
                self._series[name].add(value)
        self._prompt_tokens.add(prompt_tokens)
        self._totals["resends"] += resends
        self._totals["prompt_tokens"] += prompt_tokens
        self._totals["kv_bytes"] += kv_bytes
        if prefill:
            reader = self._of(prefill)
            reader.tokens.add(read_tokens)
            self._prefill_tokens.add(read_tokens)
            self._totals["prefill_tokens"] += read_tokens
            if "prefill" in seconds:
                reader.step.add(seconds["prefill"])
        if kv_bytes and seconds.get("transfer"):
            self._kv_bytes.add(kv_bytes)
            # Bytes and time of the same transfer: a rate that no link can exceed.
            self._bandwidth.add(kv_bytes / seconds["transfer"])
            for name in (prefill, decode):
                self._of(name).transfer.add(seconds["transfer"])
        if "ttft" in seconds:
            ttft_s, tpot_s = self._slo
            self._good.add(float(seconds["ttft"] <= ttft_s and seconds.get("tpot", 0.0) <= tpot_s))

    def _of(self, worker: str) -> _WorkerStats:
        found = self._workers.get(worker)
        if found is None:
            found = self._workers[worker] = _WorkerStats(self._clock, self._started)
        return found

    def as_dict(self) -> dict[str, Any]:
        errors, good = self._errors.values(), self._good.values()
        sizes, speeds = self._kv_bytes.values(), sorted(self._bandwidth.values())
        return {
            "window_s": WINDOW_S,
            **{f"{name}_ms": figures(window) for name, window in self._series.items()},
            "req_s": round(len(errors) / self._errors.span_s, 3),
            "error_share": round(sum(errors) / len(errors), 4) if errors else None,
            "slo_share": round(sum(good) / len(good), 4) if good else None,
            "prompt_tok_s": round(self._prompt_tokens.rate(), 3),
            "prefill_tok_s": round(self._prefill_tokens.rate(), 3),
            "output_tok_s": round(self._output_tokens.rate(), 3),
            "kv_bytes_s": round(percentile(speeds, 0.5)) if speeds else None,
            "kv_bytes_per_seq": round(sum(sizes) / len(sizes)) if sizes else None,
            "totals": dict(self._totals),
            "workers": {name: stats.as_dict() for name, stats in self._workers.items()},
        }
