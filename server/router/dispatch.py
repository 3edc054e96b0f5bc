"""Which routes there are, which of them carry work now, and who has to wait.

1. A route is `pd` (a prefill and a decode worker) or one worker that does it all; a probe has to prove it first.
2. `Dispatcher.choose` picks one for a prompt; `open` makes an `Attempt` on it.
3. `admit` counts the sequences that wait for a first token, and says no early: 429 with Retry-After.
"""

import asyncio
import contextlib
import hashlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from server.config import Config
from server.knobs import Value
from server.router.attempt import Attempt, Plan, Route
from server.router.choice import Chooser
from server.router.errors import no_worker, overloaded
from server.router.timing import Record
from server.router.worker import Worker
from server.router.workers import Workers
from server.sequence import SamplingParams, SeqId

RATE_WINDOW_S = 30.0
MAX_RETRY_AFTER_S = 60


def handle_of(worker: Worker, tenant: str) -> str:
    """Names the worker that holds a conversation's KV, for its next turn: good for this process and `tenant` alone."""
    scope = hashlib.sha256(f"{worker.instance}/{tenant}".encode()).hexdigest()
    return f"{worker.name}.{scope[:12]}"


class Dispatcher:
    """Chooses routes, counts what waits, and says no early."""

    def __init__(self, workers: Workers, config: Config, max_len: int) -> None:
        self.workers = workers
        self.queue_high = config.router.queue_high
        self._worker_wait_s = config.router.worker_wait
        self._line = asyncio.Lock()  # of requests that wait for a worker: who comes later is not served sooner
        self.chooser = Chooser(config.router.policy, config.model.block_size, max_len)
        self.on_threshold: Callable[[int], None] = lambda tokens: None
        self.watch: Callable[[Record], None] = lambda record: None  # who else wants to see sequences that are over
        self.use_knobs(
            {
                "hybrid.threshold_tokens": config.hybrid.threshold_tokens,
                "prefill.queue_high": config.prefill.queue_high,
                "prefill.max_seqs": config.prefill.max_seqs,
            }
        )
        self.waiting = 0
        self._waiting_since = 0.0  # without a break
        self.running = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._rest_s = config.hybrid.rest_s
        self._proven: dict[str, tuple[str, str]] = {}
        self._number = itertools.count(1)
        self._first_tokens: deque[float] = deque(maxlen=10_000)
        self.routes: list[Route] = []
        self._pairs: list[Route] = []  # of them, those that carry work, as of `_num_changes` of the workers
        self._pool: list[Route] = []
        self._ends: list[Route] = []  # without a pool: each worker of a proven pair
        self._num_changes = -1
        self.find_routes()

    def use_knobs(self, values: Mapping[str, Value]) -> None:
        """From the next request on."""
        chooser = self.chooser
        self.queue_high = int(values.get("router.queue_high", self.queue_high))
        chooser.queue_high = int(values.get("prefill.queue_high", chooser.queue_high))
        if "prefill.max_seqs" in values:
            self._max_whole = max(1, int(values["prefill.max_seqs"]) // 2)
        threshold = values.get("hybrid.threshold_tokens", chooser.threshold)
        chooser.threshold = None if threshold is None or threshold == "auto" else int(threshold)

    # routes

    def find_routes(self) -> None:
        """Anew, of the workers that there are now. A proof stays with the route's name and instances."""
        workers = self.workers
        pairs = [Route(d, p) for p in workers.with_role("prefill") for d in workers.with_role("decode")]
        self.routes = [*pairs, *(Route(worker) for worker in workers.with_role("colocated"))]
        self._num_changes = -1
        workers.changed.set()

    def prove(self, route: Route, instances: tuple[str, str]) -> None:
        self._proven[route.name] = instances
        self._num_changes = -1
        self.workers.reported.beat()

    def is_proven(self, route: Route) -> bool:
        return route.is_connected and self._proven.get(route.name) == route.instances

    def _find_open(self) -> None:
        """Who carries work: proven, and nobody wants it free of work. Every request asks; few workers come or go."""
        if self._num_changes == self.workers.num_changes:
            return
        self._num_changes = self.workers.num_changes
        routes = [r for r in self.routes if self.is_proven(r) and not any(w.is_draining for w in r.workers)]
        self._pairs = [route for route in routes if route.prefill is not None]
        self._pool = [route for route in routes if route.prefill is None]
        proven = {
            end
            for name, instances in self._proven.items()
            for end in zip(reversed(name.split(">")), reversed(instances), strict=False)
        }
        ends = [*self.workers.with_role("decode"), *self.workers.with_role("prefill")]
        self._ends = [Route(w) for w in ends if w.is_connected and not w.is_draining and (w.name, w.instance) in proven]

    def stand_ins(self) -> list[Route]:
        """Prefill workers to be proven alone: new ones, while there is no decode worker to prove them with."""
        self._find_open()
        if self._pool or any(worker.is_connected for worker in self.workers.with_role("decode")):
            return []
        known = {end.worker for end in self._ends}
        return [Route(w) for w in self.workers.with_role("prefill") if w.is_connected and w not in known]

    @property
    def can_serve(self) -> bool:
        self._find_open()
        return bool(self._pairs or self._alone())

    @property
    def is_recovering(self) -> bool:
        """Whether a route is only lacking a worker, or its proof, that a restart brings."""
        return any(
            not self.is_proven(route) and not any(worker.is_draining for worker in route.workers)
            for route in self.routes
        )

    @property
    def is_worth_waiting(self) -> bool:
        return self._worker_wait_s > 0 and self.is_recovering

    async def some_route(self) -> None:
        """Returns when a prompt can go somewhere, at once as a rule. While the supervisor restarts the only worker, the
        request keeps its place in the queue. Raises ApiError 503 when that takes too long, or nobody comes back."""
        if self._line.locked() or not self._has_place():
            await self._recovered()

    def _has_place(self) -> bool:
        """Prefill workers that stand in for decode take half as many whole sequences as they have places: a line there
        would have to be written to its end before the first probe, or prompt, crosses to the decode worker that is
        back. What waits here goes where it should then."""
        alone = self._alone()
        if self._pairs or any(end.worker.role != "prefill" for end in alone):
            return True
        return any(len(end.worker.open) < self._max_whole for end in alone)

    async def _recovered(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._worker_wait_s), self._line:
                while not self._has_place() and self.is_recovering:
                    await self.workers.reported.wait()
        if not self.can_serve:
            raise no_worker()

    def choose(
        self, prompt: Sequence[int], salt: str = "", pinned: Worker | None = None, same: Plan | None = None
    ) -> Plan:
        """`pinned`: the worker that the client's conversation is on. `same`: by which the prompt was just read; it
        stands while its workers serve. Raises ApiError 503 when no worker can take it."""
        if same is not None and all(w.is_connected and not w.is_draining for w in same.route.workers):
            return same.again()
        alone = self._alone()
        plan = self.chooser.plan(prompt, salt, self._pairs, alone, pinned, now=time.monotonic())
        if plan is None:
            raise no_worker()
        return plan

    def pinned(self, handle: str, tenant: str) -> Worker | None:
        """Whom a handle from an earlier turn names, if it is still that process and the turn was this tenant's."""
        worker = self.workers.all.get(handle.partition(".")[0])
        return worker if worker is not None and handle == handle_of(worker, tenant) else None

    def observe(self, record: Record) -> None:
        """A sequence is over: what it tells about rates and about the better path for its length."""
        self.watch(record)
        if record.ran_ahead:  # its times are those of neither path
            return
        self.chooser.rates.observe(record)
        if record.second and record.by_threshold and self.chooser.threshold is None:
            moved = self.chooser.crossover.observe(
                is_local=record.path != "pd",
                num_uncached=record.uncached_tokens,
                seconds=record.second - record.sent,
            )
            if moved:
                self.on_threshold(self.chooser.crossover.tokens)

    def _alone(self) -> list[Route]:
        """Who can do a whole sequence: the colocated pool; without one, whom a pair has proven, decode workers always
        and prefill workers while they rest, or where no pair is left: a prompt that nobody can be handed is done where
        it is read, rather than wait for a restart."""
        self._find_open()
        if self._pool:
            return self._pool
        able = [end for end in self._ends if end.worker.role == "decode" or self._is_rested(end.worker)]
        return able if able or self._pairs else self._ends

    def _is_rested(self, worker: Worker) -> bool:
        """What it decoded would stall while it reads for others, and make that wait: it does one or the other."""
        is_hybrid = self._rest_s > 0 and self.chooser.threshold != 0
        return is_hybrid and time.monotonic() - worker.crossed_at > self._rest_s

    def open(
        self,
        plan: Plan,
        prompt: list[int],
        params: SamplingParams,
        record: Record,
        *,
        salt: str = "",
        deadline_s: float = 0.0,
    ) -> Attempt:
        seq_id = SeqId(self.workers.me.instance, next(self._number), 0)
        return Attempt(
            seq_id,
            plan,
            prompt,
            params,
            record,
            salt=salt,
            deadline_s=deadline_s,
            another=self._another,
            instead=self._instead,
        )

    def _another(self, route: Route) -> Route | None:
        """From the same prefill worker to the decode worker, another than this one, with the least to do."""
        others = [r for r in self.routes if r.prefill is route.prefill and r.worker is not route.worker]
        able = [other for other in others if self.is_proven(other) and not other.worker.is_draining]
        return min(able, key=lambda other: len(other.worker.open), default=None)

    def _instead(self, route: Route) -> Worker | None:
        """Who does the rest of a sequence whose worker is gone: one that does whole ones, with the least to do; without
        any its prefill worker, whatever else that is for."""
        prefill = [w for w in route.workers if w is route.prefill and w.is_connected]
        alone = [end.worker for end in self._alone()]
        return min(alone or prefill, key=lambda worker: len(worker.open), default=None)

    # the queue

    @property
    def in_flight(self) -> int:
        return self.waiting + self.running

    def admit(self, count: int) -> None:
        """A request of `count` sequences, each of which waits for its first token. Raises ApiError 429 when
        `queue_high` do already; under that a request gets in whole, so that a large one is not passed over for ever."""
        if self.waiting >= self.queue_high:
            raise overloaded(self.waiting, self._retry_after_s())
        if not self.waiting:
            self._waiting_since = time.monotonic()
        self.waiting += count
        self.idle.clear()

    def note_first_token(self) -> None:
        self.waiting -= 1
        self.running += 1
        self._first_tokens.append(time.monotonic())

    def leave(self, count: int, num_begun: int) -> None:
        """The request that `admit` let in is over; so many of its sequences had their first token."""
        self.running -= num_begun
        self.waiting -= count - num_begun
        if not self.in_flight:
            self.idle.set()

    def _retry_after_s(self) -> int:
        """How long the queue takes to drain at the rate since there is one; what came before says how many asked, not
        how many can be served. Before its first token: as long as that has taken already."""
        now = time.monotonic()
        since = max(self._waiting_since, now - RATE_WINDOW_S)
        while self._first_tokens and self._first_tokens[0] < since:
            self._first_tokens.popleft()
        num_begun = len(self._first_tokens)
        left_s = (now - since) * self.waiting / num_begun if num_begun else now - self._waiting_since
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(left_s)))
