"""One try of one sequence on one route, as the router sees it.

1. Entering an `Attempt` sends Prefill and Decode at once.
2. `more` waits for tokens and `next` gives those that are here, in index order, each index once, from whoever is first.
   If prefill fails on the way, decode is told to do the rest alone; if decode is lost before it had the prompt's KV,
   another one gets it from prefill; if nobody has the KV any more, another worker begins again, with the tokens so far
   as they are. The client notices only the time it takes.
3. Leaving it, for whatever reason, aborts on both workers what has not said Done.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from server.errors import PdctlError
from server.messages import Abort, Decode, Done, NotResident, Prefill, Resume, SeqToken
from server.router.errors import ApiError, timed_out, unavailable
from server.router.timing import Record
from server.router.worker import RESUME_AT, Event, Expired, Inbox, Lost, Worker
from server.sequence import SamplingParams, SeqId, Token

BATCH = 16  # tokens taken at once: enough for one write to cost little, few enough for the inbox to tell who is behind


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
    def workers(self) -> tuple[Worker, ...]:
        """In the order in which a prompt meets them."""
        return (self.worker,) if self.prefill is None else (self.prefill, self.worker)

    @property
    def is_connected(self) -> bool:
        return all(worker.is_connected for worker in self.workers)


@dataclass(frozen=True, slots=True)
class Plan:
    """A route for one prompt, and what it counts on."""

    route: Route
    num_to_read: int  # prompt tokens that whoever reads it is believed not to have cached
    num_resident: int = 0  # path `resident`: the worker is believed to hold as many, all but the last block
    otherwise: "Plan | None" = None  # when it does not
    num_uncached: int = 0  # on the best single worker: what the choice between one worker and two was made by
    by_threshold: bool = False  # there was that choice, so that what comes of it tells something about the threshold

    @property
    def path(self) -> str:
        return "resident" if self.num_resident else self.route.path

    def again(self) -> "Plan":
        """For one more output of the same prompt, once it is read: next to nothing of it is left to read."""
        return replace(self, num_to_read=1, num_uncached=1)


class Refused(PdctlError):
    """The request's own terms leave no token to go on with: its grammar has run into a limit."""


class Attempt:
    """One try of one sequence by one plan; by the other one, if what it counted on is not so."""

    def __init__(
        self,
        seq_id: SeqId,
        plan: Plan,
        prompt: list[int],
        params: SamplingParams,
        record: Record,
        *,
        salt: str = "",
        deadline_s: float = 0.0,
        another: Callable[[Route], Route | None] = lambda route: None,
        instead: Callable[[Route], Worker | None] = lambda route: None,
    ) -> None:
        """`another`: a route from the same prefill worker to another decode worker, if there is one. `instead`: a
        worker that can do the rest of a sequence whose route is broken."""
        self.id = seq_id
        self.plan = plan
        self.record = record
        self.reason = ""  # "stop" | "length" once over
        self._prompt = prompt
        self._params = params
        self._salt = salt
        self._deadline_s = deadline_s
        self._another = another
        self._instead = instead
        self._has_begun_again = False
        self._has_prefill = False  # prefill works for it, or holds its KV
        self._inbox = Inbox()
        self._timer: asyncio.TimerHandle | None = None
        self._reader: Worker | None = None  # until the first token
        self._said: list[int] = []  # token ids that `next` gave
        self._first = 0  # output index at which the prompt, and what is known of the output, is read
        self._ahead: dict[int, Token] = {}

    async def __aenter__(self) -> Self:
        self._send()
        if self._deadline_s:
            # A timer puts an event where the tokens come in, so that no wait for a token needs a timeout of its own.
            left = self.record.arrival + self._deadline_s - time.perf_counter()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, left), self._inbox.put_nowait, Expired())
        return self

    @property
    def route(self) -> Route:
        return self.plan.route

    def _send(self) -> None:
        plan, route, record = self.plan, self.route, self.record
        record.path, record.decode, record.prefill = plan.path, route.worker.name, ""
        record.prompt_tokens, record.uncached_tokens = len(self._prompt), plan.num_uncached
        record.by_threshold = plan.by_threshold
        record.sent = record.sent or time.perf_counter()
        self._reader = route.prefill or route.worker
        self._reader.begin_reading(plan.num_to_read, time.monotonic())
        self._first = len(self._output())
        self._has_prefill = route.prefill is not None
        if route.prefill is None:
            route.worker.attach(self.id, self._inbox)
            route.worker.send(self._whole(plan.num_resident))
        else:
            record.prefill = route.prefill.name
            route.prefill.crossed_at = time.monotonic()
            self._tell_pair(route.prefill, route.worker)

    def _whole(self, num_resident: int = 0) -> Prefill:
        """To be done by one worker, from the tokens on that are here."""
        return Prefill(
            self.id, self._prompt, self._params, self._salt, num_resident=num_resident, output=self._output()
        )

    def _output(self) -> list[int]:
        """The ids of all tokens so far, up to the first that is missing."""
        if not self._ahead:
            return list(self._said)
        waiting = map(self._ahead.get, itertools.count(len(self._said)))
        return self._said + [token.id for token in iter(lambda: next(waiting), None)]

    def _tell_pair(self, prefill: Worker, decode: Worker) -> None:
        prefill.attach(self.id, self._inbox)
        decode.attach(self.id, self._inbox)
        prefill.send(Prefill(self.id, self._prompt, self._params, self._salt, decode.name))
        decode.send(Decode(self.id, self._prompt, self._params, self._salt, prefill.name))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for worker in self.route.workers:
            if self._leave(worker):
                worker.send(Abort(self.id, "left"))

    async def more(self) -> bool:
        """Waits until `next` has a token; False when the sequence is over. Raises ApiError when it cannot go on, and
        Refused when it could nowhere."""
        while len(self._said) not in self._ahead:
            if self.reason and not self._ahead:
                return False
            self._take(await self._inbox.get())
            for item in itertools.islice(iter(self._inbox.token, None), BATCH - 1):
                self._take(item)
            if self._inbox.is_paused and self._inbox.qsize() <= RESUME_AT:
                self._inbox.paused = ""
                self.route.worker.send(Resume(self.id))
        return True

    def next(self) -> Token | None:
        """The next token, if it is here: a client that is behind gets several in one write."""
        token = self._ahead.pop(len(self._said), None)
        if token is not None:
            self._said.append(token.id)
            self.record.mark_token()
        return token

    def _take(self, event: Event) -> None:
        match event:
            case SeqToken():
                if event.id != self.id:
                    return
                if not self.reason and self._known(event.index) not in (None, event.token.id):
                    self._go_anew()
                    return
                if event.index >= len(self._said):
                    self._ahead.setdefault(event.index, event.token)
                if event.index == self._first:
                    self._has_read()
                    self.record.cached_tokens = max(self.record.cached_tokens, event.num_cached)
            case Lost() if event.id == self.id:  # not of an attempt before
                lost = next((w for w in self.route.workers if w.name == event.worker and self.id in w.open), None)
                if lost is self.route.worker:
                    self._go_elsewhere(lost)
                elif lost is not None:
                    self._go_alone(lost)
            case NotResident():
                self._go_otherwise(event)
            case Expired():
                raise timed_out(self._deadline_s)
            case (name, done) if done.id == self.id:
                self._done(name, done)

    def _known(self, index: int) -> int | None:
        if index < len(self._said):
            return self._said[index]
        token = self._ahead.get(index)
        return None if token is None else token.id

    def _done(self, name: str, done: Done) -> None:
        record = self.record
        worker = next(worker for worker in self.route.workers if worker.name == name)
        if done.reason == "error" and worker is self.route.prefill:
            self._go_alone(worker)
            return
        self._leave(worker)
        # The prefix hit is one fact that either side may know: the prompt was read once.
        record.cached_tokens = max(record.cached_tokens, done.num_cached)
        if worker is self.route.worker and self.route.prefill is not None:
            record.decode_stages = done.stages
            if done.stages.get("recomputed"):
                record.path = "colocated"  # whatever was planned: decode has read the prompt itself
        else:
            record.prefill_stages = done.stages
        if done.reason == "error":
            raise ApiError(500, done.message or "the worker failed", kind="server_error", code="engine_error")
        if done.reason == "refused":
            raise Refused(done.message)
        if done.reason in ("stop", "length"):
            self.reason = record.reason = done.reason
            if worker is self.route.prefill and "ahead" in done.stages:
                record.path = "colocated"  # decode had no room for it to the end

    def _go_elsewhere(self, lost: Worker) -> None:
        """Decode is gone. Until it had everything, which its second token tells, prefill has the prompt's KV, and
        another decode worker can have it from there."""
        self._leave(lost)
        prefill, had_all = self.route.prefill, len(self._said) > 1 or any(self._ahead)
        route = self._another(self.route) if self._has_prefill and not had_all else None
        if prefill is None or route is None:
            self._begin_again(lost)
        else:
            self.plan = replace(self.plan, route=route)
            self.record.decode = route.worker.name
            self._tell_pair(prefill, route.worker)

    def _begin_again(self, lost: Worker) -> None:
        """The KV is gone with whoever gave the output. The tokens are not: another worker reads them behind the prompt,
        and goes on. Once: a request that ends its workers must not go through all of them. Raises ApiError."""
        worker = None if self._has_begun_again else self._instead(self.route)
        if self.route.prefill is not None:
            self._leave(self.route.prefill)
            self.route.prefill.send(Abort(self.id, "decode worker lost"))
        if worker is None:
            raise unavailable(f"worker {lost.name} was lost while it held this request", "worker_lost")
        self._has_begun_again = True
        self._read_anew(worker)

    def _go_anew(self) -> None:
        """Two workers have said different tokens at one index: decode began alone (prefill was silent or lost) while
        the client had tokens that decode had not been told. Bfloat16 rounds by the batch, so that its own may differ,
        and what follows belongs to those. It reads the client's, and goes on behind them."""
        for worker in self.route.workers:
            if self._leave(worker):
                worker.send(Abort(self.id, "the client has other tokens"))
        self._read_anew(self.route.worker)

    def _read_anew(self, worker: Worker) -> None:
        num_known = len(self._output())
        self._ahead = {index: token for index, token in self._ahead.items() if index < num_known}
        self.plan = Plan(Route(worker), len(self._prompt) + num_known)
        self.id = SeqId(self.id.router, self.id.seq, self.id.attempt + 1)
        self._send()

    def _go_alone(self, prefill: Worker) -> None:
        """Prefill cannot go on. Decode has the same model: it reads the prompt itself, from what has reached it."""
        self._leave(prefill)
        self._has_prefill = False
        self.record.path, self.record.prefill = "colocated", ""
        self.route.worker.send(self._whole())

    def _go_otherwise(self, event: NotResident) -> None:
        """The router's view of that worker's cache was old. Nothing has begun there."""
        if event.id != self.id or self.plan.otherwise is None:
            return
        self._leave(self.route.worker)
        self.plan = self.plan.otherwise
        self.id = SeqId(self.id.router, self.id.seq, self.id.attempt + 1)
        self._send()

    def _has_read(self) -> None:
        if self._reader is not None:
            self._reader.end_reading(self.plan.num_to_read)
            self._reader = None

    def _leave(self, worker: Worker) -> bool:
        if worker is self._reader:
            self._has_read()
        return worker.detach(self.id)
