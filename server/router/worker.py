"""One connection of the router: to a worker, for as long as both live.

    connecting -> connected -> lost -> connecting ...      refused: the handshake said why; tried again, slowly

1. A `Worker` connects, greets, sends heartbeats and reads messages until the connection ends or falls silent.
2. Tokens and Done go into the inbox of the sequence they name: one queue put a token, nothing else on this path. An
   inbox that nobody empties, because the client does not read, has the worker told to pause (`Attempt` resumes it).
3. When the connection ends, every sequence that still needs this worker finds a `Lost` in its inbox.
4. A restarted worker is a new instance: routes through it are to be proven again (`probe`).
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from server.errors import HandshakeRefused, PdctlError
from server.messages import (
    NAME_BYTES,
    AbortAck,
    AnyMessage,
    Blocks,
    Card,
    Done,
    Heartbeat,
    Load,
    NotResident,
    Pause,
    SeqToken,
    Tokens,
)
from server.sequence import SeqId
from server.wire import Channel, Identity, connect, greet

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SILENT_S = 3.0
SILENT_BUSY_S = 60.0
RETRY_S = (0.05, 2.0)
REFUSED_RETRY_S = 5.0
# Unread tokens of one sequence. A busy loop alone leaves a few dozen of them, and a client's buffers hold far more.
PAUSE_ABOVE, RESUME_AT = 256, 64


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection to a worker ended; `worker` had not said Done of this sequence."""

    id: SeqId
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Expired:
    """The request's time is over."""


Event = SeqToken | tuple[str, Done] | NotResident | Lost | Expired


class Inbox:
    """The events of one sequence, in order, for the one coroutine that waits for them. `paused`: the worker that was
    told that nobody reads, the last one whose tokens came."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.paused = ""

    @property
    def is_paused(self) -> bool:
        return bool(self.paused)

    def qsize(self) -> int:
        return len(self._events)

    def put_nowait(self, event: Event) -> None:
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Event:
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.popleft()

    def token(self) -> SeqToken | None:
        """The next event, if it is here and a token."""
        if not self._events or not isinstance(self._events[0], SeqToken):
            return None
        return self._events.popleft()  # type: ignore[return-value]


class Worker:
    def __init__(
        self,
        name: str,
        role: str,
        address: str,
        *,
        me: Identity,
        secret: bytes,
        card: Card,
        on_change: Callable[["Worker"], None],
        on_load: Callable[["Worker"], None] = lambda worker: None,
        greeting: Callable[["Worker"], list[AnyMessage]] = lambda worker: [],
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.name = name
        self.role = role
        self.address = address
        self._me = me
        self._secret = secret
        self._card = card
        self._on_change = on_change
        self._on_load = on_load
        self._greeting = greeting
        self._heartbeat_s = heartbeat_s
        self._channel: Channel | None = None
        self.state = "connecting"
        self.reason = ""  # why it is not connected
        self.instance = ""
        self.load: Load | None = None
        self.load_at = 0.0
        self.left_at = 0.0  # when it last had a sequence less
        self.heartbeat: Heartbeat | None = None
        self.heartbeat_at = 0.0
        self.open: dict[SeqId, Inbox] = {}
        self.prompt_tokens = 0  # not cached, of open sequences that this worker is to read
        self.num_reading = 0  # sequences that they belong to
        self.backlogged_at = math.inf  # since when some of them wait for others, without a break
        self.crossed_at = 0.0  # when it last got a prompt to read for another worker
        self.cached: set[bytes] = set()  # names of the prefix blocks that it said it has
        self.unexpected = 0
        self.is_draining = False  # by an operator: it ends what it has and gets nothing new
        self.pid: int | None = None  # if its card tells

    @property
    def rev(self) -> int:
        """Of the knobs that it has confirmed."""
        return self.load.rev if self.load is not None and self.is_connected else 0

    @property
    def shown_state(self) -> str:
        """In one word, for people."""
        if self.is_connected and self.is_draining:
            return "drained" if self.is_drained else "draining"
        return "busy" if self.is_connected and self.is_busy else self.state

    @property
    def is_drained(self) -> bool:
        """Nothing of it is needed any more: neither for a client nor for KV that another worker still waits for."""
        if self.role == "prefill" and (self.load is None or self.load_at <= self.left_at):
            return False  # the load is from before the last hand-over, whose KV may be under way by now
        return self.is_draining and not self.open and (self.load is None or not self.load.pushing)

    @property
    def is_connected(self) -> bool:
        return self._channel is not None

    @property
    def is_busy(self) -> bool:
        return self.heartbeat is not None and bool(self.heartbeat.busy)

    def send(self, message: AnyMessage) -> None:
        """Queues `message`; without a connection it is dropped, and whoever waits finds a Lost."""
        if self._channel is not None:
            self._channel.send(message)

    def attach(self, seq_id: SeqId, inbox: Inbox) -> None:
        self.open[seq_id] = inbox
        if self._channel is None:
            inbox.put_nowait(Lost(seq_id, self.name, self.reason or "not connected"))

    def detach(self, seq_id: SeqId) -> bool:
        """False when it was not attached any more."""
        self.left_at = time.monotonic()
        return self.open.pop(seq_id, None) is not None

    def begin_reading(self, num_tokens: int, now: float) -> None:
        self.prompt_tokens += num_tokens
        self.num_reading += 1
        if self.num_reading > 1:
            self.backlogged_at = min(self.backlogged_at, now)

    def end_reading(self, num_tokens: int) -> None:
        self.prompt_tokens -= num_tokens
        self.num_reading -= 1
        if self.num_reading <= 1:
            self.backlogged_at = math.inf

    async def run(self) -> None:
        """Keeps the connection up until cancelled. A bad peer costs its sequences, never this loop."""
        delay = RETRY_S[0]
        while True:
            try:
                await self._connection()
                delay = RETRY_S[0]
            except HandshakeRefused as error:
                self._set("refused", error.message)
                delay = REFUSED_RETRY_S
            except PdctlError as error:
                if self.state != "lost":
                    self._set("connecting", error.message)
                delay = min(delay * 2, RETRY_S[1])
            await asyncio.sleep(delay)

    async def _connection(self) -> None:
        channel = await connect(self.address)
        try:
            await greet(channel, self._me, self._secret, self._card)
            if channel.peer.name != self.name:
                raise HandshakeRefused(f"{self.address} is {channel.peer.name}, expected {self.name}")
            self._opened(channel)
            heartbeats = asyncio.create_task(self._send_heartbeats(channel))
            try:
                await self._read(channel)
            finally:
                heartbeats.cancel()
                self._closed()
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await channel.close()

    def _opened(self, channel: Channel) -> None:
        self._channel = channel
        self.instance = channel.peer.instance
        pid = channel.card.offer.get("pid") if channel.card else None
        self.pid = pid if isinstance(pid, int) else None
        self.cached = set()
        self.heartbeat_at = time.monotonic()
        for message in self._greeting(self):
            channel.send(message)
        self._set("connected")

    def _closed(self) -> None:
        self._channel = None
        self.load = self.heartbeat = None  # the next incarnation has figures of its own
        for seq_id, inbox in self.open.items():
            inbox.put_nowait(Lost(seq_id, self.name, self.reason))
        self._set("lost", self.reason)

    def _set(self, state: str, reason: str = "") -> None:
        if (state, reason) != (self.state, self.reason):
            level = logging.INFO if state == "connected" else logging.WARNING
            logger.log(level, "%s is %s", self.name, state, extra={"fields": {"reason": reason} if reason else {}})
        self.state = state
        self.reason = reason
        self._on_change(self)

    async def _send_heartbeats(self, channel: Channel) -> None:
        while True:
            channel.send(Heartbeat())
            await asyncio.sleep(self._heartbeat_s)

    async def _read(self, channel: Channel) -> None:
        """Returns when the connection is over, with `reason` set."""
        try:
            await channel.deliver(self._take, lambda: SILENT_BUSY_S if self.is_busy else SILENT_S)
        except TimeoutError:
            self.reason = "fell silent"
        except PdctlError as error:
            self.reason = error.message

    def _take(self, message: AnyMessage) -> None:
        match message:
            case Tokens():
                for item in message.items:
                    inbox = self.open.get(item.id)
                    if inbox is not None:
                        inbox.put_nowait(item)
                        if inbox.paused != self.name and inbox.qsize() > PAUSE_ABOVE:
                            inbox.paused = self.name
                            self.send(Pause(item.id))
            case NotResident():
                inbox = self.open.get(message.id)
                if inbox is not None:
                    inbox.put_nowait(message)
            case Blocks():
                if message.is_all:
                    self.cached = set()
                self.cached.update(_names(message.stored))
                self.cached.difference_update(_names(message.removed))
            case Done():
                inbox = self.open.get(message.id)
                if inbox is not None:
                    inbox.put_nowait((self.name, message))
            case Load():
                self.load, self.load_at = message, time.monotonic()
                self._on_load(self)
            case Heartbeat():
                was_busy = self.is_busy
                self.heartbeat, self.heartbeat_at = message, time.monotonic()
                if was_busy != self.is_busy:
                    self._on_change(self)
            case AbortAck():
                pass  # the router has forgotten the sequence when it sends Abort
            case _:
                self.unexpected += 1


def _names(packed: bytes) -> Iterator[bytes]:
    return (packed[i : i + NAME_BYTES] for i in range(0, len(packed), NAME_BYTES))
