"""The simulated router: the server's own `Chooser` decides, over what a router knows of workers that are simulated.

What is the dispatcher's is told again here, in few lines, for that one lives on connections: who may do a whole
sequence (`Router.alone`), and who is refused (`Router.admit`). tests/plan/test_router.py holds both to the same
decisions.
"""

import heapq
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from pdctl.plan.worker import Request, SimWorker
from server.messages import NAME_BYTES, Card, Load
from server.router.attempt import Plan, Route
from server.router.choice import Chooser
from server.router.timing import Record
from server.router.worker import Inbox, Worker
from server.wire import Identity

_MOST_ENTRIES = 8  # for each worker in a `Least`
NOBODY, NO_CARD = Identity("router", "router", "sim"), Card({})


class Seen(Worker):
    """What a router knows of a worker, with no connection behind it."""

    def __init__(self, name: str, role: str) -> None:
        super().__init__(name, role, "", me=NOBODY, secret=b"", card=NO_CARD, on_change=lambda worker: None)
        self.crossed_at = float("-inf")  # a stack that has served the load for a while

    @property
    def burden(self) -> tuple[bool, int]:
        return self.load is not None and self.load.over_high, len(self.open)

    @property
    def burden_alone(self) -> tuple[bool, int, int]:
        """Of one that reads what it writes."""
        return self.load is not None and self.load.over_high, self.prompt_tokens, len(self.open)


class Least:
    """The first of `workers` with the least key, found without a look at each: a heap, in which what is out of date is
    passed over. `changed` is told whose key did."""

    def __init__(self, workers: Sequence[Worker], key: Callable[[Worker], Any]) -> None:
        self._key, self._workers = key, workers
        self._places = {worker.name: place for place, worker in enumerate(workers)}
        self._build()

    def changed(self, worker: Worker) -> None:
        heapq.heappush(self._heap, (self._key(worker), self._places[worker.name], worker))
        if len(self._heap) > _MOST_ENTRIES * len(self._workers):  # what is out of date below the first stays there
            self._build()

    def _build(self) -> None:
        self._heap = [(self._key(worker), place, worker) for place, worker in enumerate(self._workers)]
        heapq.heapify(self._heap)

    def first(self) -> Worker:
        while (best := self._heap[0])[0] != self._key(best[2]):
            heapq.heappop(self._heap)
        return best[2]


class Router:
    """`readers` and `writers` stand beside the cluster's pools. Without prefixes to hit it looks only at the best of
    each pool: they make the best pair, and 1,000 workers are spared the product of both."""

    def __init__(
        self,
        readers: list[Seen],
        writers: list[Seen],
        *,
        threshold: int,
        block_size: int,
        has_prefixes: bool = False,
        queue_high: int = 1 << 30,
        prefill_queue_high: int = 8,
        rest_s: float = 5.0,
    ) -> None:
        self.readers, self.writers = readers, writers
        self.chooser = Chooser("kv-aware", block_size, 1 << 30)
        self.chooser.threshold, self.chooser.queue_high = threshold, prefill_queue_high
        self.num_waiting = self.most_waiting = self.num_refused = 0
        self._queue_high, self._rest_s, self._has_prefixes = queue_high, rest_s, has_prefixes
        self._is_simple = not has_prefixes and threshold == 0  # every prompt goes the same way
        self._reader = Least(readers, attrgetter("prompt_tokens"))
        self._writer = Least(writers, attrgetter("burden" if readers else "burden_alone"))

    def admit(self) -> bool:
        """False: 429, as many wait for a first token as may."""
        if self.num_waiting >= self._queue_high:
            self.num_refused += 1
            return False
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        return True

    def choose(self, prompt: list[int], now: float) -> Plan:
        pairs, alone = self._candidates(now)
        plan = self.chooser.plan(prompt, "", pairs, alone, now=now)
        assert plan is not None, "a layout has workers"
        return plan

    def _candidates(self, now: float) -> tuple[list[Route], list[Route]]:
        if self._is_simple:
            writer = self._writer.first()
            return ([Route(writer, self._reader.first())], []) if self.readers else ([], [Route(writer)])
        readers, writers, alone = self.readers, self.writers, self.alone(now)
        if not self._has_prefixes:
            readers = [min(readers, key=attrgetter("prompt_tokens"))] if readers else []
            alone = [min(alone, key=attrgetter("burden_alone"))]
            writers = [min(writers, key=attrgetter("burden"))] if readers else []
        return [Route(d, p) for p in readers for d in writers], [Route(worker) for worker in alone]

    def alone(self, now: float) -> list[Seen]:
        """Who can do a whole sequence: those who decode, and prefill workers while they rest."""
        if not self._rest_s or self.chooser.threshold == 0:
            return self.writers
        return [*self.writers, *(w for w in self.readers if now - w.crossed_at > self._rest_s)]

    def send(self, request: Request, plan: Plan, now: float) -> None:
        """As an `Attempt` does."""
        request.plan = plan
        for worker in plan.route.workers:
            worker.open[request.id] = _INBOX
        plan.route.workers[0].begin_reading(plan.num_to_read, now)
        if plan.route.prefill is not None:
            plan.route.prefill.crossed_at = now
        self.changed(*plan.route.workers)

    def has_read(self, request: Request) -> None:
        """The first token is here, and what crosses is no longer prefill's."""
        if (prefill := request.plan.route.prefill) is not None:
            prefill.open.pop(request.id, None)
        self._end_reading(request)
        self.num_waiting -= 1

    def go_otherwise(self, request: Request, now: float) -> None:
        """The worker that was believed to have the prompt does not."""
        plan = request.plan
        assert plan.otherwise is not None
        self._end_reading(request)
        del plan.route.worker.open[request.id]
        self.send(request, plan.otherwise, now)

    def _end_reading(self, request: Request) -> None:
        request.plan.route.workers[0].end_reading(request.plan.num_to_read)
        self.changed(*request.plan.route.workers)

    def changed(self, *workers: Worker) -> None:
        """What they have to do is another, or what was heard of them."""
        if self._is_simple:
            for worker in workers:
                (self._reader if worker.role == "prefill" else self._writer).changed(worker)

    def over(self, request: Request) -> None:
        for worker in request.plan.route.workers:
            worker.open.pop(request.id, None)
        self.changed(*request.plan.route.workers)
        if self.chooser.threshold == 0:
            return  # every prompt crosses: nobody asks for rates
        stages = {"start": request.read_from, "end": request.first}
        size, cached = len(request.prompt), request.num_cached
        self.chooser.rates.observe(
            Record(0.0, path=request.plan.path, prompt_tokens=size, cached_tokens=cached, prefill_stages=stages)
        )


_INBOX = Inbox()  # that nobody reads: what is open is counted


def look_at(seen: Seen, worker: SimWorker) -> None:
    """What a worker tells a router, all of it and at once."""
    scheduler, pool = worker.scheduler, worker.scheduler.pool
    seen.load = Load(
        *(0, 0, 0, 0, 0, pool.num_usable, pool.num_used, 0), over_high=not scheduler.is_open, is_tight=worker.is_tight
    )
    for digest, is_here in pool.take_changes().items():
        (seen.cached.add if is_here else seen.cached.discard)(digest[:NAME_BYTES])
