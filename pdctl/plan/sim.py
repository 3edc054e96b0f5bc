"""A cluster in virtual time: the router's choice, grants, steps and transfers of the real design, event by event.

    1. arrival     the router picks the pair with the shortest queue; a prompt under the threshold stays on one worker
    2. grant       the prefill half asks when it is near the front; decode promises blocks under its high mark
    3. prefill     chunk by chunk; what is computed goes to the link while the next chunk is
    4. transfer    one chunk after another on a link that both ends share; the first token does not wait for it
    5. decode      from the next step of its worker on

The schedulers, their admission, grants and preemption are the server's own code. What is left out: faults, text, the
429 of a full router queue (a plan asks what would have to be served), and prefix hits.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from pdctl.plan.loads import Arrival
from pdctl.plan.stages import Stages, StepModel
from pdctl.plan.tally import Slo, Summary, Tally
from pdctl.plan.worker import TOKEN, Request, SimWorker
from server.engine.block_pool import BlockPool
from server.engine.scheduler import Limits, Step
from server.sequence import SamplingParams, SeqId

AHEAD = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """Which workers, and how many prompt tokens send a request through the pair. Colocated only: prefill = 0."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0
    threshold: int = 0

    @property
    def num_devices(self) -> int:
        return self.prefill + self.decode + self.colocated

    def __str__(self) -> str:
        if self.colocated:
            return f"{self.colocated} colocated"
        hybrid = f" hybrid {self.threshold}" if self.threshold else ""
        return f"{self.prefill}P:{self.decode}D{hybrid}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the profile would say."""

    token_budget: int = 2048
    chunk_tokens: int = 1024
    max_seqs: int = 16
    max_running: int = 64
    local_prefill_tokens: int | None = 256
    num_blocks: int = 16_384
    block_size: int = 16
    age_limit_s: float = 5.0
    hop_s: float = 0.0  # one control message


class Cluster:
    """One simulation. Build, `run` once."""

    def __init__(
        self,
        layout: Layout,
        stages: Stages,
        sizes: Sizes | None = None,
        slo: Slo | None = None,
        skip: int = 0,
        can_leap: bool = True,
    ) -> None:
        self.now = 0.0
        self.tally = Tally(slo, skip)
        self._layout, self._stages, self._sizes = layout, stages, sizes or Sizes()
        self._can_leap = can_leap
        self._events: list[tuple[float, int, Callable[..., None], object]] = []
        self._order = count()
        self._prompts: dict[int, list[int]] = {}
        self._readers = self._pool(layout.prefill, stages.prefill, is_prefill=True)
        self._writers = self._pool(
            layout.decode or layout.colocated, stages.decode if layout.decode else stages.colocated
        )
        for worker in self._readers:
            worker.after_step = self._ask
        for worker in self._writers:
            worker.after_step = self._grant
        self._queued = [0] * len(self._readers)  # prompt tokens sent and not yet answered
        self._local = [0] * len(self._writers)
        self._open = [0] * len(self._writers)
        self._arrivals: Iterator[Arrival] = iter(())
        self._is_closed = False
        self._limit_missed = 1 << 60
        self._count = count()

    def _pool(self, size: int, model: StepModel, is_prefill: bool = False) -> list[SimWorker]:
        sizes = self._sizes
        local = None if is_prefill or self._layout.colocated else sizes.local_prefill_tokens
        limits = Limits(
            token_budget=sizes.token_budget,
            chunk_tokens=min(sizes.chunk_tokens, sizes.token_budget),
            max_seqs=sizes.max_seqs,
            max_running=sizes.max_seqs if is_prefill else sizes.max_running,
            local_prefill_tokens=local,
            age_limit_s=sizes.age_limit_s,
            ahead=AHEAD,
        )
        return [
            SimWorker(
                i,
                model,
                replace(limits),
                BlockPool(sizes.num_blocks, sizes.block_size, prefix_cache=False),
                lambda: self.now,
                self._at,
                self._sampled_prompt if is_prefill else self._sampled,
                self.tally.gaps,
                self._slowdown if self._stages.has_contention else None,
                self._can_leap,
            )
            for i in range(size)
        ]

    def _slowdown(self, worker: SimWorker, is_decoding: bool) -> float:
        """By those who compute as this step begins, `worker` not counted."""
        workers = (*self._readers, *self._writers)
        busy = sum(other.is_computing for other in workers if other is not worker)
        most = self._stages.decode_contention if is_decoding else self._stages.prompt_contention
        return 1 + most * busy / max(1, len(workers) - 1)

    # The event loop

    def run(self, arrivals: Iterable[Arrival], *, concurrency: int = 0, max_missed: int = 1 << 60) -> Summary:
        """Open loop, or closed with `concurrency` at a time. Stops early once `max_missed` missed the objectives."""
        self._arrivals = iter(arrivals)
        self._is_closed, self._limit_missed = concurrency > 0, max_missed
        for _ in range(max(1, concurrency)):
            self._next()
        events, pop = self._events, heapq.heappop
        while events and self.tally.num_missed <= max_missed:
            self.now, _, handler, argument = pop(events)
            handler(argument)
        return self.tally.summary(self.utilisation())

    def utilisation(self) -> dict[str, float]:
        """Share of the time that each pool computed."""
        pools = {"prefill": self._readers, "colocated" if self._layout.colocated else "decode": self._writers}
        return {
            name: sum(worker.busy_s for worker in pool) / (len(pool) * self.now)
            for name, pool in pools.items()
            if pool and self.now
        }

    def _at(self, time: float, handler: Callable[..., None], argument: object) -> None:
        heapq.heappush(self._events, (time, next(self._order), handler, argument))

    def _next(self, _: object = None) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._at(self.now if self._is_closed else arrival.at, self._arrive, arrival)

    # The router

    def _arrive(self, arrival: Arrival) -> None:
        if not self._is_closed:
            self._next()
        prompt = self._prompts.setdefault(arrival.prompt, [0] * arrival.prompt)
        request = Request(
            SeqId("sim", next(self._count), 0), self.now, prompt, SamplingParams(max_tokens=arrival.output)
        )
        started = self.now + self._stages.router_s
        if not self._readers or arrival.prompt < self._layout.threshold:
            self._send_local(request, started)
        else:
            self._send_pair(request, started)

    def _send_local(self, request: Request, at: float) -> None:
        loads = [*zip(self._local, self._open, strict=True)]
        request.reader = -1
        request.writer = worker = _least(loads)
        self._local[worker] += len(request.prompt)
        self._open[worker] += 1
        self._at(at, self._add, request)

    def _send_pair(self, request: Request, at: float) -> None:
        request.reader, request.writer = _least(self._queued), _least(self._open)
        self._queued[request.reader] += len(request.prompt)
        self._open[request.writer] += 1
        self._at(at, self._read, request)

    # A whole sequence on one worker

    def _add(self, request: Request) -> None:
        worker = self._writers[request.writer]
        worker.interrupt()
        worker.scheduler.add(request.half(self.now))
        worker.look()

    # Prefill half

    def _read(self, request: Request) -> None:
        worker = self._readers[request.reader]
        worker.interrupt()
        worker.scheduler.add(request.half(self.now, needs_grant=True))
        self._ask(worker)
        worker.look()

    def _ask(self, worker: SimWorker) -> None:
        for seq in worker.scheduler.grants_wanted():
            self._at(self.now + self._sizes.hop_s, self._expect, seq.request)  # type: ignore[attr-defined]

    def _granted(self, told: tuple[Request, int]) -> None:
        request, generation = told
        worker = self._readers[request.reader]
        worker.interrupt()
        worker.scheduler.granted(request.id, generation, 0)
        self._ask(worker)
        worker.look()

    def _sampled_prompt(self, worker: SimWorker, step: Step) -> None:
        request: Request = step.seq.request  # type: ignore[attr-defined]
        peer = self._writers[request.writer]
        if step.ready:
            size = len(step.ready) * worker.block_size * self._stages.kv_token_bytes
            start = max(self.now, worker.link_free, peer.link_free)
            worker.link_free = peer.link_free = start + size / self._stages.link_bytes_s
        if step.token is None:
            return
        request.first = request.last = self.now
        self._queued[request.reader] -= len(request.prompt)
        if step.finished:
            self._at(self.now + self._sizes.hop_s, self._dropped, request)
            self._release(request)
            self._done(request)
            return
        request.transfer_s = max(self.now, worker.link_free) - self.now + self._stages.link_latency_s
        self._at(self.now + request.transfer_s, self._received, request)

    def _release(self, request: Request) -> None:
        worker = self._readers[request.reader]
        worker.interrupt()
        worker.scheduler.release(request.id)
        worker.look()

    # Decode half

    def _expect(self, request: Request) -> None:
        worker = self._writers[request.writer]
        worker.interrupt()
        worker.scheduler.expect(request.half(self.now))
        self._grant(worker)
        worker.look()

    def _grant(self, worker: SimWorker) -> None:
        for seq in worker.scheduler.grants_possible():
            told = (seq.request, seq.generation)  # type: ignore[attr-defined]
            self._at(self.now + self._sizes.hop_s, self._granted, told)

    def _received(self, request: Request) -> None:
        worker = self._writers[request.writer]
        worker.interrupt()
        worker.scheduler.received(request.id, TOKEN)
        worker.look()
        self._at(self.now + self._sizes.hop_s, self._release, request)

    def _dropped(self, request: Request) -> None:
        """The first token was the last: the grant is given back."""
        worker = self._writers[request.writer]
        worker.interrupt()
        worker.scheduler.abort(request.id)
        self._grant(worker)
        worker.look()

    # Tokens

    def _sampled(self, worker: SimWorker, step: Step) -> None:
        if step.token is None:
            return
        request: Request = step.seq.request  # type: ignore[attr-defined]
        if step.index:
            self.tally.gaps.add(self.now - request.last)
        else:
            request.first = self.now
            self._local[request.writer] -= len(request.prompt)
        request.last = self.now
        if step.finished:
            self._done(request)

    def _done(self, request: Request) -> None:
        self._open[request.writer] -= 1
        self.tally.add(request.arrival, request.first, request.last, request.params.max_tokens, request.transfer_s)
        if self._is_closed:
            self._next()


def _least(loads: list[Any]) -> int:
    return loads.index(min(loads))
