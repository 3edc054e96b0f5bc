"""Framed messages on a connection, and the handshake that opens every connection.

1. Frame = 4-byte big-endian length + msgpack. A frame over MAX_FRAME ends the connection.
2. Handshake: client Hello(nonce), server Hello(nonce, proof), client Hello(proof, card), server Hello(card). A proof is
   an HMAC of both nonces with the per-stack secret, so neither side shows its card to a stranger.
3. Then either side may send any message. `Channel.send` never blocks: a peer that does not read is cut off, by size and
   by time, because a full buffer must not stop the loop that serves everybody else.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import msgspec

from server.errors import HandshakeRefused, PdctlError, PeerLost, ProtocolError, StartError
from server.messages import AnyMessage, Card, Hello

logger = logging.getLogger(__name__)

MAX_FRAME = 64 * 2**20
MAX_UNSENT = 64 * 2**20
MAX_UNREAD = 2**18  # bytes of frames that nobody has taken yet: above it the socket is not read
GRACE_S = 0.2
FAIR_SHARE = 32  # messages of one peer in one turn of the loop
CHECK_S = 1.0  # between looks at how long a peer has been silent
_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a process is. `instance` is random per start: a restarted worker is a new one."""

    name: str
    role: str
    instance: str

    @classmethod
    def new(cls, name: str, role: str) -> "Identity":
        return cls(name, role, secrets.token_hex(8))


class Channel(asyncio.Protocol):
    """One connection. `send` queues; `recv` returns the next message or raises PeerLost / ProtocolError; `deliver` has
    a function called with each."""

    def __init__(
        self, on_open: Callable[["Channel"], None] = lambda channel: None, *, send_timeout_s: float = 10.0
    ) -> None:
        self._on_open = on_open
        self._send_timeout_s = send_timeout_s
        self._transport: asyncio.Transport
        self._part = bytearray()  # of a frame that is not whole yet
        self._frames: deque[bytes] = deque()
        self.num_unread = 0  # bytes of them
        self._is_reading = True
        self._take: Callable[[AnyMessage], None] | None = None  # who gets the messages, rather than `recv`
        self._heard_at = 0.0
        self._is_passing_on = False  # in the next turn of the loop
        self._waiter: asyncio.Future[None] | None = None  # of `recv` or `deliver`
        self._timer: asyncio.TimerHandle | None = None
        self._end: PdctlError | None = None  # what `recv` raises after the last frame
        self._lost = asyncio.Event()
        self._stalled: asyncio.TimerHandle | None = None
        self.peer = Identity("?", "?", "?")
        self.card: Card | None = None

    @property
    def is_closed(self) -> bool:
        return self._transport.is_closing()

    # out

    def send(self, message: AnyMessage) -> None:
        """Queues `message`. A no-op on a closed channel: its reader reports the loss, once."""
        if self._transport.is_closing():
            return
        body = _encoder.encode(message)
        self._transport.write(_LENGTH.pack(len(body)) + body)
        unsent = self._transport.get_write_buffer_size()
        if unsent > MAX_UNSENT:
            self.abort()
        elif unsent and self._stalled is None:
            self._watch(unsent)

    def _watch(self, unsent: int) -> None:
        loop = asyncio.get_running_loop()
        self._stalled = loop.call_later(self._send_timeout_s, self._check_progress, unsent)

    def _check_progress(self, unsent_before: int) -> None:
        self._stalled = None
        unsent = 0 if self._transport.is_closing() else self._transport.get_write_buffer_size()
        if unsent >= unsent_before > 0:
            self.abort()
        elif unsent:
            self._watch(unsent)

    # in

    async def recv(self, timeout_s: float | None = None) -> AnyMessage:
        """Next message. With no timeout the connection's life is the limit: a dead peer closes it, heartbeats find a
        silent one. The time is the peer's: this loop's own stall counts for nothing. Raises TimeoutError."""
        while not self._frames:
            if self._end is not None:
                raise self._end
            await self._wait(timeout_s)
        return self._next()

    def _next(self) -> AnyMessage:
        frame = self._frames.popleft()
        self.num_unread -= len(frame)
        if not self._is_reading and self.num_unread <= MAX_UNREAD // 2:
            self._is_reading = True
            self._transport.resume_reading()
        try:
            return _decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"{self.peer.name} sent a frame that is no message: {error}") from error

    async def deliver(self, take: Callable[[AnyMessage], None], silent_s: Callable[[], float]) -> None:
        """Calls `take` with each message in the turn of the loop in which it came (FAIR_SHARE a turn: others on this
        loop want theirs), and ends as `recv` does: raises PeerLost, ProtocolError, and TimeoutError once nothing has
        come for `silent_s`, which may change meanwhile."""
        loop = asyncio.get_running_loop()
        self._take, self._heard_at = take, loop.time()
        try:
            self._pass_on()
            while self._end is None:
                left_s = self._heard_at + silent_s() - loop.time()
                try:
                    await self._wait(max(0.0, min(left_s, CHECK_S)))
                except TimeoutError:
                    # What lies here unread is not the peer's silence.
                    if not self._frames and loop.time() - self._heard_at >= silent_s():
                        raise
            while self._frames:
                self._pass_on()
            raise self._end
        finally:
            self._take = None  # whoever it was has done with this connection

    def _pass_on(self) -> None:
        self._is_passing_on = False
        if self._take is None:
            return
        loop = asyncio.get_running_loop()
        if self._frames:
            self._heard_at = loop.time()
        try:
            for _ in range(min(FAIR_SHARE, len(self._frames))):
                self._take(self._next())
        except Exception as error:  # of a message that is none, or of whoever takes them: no more from this peer
            self._frames.clear()
            if not isinstance(error, ProtocolError):
                logger.exception("a message of %s", self.peer.name)
                error = ProtocolError(f"a message of {self.peer.name} could not be handled: {error!r}")
            self._ends(error)
        if self._frames and not self._is_passing_on:
            self._is_passing_on = True
            loop.call_soon(self._pass_on)

    async def _wait(self, timeout_s: float | None) -> None:
        """For a frame, or the end."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        if timeout_s is not None:
            # Never at once: between `due` and the verdict the sockets are looked at, however late the first call is.
            self._timer = loop.call_later(timeout_s, self._expire, float("-inf"))
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _expire(self, due: float) -> None:
        """A loop that comes late reads what lies there before it gives a peer up: its timers run before its sockets are
        looked at."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now - due > GRACE_S:
            self._timer = loop.call_later(GRACE_S, self._expire, now + GRACE_S)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _ends(self, error: PdctlError) -> None:
        self._end = self._end or error
        self._wake()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own, of no common base
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        if self._end is not None:
            return
        whole: bytes | bytearray = data
        if self._part:
            self._part += data
            whole = self._part
        at = self._cut(whole)
        if whole is self._part:
            del self._part[:at]
        else:
            self._part += data[at:]
        if self._take is not None:
            if not self._is_passing_on:
                self._pass_on()
        elif self._frames:
            self._wake()
        if self._is_reading and self.num_unread > MAX_UNREAD:
            self._is_reading = False
            self._transport.pause_reading()

    def _cut(self, data: bytes | bytearray) -> int:
        """Whole frames off the start of `data`; how many bytes they were."""
        at, size = 0, _LENGTH.size
        while len(data) - at >= size:
            (length,) = _LENGTH.unpack_from(data, at)
            if length > MAX_FRAME:
                self._ends(ProtocolError(f"{self.peer.name} sent a frame of {length} bytes; the limit is {MAX_FRAME}"))
                return len(data)
            if len(data) - at - size < length:
                break
            at += size + length
            self._frames.append(bytes(data[at - length : at]))
            self.num_unread += length
        return at

    def eof_received(self) -> bool:
        self._ends(PeerLost(f"{self.peer.name} closed the connection"))
        return True  # what is queued may still leave

    def connection_lost(self, exc: Exception | None) -> None:
        self._ends(PeerLost(f"{self.peer.name} closed the connection"))
        self._lost.set()

    # the end

    def abort(self) -> None:
        """Ends the connection now, unsent data included."""
        self._transport.abort()

    async def close(self) -> None:
        """Sends what is queued (briefly), then ends the connection."""
        if self._stalled is not None:
            self._stalled.cancel()
        self._transport.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._lost.wait()
        self.abort()


async def connect(address: str, timeout_s: float = 5.0) -> Channel:
    """Opens a channel to "unix:/path" or "tcp:host:port". Raises PeerLost."""
    kind, _, rest = address.partition(":")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            if kind == "unix":
                _, channel = await loop.create_unix_connection(Channel, rest)
            else:
                host, _, port = rest.rpartition(":")
                _, channel = await loop.create_connection(Channel, host.strip("[]"), int(port))
            return channel
    except (OSError, TimeoutError) as error:
        raise PeerLost(f"cannot connect to {address}: {str(error) or 'timed out'}") from error


def bind(address: str) -> socket.socket:
    """Takes `address` without listening yet: callers are refused at once until `serve`. Raises StartError."""
    kind, _, rest = address.partition(":")
    try:
        if kind == "unix":
            with contextlib.suppress(FileNotFoundError):
                os.unlink(rest)
            sock = socket.socket(socket.AF_UNIX)
            sock.bind(rest)
        else:
            host, _, port = rest.rpartition(":")
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host.strip("[]"), int(port)))
    except OSError as error:
        raise StartError(f"cannot listen on {address}: {error.strerror or error}") from error
    return sock


async def serve(where: str | socket.socket, handle: Callable[[Channel], Awaitable[None]]) -> asyncio.Server:
    """Listens on an address or a bound socket; `handle` runs once a connection and closes it by returning."""

    tasks: set[asyncio.Task[None]] = set()  # the loop itself holds none

    async def run(channel: Channel) -> None:
        try:
            await handle(channel)
        finally:
            await channel.close()

    def on_open(channel: Channel) -> None:
        task = loop.create_task(run(channel))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop = asyncio.get_running_loop()
    sock = bind(where) if isinstance(where, str) else where
    if sock.family == socket.AF_UNIX:
        return await loop.create_unix_server(lambda: Channel(on_open), sock=sock)
    return await loop.create_server(lambda: Channel(on_open), sock=sock)


async def greet(channel: Channel, me: Identity, secret: bytes, card: Card, timeout_s: float = 5.0) -> None:
    """Client side of the handshake: sets `channel.peer` and `.card`. Raises HandshakeRefused, PeerLost."""
    nonce = secrets.token_bytes(16)
    channel.send(Hello(me.name, me.role, me.instance, nonce=nonce))
    answer = await _hello(channel, timeout_s)
    _prove(channel, answer, _proof(secret, b"server", nonce, answer.nonce, answer))
    mine = Hello(me.name, me.role, me.instance)
    proof = _proof(secret, b"client", nonce, answer.nonce, mine)
    channel.send(Hello(me.name, me.role, me.instance, proof=proof, card=card))
    last = await _hello(channel, timeout_s)
    _accept(channel, me, last, card)


async def welcome(channel: Channel, me: Identity, secret: bytes, card: Card, timeout_s: float = 5.0) -> None:
    """Server side of the handshake: as `greet`. A refusal is sent to the peer, then raised here."""
    first = await _hello(channel, timeout_s)
    nonce = secrets.token_bytes(16)
    mine = Hello(me.name, me.role, me.instance)
    proof = _proof(secret, b"server", first.nonce, nonce, mine)
    channel.send(Hello(me.name, me.role, me.instance, nonce=nonce, proof=proof))
    answer = await _hello(channel, timeout_s)
    _prove(channel, answer, _proof(secret, b"client", first.nonce, nonce, answer))
    _accept(channel, me, answer, card)
    channel.send(Hello(me.name, me.role, me.instance, card=card))


def _accept(channel: Channel, me: Identity, hello: Hello, card: Card) -> None:
    channel.peer = Identity(hello.name, hello.role, hello.instance)
    if hello.card is None:
        _refuse(channel, me, f"{hello.name} sent no model card")
        return
    differences = compare_cards(me.name, card, hello.name, hello.card)
    if differences:
        _refuse(channel, me, "model cards differ: " + "; ".join(differences))
    channel.card = hello.card


def compare_cards(my_name: str, mine: Card, their_name: str, theirs: Card) -> list[str]:
    """One readable line for each key that both know and that differs."""
    return [
        f"{key}: {my_name} has {mine.same[key]}, {their_name} has {theirs.same[key]}"
        for key in sorted(mine.same.keys() & theirs.same.keys())
        if mine.same[key] != theirs.same[key]
    ]


def _prove(channel: Channel, hello: Hello, expected: bytes) -> None:
    if not hmac.compare_digest(hello.proof, expected):
        raise HandshakeRefused(f"{hello.name or 'a peer'} does not know this stack's secret")


def _refuse(channel: Channel, me: Identity, reason: str) -> None:
    channel.send(Hello(me.name, me.role, me.instance, refused=reason))
    raise HandshakeRefused(reason)


async def _hello(channel: Channel, timeout_s: float) -> Hello:
    try:
        message = await channel.recv(timeout_s)
    except TimeoutError as error:
        raise PeerLost(f"no Hello within {timeout_s:g} s") from error
    if not isinstance(message, Hello):
        raise ProtocolError(f"expected Hello, got {type(message).__name__}")
    if message.refused:
        raise HandshakeRefused(message.refused)
    return message


def _proof(secret: bytes, side: bytes, client_nonce: bytes, server_nonce: bytes, who: Hello) -> bytes:
    """`side` keeps a proof from being played back in the other direction; the identity keeps it from being lent."""
    text = "\0".join((who.name, who.role, who.instance)).encode()
    return hmac.new(secret, b"\0".join((side, client_nonce, server_nonce, text)), hashlib.sha256).digest()
