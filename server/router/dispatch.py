"""Where a sequence goes, and its life there.

1. `Dispatcher.choose` picks a route: `pd` (a prefill and a decode worker) or `colocated` (one worker does it all),
   among routes that a probe has proven.
2. `Dispatcher.open` makes an `Attempt`; entering it sends Prefill and Decode at once.
3. `Attempt.next` gives tokens in index order, each index once, from whoever is first; None when the sequence is over.
   If prefill fails on the way, decode is told to do the rest alone, and the client notices only the time it takes.
4. Leaving it, for whatever reason, aborts on both workers what has not said Done.
"""

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from server.config import Config
from server.messages import Abort, Decode, Done, Prefill, SeqToken
from server.router.errors import ApiError, overloaded, timed_out, unavailable
from server.router.timing import Record
from server.router.workers import Event, Expired, Inbox, Lost, Worker, Workers
from server.sequence import SamplingParams, SeqId, Token

AUTO_THRESHOLD = 256
RATE_WINDOW_S = 30.0
MAX_RETRY_AFTER_S = 60


@dataclass(frozen=True, slots=True)
class Route:
    """`worker` gives the output; on path `pd` it gets its KV from `prefill`."""

    worker: Worker
    prefill: Worker | None = None

    @property
    def path(self) -> str:
        return "colocated" if self.prefill is None else "pd"

    @property
    def name(self) -> str:
        return self.worker.name if self.prefill is None else f"{self.prefill.name}>{self.worker.name}"

    @property
    def instances(self) -> tuple[str, str]:
        """What a proof is bound to."""
        return (self.prefill.instance if self.prefill else "", self.worker.instance)

    @property
    def is_connected(self) -> bool:
        return self.worker.is_connected and (self.prefill is None or self.prefill.is_connected)


class Attempt:
    """One try of one sequence on one route."""

    def __init__(
        self,
        seq_id: SeqId,
        route: Route,
        prompt: list[int],
        params: SamplingParams,
        record: Record,
        *,
        salt: str = "",
        deadline_s: float = 0.0,
    ) -> None:
        self.id = seq_id
        self.route = route
        self.record = record
        self.reason = ""  # "stop" | "length" once over
        self._prompt = prompt
        self._params = params
        self._salt = salt
        self._deadline_s = deadline_s
        self._inbox: Inbox = asyncio.Queue()
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0
        self._ahead: dict[int, Token] = {}

    async def __aenter__(self) -> Self:
        route, record = self.route, self.record
        record.path, record.decode = route.path, route.worker.name
        record.prompt_tokens = len(self._prompt)
        record.sent = time.perf_counter()
        if route.prefill is None:
            route.worker.attach(self.id, self._inbox, len(self._prompt))
            route.worker.send(Prefill(self.id, self._prompt, self._params, self._salt))
        else:
            record.prefill = route.prefill.name
            route.prefill.attach(self.id, self._inbox, len(self._prompt))
            route.worker.attach(self.id, self._inbox, 0)
            route.prefill.send(Prefill(self.id, self._prompt, self._params, self._salt, route.worker.name))
            route.worker.send(Decode(self.id, self._prompt, self._params, self._salt, route.prefill.name))
        if self._deadline_s:
            # A timer puts an event where the tokens come in, so that no wait for a token needs a timeout of its own.
            left = record.arrival + self._deadline_s - time.perf_counter()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, left), self._inbox.put_nowait, Expired())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for worker in self._workers():
            if self._leave(worker):
                worker.send(Abort(self.id, "left"))

    async def next(self) -> Token | None:
        """Raises ApiError when the sequence cannot go on."""
        while (token := self._ahead.pop(self._next, None)) is None:
            if self.reason and not self._ahead:
                return None
            self._take(await self._inbox.get())
        self._next += 1
        self.record.mark_token()
        return token

    def _take(self, event: Event) -> None:
        match event:
            case SeqToken():
                if event.index >= self._next:
                    self._ahead.setdefault(event.index, event.token)
                if event.index == 0:
                    self.record.cached_tokens = max(self.record.cached_tokens, event.num_cached)
            case Lost():
                lost = next((w for w in self._workers() if w.name == event.worker and self.id in w.open), None)
                if lost is self.route.worker:
                    raise unavailable(f"worker {event.worker} was lost while it held this request", "worker_lost")
                if lost is not None:
                    self._go_alone(lost)
            case Expired():
                raise timed_out(self._deadline_s)
            case (name, done):
                self._done(name, done)

    def _done(self, name: str, done: Done) -> None:
        record = self.record
        worker = next(worker for worker in self._workers() if worker.name == name)
        if done.reason == "error" and worker is self.route.prefill:
            self._go_alone(worker)
            return
        self._leave(worker)
        # The prefix hit is one fact that either side may know: the prompt was read once.
        record.cached_tokens = max(record.cached_tokens, done.num_cached)
        if worker is self.route.worker and self.route.prefill is not None:
            record.decode_stages = done.stages
        else:
            record.prefill_stages = done.stages
        if done.reason == "error":
            raise ApiError(500, done.message or "the worker failed", kind="server_error", code="engine_error")
        if done.reason in ("stop", "length"):
            self.reason = record.reason = done.reason

    def _go_alone(self, prefill: Worker) -> None:
        """Prefill cannot go on. Decode has the same model: it reads the prompt itself, from what has reached it."""
        self._leave(prefill)
        self.record.path, self.record.prefill = "colocated", ""
        self.route.worker.send(Prefill(self.id, self._prompt, self._params, self._salt))

    def _workers(self) -> Iterable[Worker]:
        return (self.route.worker,) if self.route.prefill is None else (self.route.prefill, self.route.worker)

    def _leave(self, worker: Worker) -> bool:
        reads = self.route.prefill or self.route.worker
        return worker.detach(self.id, len(self._prompt) if worker is reads else 0)


class Dispatcher:
    """Chooses routes, counts what waits, and says no early."""

    def __init__(self, workers: Workers, config: Config) -> None:
        self.workers = workers
        self._policy = config.router.policy
        self.queue_high = config.router.queue_high
        threshold = config.hybrid.threshold_tokens
        self.threshold = AUTO_THRESHOLD if threshold == "auto" else threshold
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

    # routes

    def prove(self, route: Route, instances: tuple[str, str]) -> None:
        self._proven[route.name] = instances

    def is_proven(self, route: Route) -> bool:
        return route.is_connected and self._proven.get(route.name) == route.instances

    @property
    def can_serve(self) -> bool:
        return any(self.is_proven(route) for route in self.routes) or bool(self._alone())

    def choose(self, num_prompt: int, same: Route | None = None) -> Route:
        """`same` again, if it still serves. Raises ApiError 503 when no worker can take it."""
        if same is not None and same.is_connected:
            return same
        pairs = [route for route in self.routes if route.prefill is not None and self.is_proven(route)]
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
        pool = [r.worker for r in self.routes if r.prefill is None and self.is_proven(r)]
        if pool:
            return pool
        proven = self._proven.items()
        return [
            worker
            for worker in self.workers.with_role("decode")
            if worker.is_connected and any(n.endswith(f">{worker.name}") and i[1] == worker.instance for n, i in proven)
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
