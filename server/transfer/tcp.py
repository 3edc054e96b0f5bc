"""KV over plain sockets: any host, no dependency. One selector in the one transfer thread, no asyncio.

1. A decode end listens; its offer holds address and key. A prefill end connects, without waiting, and sends the
   preface.
2. A post is queued as views of the source blocks (no copy) and leaves with sendmsg as the socket takes it.
3. Payload is received into the ring slot that the tag names, if that slot is credited to that peer.
4. Whatever breaks a rule, stalls for `timeout_s` or closes, ends that peer's path with a reason, and no other.
"""

import secrets
import selectors
import socket
import time
from collections.abc import Callable

from torch import Tensor

from server.errors import StartError, TransferError
from server.messages import ChunkTag
from server.transfer.base import Arrived, Event, Offer, PeerGone, SendFailed
from server.transfer.ring import LandingRing
from server.transfer.tcp_path import Incoming, Outgoing, frame_header, tune

_PREFACE_TIMEOUT_S = 5.0
_MAX_STRANGERS = 64  # connections that have not shown the key yet

_Path = Outgoing | Incoming


class TcpTransport:
    """One end; `ring` makes it one that listens. `advertise` is the host that peers connect to, if not `host`."""

    name = "tcp"

    def __init__(
        self,
        instance: str,
        *,
        ring: LandingRing | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.instance = instance
        self.counters: dict[str, float] = {"refused": 0, "stalled": 0}
        self._key = secrets.token_hex(16)
        self._ring = ring
        self._timeout_s = timeout_s
        self._clock = clock
        self._events: list[Event] = []
        self._handle = 0
        self._outgoing: dict[str, Outgoing] = {}
        self._incoming: dict[str, Incoming] = {}
        self._strangers: set[Incoming] = set()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listener: socket.socket | None = None
        self._offer: Offer = {"kv_transport": self.name}
        if ring is not None:
            self._listen(ring, host, port, advertise)

    def _listen(self, ring: LandingRing, host: str, port: int, advertise: str) -> None:
        if ring.data.device.type != "cpu":
            raise StartError("the tcp transport receives into host memory: give it a landing ring on the CPU")
        self._memory = ring.data.view(-1).numpy().data
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as e:
            raise StartError(f"transfer: cannot listen on {host}:{port}: {e.strerror or e}") from e
        tune(self._listener)
        self._selector.register(self._listener, selectors.EVENT_READ)
        address = self._listener.getsockname()
        self._offer |= {
            "kv_host": advertise or host,
            "kv_port": address[1],
            "kv_key": self._key,
            "kv_slot_bytes": ring.slot_bytes,
        }

    def offer(self) -> Offer:
        return dict(self._offer)

    def register(self, memory: Tensor) -> None:
        """Any memory will do."""

    def connect(self, peer: str, offer: Offer) -> None:
        host, port, key = offer.get("kv_host"), offer.get("kv_port"), offer.get("kv_key")
        if not (isinstance(host, str) and isinstance(port, int) and isinstance(key, str)):
            raise TransferError(f"peer {peer} offers no tcp address: {sorted(offer)}")
        if peer in self._outgoing:
            raise TransferError(f"already connected to {peer}")
        path = Outgoing(peer, (host, port), key, self.instance, self._clock())
        self._outgoing[peer] = path
        self._selector.register(path.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, path)

    def disconnect(self, peer: str) -> None:
        paths: list[_Path] = [p for p in (self._outgoing.get(peer), self._incoming.get(peer)) if p is not None]
        for path in paths:
            self._end(path, "disconnected")
        if not paths:
            self._events.append(PeerGone(peer, "disconnected"))

    def has_path(self, peer: str) -> bool:
        return peer in self._outgoing or peer in self._incoming

    def may_land(self, peer: str) -> bool:
        """Never: nothing is read from a socket that is closed."""
        return False

    def path(self, peer: str) -> str:
        """What lies between, in words."""
        return "sockets to {}:{}".format(*self._outgoing[peer].address)

    @property
    def is_moving(self) -> bool:
        """A selector knows everything there is to know here."""
        return False

    def fileno(self) -> int:
        return self._selector.fileno()

    def post(self, peer: str, tag: ChunkTag, pieces: list[Tensor]) -> int:
        self._handle += 1
        path = self._outgoing.get(peer)
        if path is None:
            self._events += [SendFailed(self._handle, "not connected"), PeerGone(peer, "not connected")]
            return self._handle
        was_waiting = path.is_waiting
        path.queue(self._handle, frame_header(tag), [_view(piece) for piece in pieces], self._clock())
        if not was_waiting:
            self._flush(path)  # the peer verifies this one while the next is prepared here
        return self._handle

    def poll(self, timeout_s: float) -> list[Event]:
        for key, mask in self._selector.select(0 if self._events else timeout_s):
            if isinstance(key.data, Outgoing):
                self._serve_outgoing(key.data, mask)
            elif isinstance(key.data, Incoming):
                self._serve_incoming(key.data)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                self._woken.recv(4096)
        self._expire()
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        try:
            self._waker.send(b"x")
        except OSError:
            pass  # full: it will wake anyway. Closed: nobody waits any more

    def close(self) -> None:
        paths: list[_Path] = [*self._outgoing.values(), *self._incoming.values(), *self._strangers]
        for path in paths:
            self._end(path, "closed")
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        self._waker.close()
        self._woken.close()

    def _serve_outgoing(self, path: Outgoing, mask: int) -> None:
        if path.sock.fileno() < 0:
            return  # ended by an earlier event of this poll
        if mask & selectors.EVENT_READ:
            try:
                path.check_read()
            except TransferError as e:
                self._end(path, e.message)
                return
        if mask & selectors.EVENT_WRITE:
            self._flush(path)

    def _flush(self, path: Outgoing) -> None:
        try:
            path.flush(self._clock(), self._events)
        except TransferError as e:
            self._end(path, e.message)
            return
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if path.is_waiting else 0)
        if self._selector.get_key(path.sock).events != mask:
            self._selector.modify(path.sock, mask, path)

    def _serve_incoming(self, path: Incoming) -> None:
        arrived: list[Arrived] = []
        reason = ""
        try:
            path.read(arrived)
        except TransferError as e:
            reason = e.message
        if path in self._strangers and path.peer:
            reason = self._admit(path) or reason
        self._events += arrived
        if reason:
            self._end(path, reason)

    def _admit(self, path: Incoming) -> str:
        self._strangers.discard(path)
        if path.peer in self._incoming:
            path.peer = ""  # its end is not the end of the path that exists
            return "refused: that peer has a path already"
        self._incoming[path.peer] = path
        return ""

    def _accept(self) -> None:
        assert self._listener is not None
        assert self._ring is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # gone again
        if len(self._strangers) >= _MAX_STRANGERS:
            self.counters["refused"] += 1
            sock.close()
            return
        path = Incoming(sock, self._key, self._ring, self._memory, self._clock)
        self._strangers.add(path)
        self._selector.register(sock, selectors.EVENT_READ, path)

    def _expire(self) -> None:
        now = self._clock()
        for path in [p for p in self._outgoing.values() if p.is_waiting and now - p.progress_at > self._timeout_s]:
            self.counters["stalled"] += 1
            self._end(path, f"no progress for {self._timeout_s:g} s")
        for stranger in [s for s in self._strangers if now - s.since > _PREFACE_TIMEOUT_S]:
            self._end(stranger, "refused: no preface")

    def _end(self, path: _Path, reason: str) -> None:
        """Closes the socket first: after that nothing of it is read or can land, and the events may say so."""
        self._selector.unregister(path.sock)
        path.sock.close()
        if reason.startswith("refused"):
            self.counters["refused"] += 1
        if isinstance(path, Outgoing):
            del self._outgoing[path.peer]
            self._events += [SendFailed(handle, reason) for handle in path.unfinished()]
        else:
            self._strangers.discard(path)
            if self._incoming.get(path.peer) is path:
                del self._incoming[path.peer]
        if path.peer:
            self._events.append(PeerGone(path.peer, reason))


def _view(piece: Tensor) -> memoryview:
    """Of the piece's own bytes; a piece on a device is copied to the host first."""
    return (piece if piece.device.type == "cpu" else piece.cpu()).numpy().data
