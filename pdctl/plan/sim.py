"""A cluster in virtual time: the router's choice, grants, steps and transfers of the real design, event by event.

    1. arrival     429 where `queue_high` wait; else the server's own Chooser: resident, one worker, or a pair
    2. grant       the prefill half asks when it is near the front; decode promises blocks under its high mark
    3. prefill     chunk by chunk; what is computed goes to the link while the next chunk is
    4. transfer    one chunk after another on a link that both ends share; the first token does not wait for it
    5. decode      from the next step of its worker on

The schedulers, their admission, grants and preemption are the server's own code. What is left out: faults and text.
A router here sees its workers as they are, where a real one sees them as they were a moment ago.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count

from pdctl.plan.loads import Arrival
from pdctl.plan.router import Router, Seen, look_at
from pdctl.plan.stages import Stages
from pdctl.plan.tally import Slo, Summary, Tally
from pdctl.plan.worker import TOKEN, Request, SimWorker
from server.engine.block_pool import BlockPool
from server.engine.local_prefill import MIN_TOKENS, LocalPrefill
from server.engine.scheduler import Limits, Step
from server.router.attempt import Plan
from server.router.choice import Rates
from server.sequence import SamplingParams, SeqId

AHEAD = 4
FRESH = 1 << 31  # names of tokens that are in one prompt alone; those of a load's prefixes are below
RETRY_S = 0.001  # a user who was refused


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
    local_prefill_tokens: int | None = 256  # of the pools' first steps; for ever without an objective
    tpot_objective_s: float = 0.0  # by which its later steps measure how many they carry, as the server's do
    num_blocks: int = 16_384
    block_size: int = 16
    age_limit_s: float = 5.0
    hop_s: float = 0.0  # one control message
    queue_high: int = 1 << 30  # of the router: requests waiting for a first token before clients get 429
    prefill_queue_high: int = 8
    rest_s: float = 1.0  # hybrid.rest_s
    prefix_cache: bool = False  # wanted only where prompts have something in common: naming blocks takes time


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
        rates: Rates | None = None,
    ) -> None:
        """`rates`: what the router knows of its workers from loads before this one."""
        self.now = 0.0
        self.tally = Tally(slo)
        self._num_warm_up = skip
        self._layout, self._stages, self._sizes = layout, stages, sizes or Sizes()
        self._hop_s = stages.hop_s or self._sizes.hop_s
        self._can_leap = can_leap
        self._events: list[tuple[float, int, Callable[..., None], object]] = []
        self._order = count()
        self._prompts: dict[int, list[int]] = {}
        self._readers = self._pool("prefill", layout.prefill)
        self._writers = self._pool("colocated", layout.colocated) or self._pool("decode", layout.decode)
        self._workers = {worker.name: worker for worker in (*self._readers, *self._writers)}
        for worker in self._readers:
            worker.after_step = self._ask
        for worker in self._writers:
            worker.after_step = self._grant
        self.router = Router(
            [Seen(worker.name, "prefill") for worker in self._readers],
            [Seen(worker.name, "colocated" if layout.colocated else "decode") for worker in self._writers],
            threshold=layout.threshold,
            block_size=self._sizes.block_size,
            has_prefixes=self._sizes.prefix_cache,
            queue_high=self._sizes.queue_high,
            prefill_queue_high=self._sizes.prefill_queue_high,
            rest_s=self._sizes.rest_s,
        )
        self.router.chooser.rates = rates or self.router.chooser.rates
        self._seen = {seen.name: seen for seen in (*self.router.readers, *self.router.writers)}
        self._arrivals: Iterator[Arrival] = iter(())
        self._more: Iterator[Arrival] = iter(())
        self._num_left = 0  # of the arrivals so far, not ended
        self._is_over = False
        self._is_closed = False
        self._limit_missed = 1 << 60
        self._count = count()

    def _pool(self, role: str, size: int) -> list[SimWorker]:
        sizes, stages = self._sizes, self._stages
        model = {"prefill": stages.prefill, "decode": stages.decode, "colocated": stages.colocated}[role]
        limits = Limits(
            token_budget=sizes.token_budget,
            chunk_tokens=min(sizes.chunk_tokens, sizes.token_budget),
            max_seqs=sizes.max_seqs,
            max_running=sizes.max_seqs if role == "prefill" else sizes.max_running,
            local_prefill_tokens=self._local_prefill_tokens(role),
            age_limit_s=sizes.age_limit_s,
            ahead=AHEAD,
        )
        return [
            SimWorker(
                f"{role}-{i}",
                model,
                stages.decode if role == "prefill" else model,  # one that rests may decode
                replace(limits),
                self._blocks(),
                lambda: self.now,
                self._at,
                self._sampled,
                self._done,
                self.tally.gaps,
                self._slowdown if self._stages.has_contention else None,
                self._can_leap,
                self._local_prefill(role),
            )
            for i in range(size)
        ]

    def _local_prefill_tokens(self, role: str) -> int | None:
        tokens = self._sizes.local_prefill_tokens
        if role == "colocated" or tokens is None:
            return None
        return max(MIN_TOKENS, tokens) if role == "prefill" else tokens

    def _local_prefill(self, role: str) -> LocalPrefill | None:
        objective, start = self._sizes.tpot_objective_s, self._local_prefill_tokens(role)
        is_measured = objective > 0 and self._layout.threshold > 0
        return LocalPrefill(objective, start) if is_measured and start is not None else None

    def _blocks(self) -> BlockPool:
        pool = BlockPool(self._sizes.num_blocks, self._sizes.block_size, self._sizes.prefix_cache)
        pool.is_watched = self._sizes.prefix_cache
        return pool

    def _slowdown(self, worker: SimWorker) -> tuple[float, float]:
        """Of reading and of writing, by what the others compute as this step begins."""
        others = [other for other in (*self._readers, *self._writers) if other is not worker and other.is_computing]
        num_writers = sum(other.is_decoding for other in others)
        return self._stages.contention.slowdown(len(others) - num_writers, num_writers, len(self._workers) - 1)

    # The event loop

    def run(
        self,
        arrivals: Iterable[Arrival],
        *,
        concurrency: int = 0,
        more: Iterable[Arrival] = (),
        max_missed: int = 1 << 60,
    ) -> Summary:
        """Open loop, or closed with `concurrency` at a time, who go on with `more` until all of `arrivals` ended. Stops
        early once `max_missed` missed the objectives."""
        self._arrivals, self._more = iter(arrivals), iter(more)
        self._is_closed, self._limit_missed = concurrency > 0, max_missed
        for _ in range(max(1, concurrency)):
            self._next()
        events, pop = self._events, heapq.heappop
        while events and not self._is_over and self.tally.num_missed <= max_missed:
            self.now, _, handler, argument = pop(events)
            handler(argument)
        for worker in self._workers.values():  # one cut short counts the steps that are over
            worker.interrupt()
        return self.tally.summary(self.utilisation(), self.router.most_waiting)

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
            self._num_left += 1
            self._at(self.now if self._is_closed else arrival.at, self._arrive, arrival)
        elif self._is_closed and (arrival := next(self._more, None)) is not None:
            self._is_over = not self._num_left
            self._at(self.now, self._fill, arrival)

    # The router

    def _arrive(self, arrival: Arrival) -> None:
        if not self._is_closed:
            self._next()
        self._ask_for(self._prompt(arrival), arrival.output, arrival.then)

    def _fill(self, arrival: Arrival) -> None:
        self._ask_for(self._prompt(arrival), arrival.output, arrival.then, is_filler=True)

    def _prompt(self, arrival: Arrival) -> list[int]:
        if not self._sizes.prefix_cache:
            return self._prompts.setdefault(arrival.prompt, [0] * arrival.prompt)
        common = [name for name, size in arrival.prefix for _ in range(size)][: arrival.prompt]
        return common + self._fresh(arrival.prompt - len(common))

    def _fresh(self, num_tokens: int) -> list[int]:
        """Tokens that nothing else begins with."""
        return [FRESH + next(self._count)] * num_tokens

    def _ask_for(self, prompt: list[int], output: int, then: tuple[int, ...], is_filler: bool = False) -> None:
        if not self.router.admit():
            self._num_left -= not is_filler
            self.tally.refuse()
            if self._is_closed:
                self._at(self.now + max(RETRY_S, self._stages.router_s), self._next, None)
            return
        seq_id, params = SeqId("sim", next(self._count), 0), SamplingParams(max_tokens=output)
        request = Request(seq_id, self.now, prompt, params, then=then, is_filler=is_filler)
        request.is_warm_up = self._num_warm_up > 0
        self._num_warm_up -= request.is_warm_up
        self._look()
        self._send(request, self.router.choose(prompt, self.now))

    def _look(self) -> None:
        """What the router is about to decide by."""
        if self._sizes.prefix_cache or self._layout.threshold:
            for name, worker in self._workers.items():
                worker.interrupt()
                worker.look()
                look_at(self._seen[name], worker)

    def _send(self, request: Request, plan: Plan) -> None:
        self.router.send(request, plan, self.now)
        self._at(self.now + self._router_s(), self._add if plan.route.prefill is None else self._read, request)

    def _router_s(self) -> float:
        idle, more = self._stages.router_s, self._stages.router_busy_s - self._stages.router_s
        if more <= 0:
            return idle
        return idle + more * sum(worker.is_computing for worker in self._workers.values()) / len(self._workers)

    def _writer(self, request: Request) -> SimWorker:
        return self._workers[request.plan.route.worker.name]

    def _reader(self, request: Request) -> SimWorker:
        assert request.plan.route.prefill is not None, "it crosses"
        return self._workers[request.plan.route.prefill.name]

    # A whole sequence on one worker

    def _add(self, request: Request) -> None:
        worker, plan = self._writer(request), request.plan
        worker.interrupt()
        pool = worker.scheduler.pool
        if plan.num_resident and len(pool.match(request.prompt[:-1])) * pool.block_size < plan.num_resident:
            self.router.go_otherwise(request, self.now)
            self._at(self.now + 2 * self._hop_s, self._read, request)
        else:
            worker.scheduler.add(request.half(self.now))
        worker.look()

    # Prefill half

    def _read(self, request: Request) -> None:
        worker = self._reader(request)
        worker.interrupt()
        worker.scheduler.add(request.half(self.now, needs_grant=True))
        self._ask(worker)
        worker.look()

    def _ask(self, worker: SimWorker) -> None:
        for seq in worker.scheduler.grants_wanted():
            self._at(self.now + self._hop_s, self._expect, seq.request)  # type: ignore[attr-defined]

    def _granted(self, told: tuple[Request, int, int]) -> None:
        request, generation, num_resident = told
        worker = self._reader(request)
        worker.interrupt()
        worker.scheduler.granted(request.id, generation, num_resident)
        self._ask(worker)
        worker.look()

    def _sampled_half(self, worker: SimWorker, step: Step) -> None:
        request: Request = step.seq.request  # type: ignore[attr-defined]
        peer = self._writer(request)
        if step.ready:
            size = len(step.ready) * worker.block_size * self._stages.kv_token_bytes
            start = max(self.now, worker.link_free, peer.link_free)
            worker.link_free = peer.link_free = start + size / self._stages.link_bytes_s
        if step.token is None:
            return
        request.first = request.last = self.now
        self.router.has_read(request)
        if step.finished:
            self._at(self.now + self._hop_s, self._dropped, request)
            self._release(request)
            self._done(request)
            return
        request.transfer_s = max(self.now, worker.link_free) - self.now + self._stages.link_latency_s
        self._at(self.now + request.transfer_s, self._received, request)

    def _release(self, request: Request) -> None:
        worker = self._reader(request)
        worker.interrupt()
        worker.scheduler.release(request.id)
        worker.look()

    # Decode half

    def _expect(self, request: Request) -> None:
        worker = self._writer(request)
        worker.interrupt()
        worker.scheduler.expect(request.half(self.now))
        self._grant(worker)
        worker.look()

    def _grant(self, worker: SimWorker) -> None:
        for seq in worker.scheduler.grants_possible():
            told = (seq.request, seq.generation, seq.num_resident_blocks)  # type: ignore[attr-defined]
            self._at(self.now + self._hop_s, self._granted, told)
        self._mark(worker)

    def _mark(self, worker: SimWorker) -> None:
        """The router hears when a worker passes its marks."""
        seen, over = self._seen[worker.name], not worker.scheduler.is_open
        if seen.burden[0] != over:
            look_at(seen, worker)
            self.router.changed(seen)

    def _received(self, request: Request) -> None:
        worker = self._writer(request)
        worker.interrupt()
        worker.scheduler.received(request.id, TOKEN)
        worker.look()
        self._at(self.now + self._hop_s, self._release, request)

    def _dropped(self, request: Request) -> None:
        """The first token was the last: the grant is given back."""
        worker = self._writer(request)
        worker.interrupt()
        worker.scheduler.abort(request.id)
        self._grant(worker)
        worker.look()

    # Tokens

    def _sampled(self, worker: SimWorker, step: Step) -> None:
        if step.seq.needs_grant:
            self._sampled_half(worker, step)
            return
        if step.token is None:
            return
        request: Request = step.seq.request  # type: ignore[attr-defined]
        if step.index:
            self.tally.gaps.add(self.now - request.last)
        else:
            request.first = self.now
            self.router.has_read(request)
        request.last = self.now
        if step.finished:
            self._done(request)

    def _done(self, request: Request) -> None:
        self.router.over(request)
        output = request.params.max_tokens
        if request.is_warm_up or request.is_filler:
            self.tally.pass_by(request.last, request.is_warm_up)
        else:
            self.tally.add(request.arrival, request.first, request.last, output, request.transfer_s)
        if request.then:
            more, *then = request.then
            prompt = request.prompt + [TOKEN.id] * output + self._fresh(more)
            self._ask_for(prompt, output, tuple(then), request.is_filler)
            return
        self._num_left -= not request.is_filler
        if self._is_closed:
            self._next()
