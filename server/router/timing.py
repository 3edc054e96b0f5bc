"""The stage record of one sequence: where its time went, in ms from arrival at the router.

1. The router marks arrival, dispatch, first and second token on its own clock.
2. Each worker's Done brings its stages, in seconds since it received Prefill or Decode (docs/protocol.md, Stages).
   They are laid on the router's clock at the moment of dispatch: one loop turn and one socket off, below a millisecond.
3. `Recent` keeps the last thousand for /admin/requests/{id}.
"""

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from server.router.stats import Stats

KEPT = 1000
_COUNTS = ("kv_bytes", "wire_bytes", "chunks", "resends")


@dataclass(slots=True)
class Record:
    arrival: float = field(default_factory=time.perf_counter)
    request: str = ""
    traceparent: str = ""  # of the client's trace, if it has one
    path: str = ""
    prefill: str = ""
    decode: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    uncached_tokens: int = 0  # as the router believed when it chose the path
    by_threshold: bool = False  # the path, between two that there were
    sent: float = 0.0
    first: float = 0.0
    second: float = 0.0
    last: float = 0.0
    reason: str = ""
    endpoint: str = ""
    stats: Stats | None = field(default=None, repr=False)  # a probe's record has none: nobody asked for its tokens
    prefill_stages: Mapping[str, float] = field(default_factory=dict)
    decode_stages: Mapping[str, float] = field(default_factory=dict)

    def mark_token(self) -> None:
        now = time.perf_counter()
        self.output_tokens += 1
        if self.output_tokens == 1:
            self.first = now
            if self.stats is not None:
                self.stats.first_token(now - self.arrival)
        else:
            if self.output_tokens == 2:
                self.second = now
            if self.stats is not None:
                self.stats.next_token(self.decode, now - self.last)
        self.last = now

    @property
    def ran_ahead(self) -> bool:
        """Whether prefill went on with it while decode had no room (adr/0011)."""
        return "ahead" in self.prefill_stages

    def as_dict(self) -> dict[str, Any]:
        """The stage record (docs/protocol.md). What did not happen, or was not reported, is null."""
        p, d = self.prefill_stages, self.decode_stages
        return {
            "path": self.path,
            "prefill": self.prefill or None,
            "decode": self.decode or None,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "queue_ms": self._since_arrival(self.sent),
            "prefill_queue_ms": _ms(p.get("start")),
            "grant_wait_ms": _gap(p, "grant_asked", "granted"),
            "prefill_start_ms": self._at(p, "start"),
            "first_chunk_ms": self._at(d, "first_chunk"),
            "prefill_end_ms": self._at(p, "end"),
            "first_token_ms": self._since_arrival(self.first),
            "kv_ready_ms": self._at(d, "kv_ready"),
            "second_token_ms": self._since_arrival(self.second),
            "transfer_ms": _ms(d.get("transfer")),
            **{name: int(d[name]) if name in d else None for name in _COUNTS},
            "overlap": d.get("overlap"),
            "decode_queue_ms": _gap(d, "ready", "start"),
            "ahead_ms": self._at(p, "ahead"),
            "cut": int(p["cut"]) if "cut" in p else None,
        }

    def as_row(self) -> dict[str, Any]:
        """One line of a table of requests; the rest is a click away."""
        now = time.perf_counter()
        return {
            "endpoint": self.endpoint,
            "request_id": self.request,
            "state": "done" if self.reason else "running" if self.first else "waiting",
            "age_s": round(now - self.arrival, 3),
            "path": self.path,
            "prefill": self.prefill,
            "decode": self.decode,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "ttft_ms": self._since_arrival(self.first),
            "tpot_ms": _ms((self.last - self.first) / (self.output_tokens - 1)) if self.output_tokens > 1 else None,
            "total_ms": self._since_arrival(self.last),
            "reason": self.reason,
        }

    def _since_arrival(self, mark: float) -> float | None:
        return _ms(mark - self.arrival) if mark else None

    def _at(self, stages: Mapping[str, float], name: str) -> float | None:
        return _ms(self.sent - self.arrival + stages[name]) if name in stages else None


def _gap(stages: Mapping[str, float], first: str, then: str) -> float | None:
    return _ms(stages[then] - stages[first]) if first in stages and then in stages else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


class Recent:
    """Records by response id and by X-Request-Id; the oldest leave first."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._records: OrderedDict[str, list[Record]] = OrderedDict()
        self._alias: dict[str, str] = {}  # X-Request-Id -> response id; the newest wins when two carry the same

    def add(self, response_id: str, request_id: str, records: list[Record]) -> None:
        self._records[response_id] = records
        self._alias[request_id] = response_id
        while len(self._records) > self._kept:
            _, old = self._records.popitem(last=False)
            if old and self._alias.get(old[0].request) not in self._records:
                self._alias.pop(old[0].request, None)

    def rows(self, limit: int) -> list[dict[str, Any]]:
        """The newest first; a request of several sequences has a row for each."""
        rows = []
        for name, records in reversed(self._records.items()):
            rows += [{"id": name, **record.as_row()} for record in records]
            if len(rows) >= limit:
                break
        return rows[:limit]

    def get(self, name: str) -> tuple[str, list[Record]] | None:
        response_id = self._alias.get(name, name)
        records = self._records.get(response_id)
        return None if records is None else (response_id, records)
