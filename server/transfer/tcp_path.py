"""The two ends of a tcp data path, each a non-blocking socket and a position in a stream.

1. Preface, once: magic, the key from the offer, the sender's instance id. Fixed size; anything else ends the path.
2. Frame: 4-byte big-endian length, msgpack ChunkTag, then `num_bytes` of payload, received straight into the ring slot.

The receiving side never sends: whatever comes back on an outgoing path means that it has ended.
"""

import errno
import hmac
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum

import msgspec

from server.errors import TransferError
from server.messages import ChunkTag
from server.transfer.base import Arrived, Event, Sent
from server.transfer.ring import LandingRing

MAX_HEADER = 1024
SOCKET_BUFFER = 4 * 2**20
_TURN_BYTES = 8 * 2**20  # what one path may move before the others get their turn
_MAX_PIECES = 256  # per sendmsg, well under IOV_MAX
_LENGTH = struct.Struct(">I")
_PREFACE = struct.Struct("8s32s64s")
_MAGIC = b"pdctlkv1"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ChunkTag).decode


def frame_header(tag: ChunkTag) -> bytes:
    body = _encode(tag)
    return _LENGTH.pack(len(body)) + body


def preface(key: str, instance: str) -> bytes:
    return _PREFACE.pack(_MAGIC, key.encode(), instance.encode())


def tune(sock: socket.socket) -> None:
    """Also of a listener: what it has when a connection begins decides how far the window can grow."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)


class Outgoing:
    """Views waiting to be sent, in order; a post is done when its last byte is in the kernel."""

    def __init__(self, peer: str, address: tuple[str, int], key: str, instance: str, now: float) -> None:
        self.peer = peer
        self.address = address
        self.progress_at = now
        self._is_connected = False
        self._views: deque[tuple[memoryview, int]] = deque([(memoryview(preface(key, instance)), 0)])
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        tune(self.sock)
        try:
            code = self.sock.connect_ex(address)
        except OSError as e:  # a name that does not resolve
            self.sock.close()
            raise TransferError(f"cannot connect to {address[0]}:{address[1]}: {e.strerror or e}") from e
        if code not in (0, errno.EINPROGRESS):
            self.sock.close()
            raise TransferError(f"cannot connect to {address[0]}:{address[1]}: {os.strerror(code)}")

    @property
    def is_waiting(self) -> bool:
        return bool(self._views)

    def queue(self, handle: int, header: bytes, pieces: list[memoryview], now: float) -> None:
        if not self._views:
            self.progress_at = now
        views = [memoryview(header), *(p for p in pieces if len(p))]
        self._views += [(view, 0) for view in views[:-1]]
        self._views.append((views[-1], handle))

    def flush(self, now: float, done: list[Event]) -> None:
        """Sends what the socket takes; adds the posts that are done. Raises TransferError; what was added counts."""
        if not self._is_connected and not self._finish_connect():
            return
        budget = _TURN_BYTES
        while self._views and budget > 0:
            batch = [self._views[i][0] for i in range(min(len(self._views), _MAX_PIECES))]
            try:
                sent = self.sock.sendmsg(batch)
            except BlockingIOError:
                break
            except OSError as e:
                raise TransferError(f"send: {e.strerror or e}") from e
            self.progress_at = now
            budget -= sent
            self._advance(sent, done)

    def unfinished(self) -> list[int]:
        return [handle for _, handle in self._views if handle]

    def check_read(self) -> None:
        """Readable: the other end closed, or broke the rule that it never sends. Raises TransferError either way."""
        if not self._is_connected and not self._finish_connect():
            return
        try:
            data = self.sock.recv(1)
        except BlockingIOError:
            return
        except OSError as e:
            raise TransferError(f"connection lost: {e.strerror or e}") from e
        raise TransferError("peer sent data on a one-way path" if data else "peer closed the path")

    def _finish_connect(self) -> bool:
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise TransferError(f"cannot connect: {os.strerror(code)}")
        with suppress(OSError):
            self.sock.getpeername()
            self._is_connected = True
        return self._is_connected

    def _advance(self, sent: int, done: list[Event]) -> None:
        while sent:
            view, handle = self._views[0]
            if sent < len(view):
                self._views[0] = (view[sent:], handle)
                return
            self._views.popleft()
            sent -= len(view)
            if handle:
                done.append(Sent(handle))


class _Stage(Enum):
    PREFACE = "preface"
    LENGTH = "length"
    HEADER = "header"
    PAYLOAD = "payload"


class Incoming:
    """Reads one peer's stream into the ring, after its preface. It can reach its credited slots and nothing else."""

    def __init__(
        self, sock: socket.socket, key: str, ring: LandingRing, memory: memoryview, clock: Callable[[], float]
    ) -> None:
        tune(sock)
        self.sock = sock
        self.since = clock()
        self._clock = clock
        self._began = 0.0  # when the frame under way did
        self.peer = ""  # known after the preface
        self._key = key.encode()
        self._ring = ring
        self._memory = memory  # of the whole ring
        self._header = memoryview(bytearray(MAX_HEADER))
        self._tag: ChunkTag | None = None
        self._want(_Stage.PREFACE, self._header[: _PREFACE.size])

    def read(self, arrived: list[Arrived]) -> None:
        """Adds chunks that are complete in their slots, until the socket is empty or this path's turn is over. Raises
        TransferError with the reason to close."""
        budget = _TURN_BYTES
        while budget > 0:
            try:
                count = self.sock.recv_into(self._target[self._got :])
            except BlockingIOError:
                return
            except OSError as e:
                raise TransferError(f"connection lost: {e.strerror or e}") from e
            if not count:
                raise TransferError(
                    f"peer closed the path, {self._got} of {len(self._target)} {self._stage.value} bytes"
                )
            budget -= count
            self._got += count
            if self._got == len(self._target):
                is_admission = self._stage is _Stage.PREFACE
                self._next(arrived)
                if is_admission:
                    return  # whether this peer may have a path is decided before it writes anything

    def _want(self, stage: _Stage, target: memoryview) -> None:
        self._stage, self._target, self._got = stage, target, 0

    def _next(self, arrived: list[Arrived]) -> None:
        match self._stage:
            case _Stage.PREFACE:
                self._read_preface()
            case _Stage.LENGTH:
                (length,) = _LENGTH.unpack(self._target)
                if not 0 < length <= MAX_HEADER:
                    raise TransferError(f"refused: header of {length} bytes, at most {MAX_HEADER}")
                self._began = self._clock()
                self._want(_Stage.HEADER, self._header[:length])
                return
            case _Stage.HEADER:
                tag = self._read_header()
                if tag.num_bytes:
                    start = tag.slot * self._ring.slot_bytes
                    self._tag = tag
                    self._want(_Stage.PAYLOAD, self._memory[start : start + tag.num_bytes])
                    return
                self._finish(tag, arrived)
            case _Stage.PAYLOAD:
                assert self._tag is not None
                self._finish(self._tag, arrived)
        self._want(_Stage.LENGTH, self._header[: _LENGTH.size])

    def _read_preface(self) -> None:
        magic, key, instance = _PREFACE.unpack(self._target)
        peer = instance.rstrip(b"\0").decode(errors="replace")
        if magic != _MAGIC or not hmac.compare_digest(key, self._key) or not peer:
            raise TransferError("refused: wrong preface or key")
        self.peer = peer

    def _read_header(self) -> ChunkTag:
        try:
            tag = _decode(self._target)
        except msgspec.MsgspecError as e:
            raise TransferError(f"refused: bad header: {e}") from e
        reason = self._ring.begin_write(self.peer, tag.slot, tag.num_bytes)
        if reason:
            raise TransferError(f"refused: {reason}")
        return tag

    def _finish(self, tag: ChunkTag, arrived: list[Arrived]) -> None:
        if self._ring.landed(self.peer, tag.slot):
            arrived.append(Arrived(self.peer, tag, self._began))
