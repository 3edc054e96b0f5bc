"""Which routes there are, which of them carry work now, and who has to wait.

1. A route is `pd` (a prefill and a decode worker) or one worker that does it all; a probe has to prove it first.
2. `Dispatcher.choose` picks one for a prompt; `open` makes an `Attempt` on it.
3. `admit` counts who waits for a first token, and says no early: 429 with Retry-After.
"""

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Mapping

from server.config import Config
from server.knobs import Value
from server.router.attempt import Attempt, Route
from server.router.errors import overloaded, unavailable
from server.router.timing import Record
from server.router.workers import Worker, Workers
from server.sequence import SamplingParams, SeqId

AUTO_THRESHOLD = 256
RATE_WINDOW_S = 30.0
MAX_RETRY_AFTER_S = 60


class Dispatcher:
    """Chooses routes, counts what waits, and says no early."""

    def __init__(self, workers: Workers, config: Config) -> None:
        self.workers = workers
        self._policy = config.router.policy
        self.queue_high = config.router.queue_high
        self.prefill_queue_high = config.prefill.queue_high
        self.threshold = AUTO_THRESHOLD
        self.use_knobs({"hybrid.threshold_tokens": config.hybrid.threshold_tokens})
        self.waiting = 0
        self.running = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self._proven: dict[str, tuple[str, str]] = {}
        self._turn = itertools.count()
        self._number = itertools.count(1)
        self._first_tokens: deque[float] = deque(maxlen=10_000)
        pairs = [Route(d, p) for p in workers.with_role("prefill") for d in workers.with_role("decode")]
        self.routes = [*pairs, *(Route(worker) for worker in workers.with_role("colocated"))]

    def use_knobs(self, values: Mapping[str, Value]) -> None:
        """From the next request on."""
        self.queue_high = int(values.get("router.queue_high", self.queue_high))
        self.prefill_queue_high = int(values.get("prefill.queue_high", self.prefill_queue_high))
        threshold = values.get("hybrid.threshold_tokens", self.threshold)
        self.threshold = AUTO_THRESHOLD if threshold == "auto" else int(threshold)

    # routes

    def prove(self, route: Route, instances: tuple[str, str]) -> None:
        self._proven[route.name] = instances

    def is_proven(self, route: Route) -> bool:
        return route.is_connected and self._proven.get(route.name) == route.instances

    def is_open(self, route: Route) -> bool:
        """Proven, and nobody wants a worker of it free of work."""
        return self.is_proven(route) and not any(worker.is_draining for worker in route.workers)

    @property
    def can_serve(self) -> bool:
        return any(map(self.is_open, self.routes)) or bool(self._alone())

    def choose(self, num_prompt: int) -> Route:
        """Raises ApiError 503 when no worker can take it."""
        pairs = [route for route in self.routes if route.prefill is not None and self.is_open(route)]
        alone = [Route(worker) for worker in self._alone()]
        wants_pair = num_prompt >= self.threshold or not alone
        candidates = pairs if pairs and wants_pair else alone
        if not candidates:
            raise unavailable("no worker is ready", "no_worker")
        turn = next(self._turn)
        if self._policy == "round-robin":
            return candidates[turn % len(candidates)]
        ahead = turn % len(candidates)  # ties go round
        return min(candidates[ahead:] + candidates[:ahead], key=_load)

    def _alone(self) -> list[Worker]:
        """Who can do a whole sequence: the colocated pool; without one, decode workers that a pair has proven."""
        pool = [r.worker for r in self.routes if r.prefill is None and self.is_open(r)]
        if pool:
            return pool
        proven = self._proven.items()
        return [
            worker
            for worker in self.workers.with_role("decode")
            if worker.is_connected
            and not worker.is_draining
            and any(n.endswith(f">{worker.name}") and i[1] == worker.instance for n, i in proven)
        ]

    def open(
        self,
        route: Route,
        prompt: list[int],
        params: SamplingParams,
        record: Record,
        *,
        salt: str = "",
        deadline_s: float = 0.0,
    ) -> Attempt:
        seq_id = SeqId(self.workers.me.instance, next(self._number), 0)
        return Attempt(seq_id, route, prompt, params, record, salt=salt, deadline_s=deadline_s)

    # the queue

    @property
    def in_flight(self) -> int:
        return self.waiting + self.running

    def admit(self) -> None:
        """One more request waits for its first token. Raises ApiError 429 when `queue_high` of them do already."""
        if self.waiting >= self.queue_high:
            raise overloaded(self.waiting, self._retry_after_s())
        self.waiting += 1
        self.idle.clear()

    def note_first_token(self) -> None:
        self.waiting -= 1
        self.running += 1
        self._first_tokens.append(time.monotonic())

    def leave(self, *, has_first: bool) -> None:
        """The request that `admit` let in is over."""
        if has_first:
            self.running -= 1
        else:
            self.waiting -= 1
        if not self.in_flight:
            self.idle.set()

    def _retry_after_s(self) -> int:
        """How long the queue takes to drain at the recent rate."""
        since = time.monotonic() - RATE_WINDOW_S
        while self._first_tokens and self._first_tokens[0] < since:
            self._first_tokens.popleft()
        rate = len(self._first_tokens) / RATE_WINDOW_S
        return MAX_RETRY_AFTER_S if not rate else max(1, min(MAX_RETRY_AFTER_S, math.ceil(self.waiting / rate)))


def _load(route: Route) -> tuple[bool, int, int]:
    """Least first. What the router itself has sent is fresher than any Load; over the high mark comes last."""
    load = route.worker.load
    queued = route.prefill.prompt_tokens if route.prefill else route.worker.prompt_tokens
    return (load is not None and load.over_high, queued, len(route.worker.open))
