"""The comparison with other clients: what it makes of their times, and the server that it sets them before."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from bench.clients import Seen, show
from bench.steady import SteadyWorker
from server.sequence import SeqId

A, B = (SeqId("router", n, 0) for n in (1, 2))


class LateClock:
    """Virtual time, in which every call comes `late` seconds after its moment."""

    def __init__(self, late: float) -> None:
        self._now, self._late = 0.0, late
        self._calls: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._numbers = count()

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> None:
        heapq.heappush(self._calls, (when, next(self._numbers), callback, args))

    def run(self) -> None:
        while self._calls:
            when, _, callback, args = heapq.heappop(self._calls)
            self._now = max(self._now, when + self._late)
            callback(*args)


class Worker(SteadyWorker):
    """Notes when it says which token of whom, instead of saying it."""

    def __init__(self, clock: LateClock) -> None:
        super().__init__({}, [], clock, ttft=0.1, tpot=0.02)
        self.said: list[tuple[SeqId, int, float]] = []

    def hear(self, id: SeqId, max_tokens: int) -> None:
        self.tokens[id], self.limits[id] = 0, max_tokens
        self.begin(id)

    def step(self, ids: list[SeqId]) -> None:
        for id in ids:
            self.said.append((id, self.tokens[id], self._clock.time()))
            self.tokens[id] += 1
            if self.tokens[id] == self.limits[id]:
                del self.tokens[id]


def test_a_steady_server_is_late_once_not_token_by_token() -> None:
    clock = LateClock(late=0.003)
    worker = Worker(clock)
    worker.hear(A, 50)
    clock.run()
    moments = [at for _, _, at in worker.said]
    assert [n for _, n, _ in worker.said] == list(range(50))
    assert moments == pytest.approx([0.103 + 0.02 * n for n in range(50)])
    assert worker.late == pytest.approx([0.003] * 50)


def test_streams_of_a_steady_server_keep_their_own_time() -> None:
    clock = LateClock(late=0.0)
    worker = Worker(clock)
    clock.call_at(0.0, worker.hear, A, 3)
    clock.call_at(0.007, worker.hear, B, 3)
    clock.call_at(0.13, worker.tokens.pop, A)  # aborted between its second token and its third
    clock.run()
    assert [(id, n) for id, n, _ in worker.said] == [(A, 0), (B, 0), (A, 1), (B, 1), (B, 2)]
    assert [at for *_, at in worker.said] == pytest.approx([0.1, 0.107, 0.12, 0.127, 0.147])


def seen(ttft: float, tpot: float, *, wire: float, router: tuple[float, float] = (0.1, 0.02)) -> Seen:
    return Seen([(ttft, tpot, wire)] * 3, [router] * 3)


def test_a_slower_server_is_no_difference_between_clients(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = seen(0.101, 0.02, wire=0.101), seen(0.122, 0.024, wire=0.1212, router=(0.12, 0.024))
    assert show({"pdctl bench": ours, "openai": theirs}, bar=1.5) == 0
    said = capsys.readouterr().out
    assert [line.split()[1:4] for line in said.splitlines() if line.startswith("openai")] == [
        ["122.00", "121.20", "120.00"]
    ]
    assert "largest difference 1.00 %" in said, "ours to the router's"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (seen(0.101, 0.02, wire=0.101), seen(0.106, 0.02, wire=0.105)),
        (seen(0.101, 0.02, wire=0.101), seen(0.101, 0.0209, wire=0.101)),
        (seen(0.104, 0.02, wire=0.104), seen(0.104, 0.02, wire=0.104)),
        (seen(0.101, 0.0209, wire=0.101), seen(0.101, 0.0209, wire=0.101)),
    ],
    ids=["their TTFT", "their TPOT", "our TTFT, to the router's", "our TPOT, to the router's"],
)
def test_above_the_bar_it_ends_with_1(ours: Seen, theirs: Seen) -> None:
    assert show({"pdctl bench": ours, "openai": theirs}, bar=3.0) == 1
    assert show({"pdctl bench": ours, "openai": theirs}, bar=5.0) == 0
