"""KV by NIXL's one-sided WRITE over UCX: NVLink, RDMA, shared memory or TCP, whatever both ends have.

1. Both ends register their memory once: the ring here, the pool there. The ring's end listens for lifelines; its offer
   holds that address, the agent's metadata, the ring's place in memory, and the key.
2. `connect` loads the metadata and dials the lifeline. Posts wait until the other end has admitted it.
3. Posts made between two polls leave as one write of all their pieces, up to `_WRITE_BYTES`; their tags are its note.
4. Nothing moves unless both ends poll: the lifeline says when, so that neither polls while nothing is under way.
5. A path that fails is told so at once. What it had under way may still land: only the lifeline's end proves that
   nothing can any more, and until then the ring keeps the slots (`PeerGone.is_quiet`, then EndpointGone).
"""

import secrets
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from server.errors import StartError, TransferError
from server.messages import ChunkTag
from server.transfer.base import Event, Offer, PeerGone, SendFailed
from server.transfer.lifeline import TOKEN_BYTES, Line
from server.transfer.nixl_agent import Agent, memory_kind
from server.transfer.nixl_incoming import Incoming
from server.transfer.nixl_outgoing import Outgoing, Target
from server.transfer.ring import LandingRing
from server.transfer.tcp_path import tune

_EAGER_TURNS = 30  # polls without a pause: a chunk on shared memory is there by then
_PAUSES_S = ((300, 0.00005), (2000, 0.0005))  # up to so many turns without news; then _SLOW_S
_SLOW_S = 0.005


class NixlTransport:
    """One end; `ring` makes it one that is written to. `advertise` is the host that peers connect to, if not `host`."""

    name = "nixl"

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
        self.counters: dict[str, float] = {"refused": 0, "stalled": 0, "writes": 0, "late": 0}
        self._timeout_s = timeout_s
        self._clock = clock
        self._events: list[Event] = []
        self._handle = 0
        self._outgoing: dict[str, Outgoing] = {}
        self._ending: list[Outgoing] = []  # failed, with writes that may still be under way
        self._registered: list[Tensor] = []
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        try:
            self._agent = Agent(f"{'decode' if ring is not None else 'prefill'}-{instance}")
            self._incoming = None if ring is None else self._listen(ring, host, port)
        except TransferError as error:
            raise StartError(error.message) from error
        self._offer: Offer = {"kv_transport": self.name, "kv_host_id": host_id()}
        if ring is not None and self._incoming is not None:
            self._offer |= {
                "kv_host": advertise or host,
                "kv_port": self._incoming.port,
                "kv_key": self._incoming.key,
                "kv_slot_bytes": ring.slot_bytes,
                "kv_num_slots": ring.num_slots,
                "kv_agent": self._agent.metadata().hex(),
                "kv_address": ring.data.data_ptr(),
                "kv_memory": memory_kind(ring.data),
                "kv_device": max(0, ring.data.get_device()),
            }

    def _listen(self, ring: LandingRing, host: str, port: int) -> Incoming:
        self._agent.register(ring.data)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as e:
            raise StartError(f"transfer: cannot listen on {host}:{port}: {e.strerror or e}") from e
        tune(listener)
        return Incoming(self._agent, ring, listener, self._selector, self._events, self.counters, self._clock)

    def offer(self) -> Offer:
        return dict(self._offer)

    def register(self, memory: Tensor) -> None:
        try:
            self._agent.register(memory)
        except TransferError as error:
            raise StartError(error.message) from error
        self._registered.append(memory)

    def connect(self, peer: str, offer: Offer) -> None:
        target = Target.of(peer, offer)
        if peer in self._outgoing:
            raise TransferError(f"already connected to {peer}")
        if any(path.peer == peer for path in self._ending):
            raise TransferError(f"an earlier path to {peer} still has writes under way")
        token = secrets.token_bytes(TOKEN_BYTES)
        line = Line.dial(target.line_address, target.key, self.instance, token, self._clock())
        try:
            remote = self._agent.add_remote(target.metadata)
        except TransferError:
            line.close()
            raise
        path = Outgoing(self._agent, target, remote, line, token, target.path(host_id()))
        self._outgoing[peer] = path
        self._selector.register(line.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, path)

    def disconnect(self, peer: str) -> None:
        path = self._outgoing.get(peer)
        if path is not None:
            self._end(path, "disconnected")
        elif self._incoming is None or not self._incoming.disconnect(peer):
            self._events.append(PeerGone(peer, "disconnected", is_quiet=not self.may_land(peer)))

    def has_path(self, peer: str) -> bool:
        return peer in self._outgoing or (self._incoming is not None and self._incoming.has_path(peer))

    def may_land(self, peer: str) -> bool:
        """Whether something of an ended path of `peer` may still land here."""
        return self._incoming is not None and self._incoming.may_land(peer)

    def path(self, peer: str) -> str:
        """What lies between, in words."""
        return self._outgoing[peer].path

    def fileno(self) -> int:
        """Readable when a poll would find something, as long as nothing is moving."""
        return self._selector.fileno()

    def post(self, peer: str, tag: ChunkTag, pieces: list[Tensor]) -> int:
        self._handle += 1
        path = self._outgoing.get(peer)
        if path is None:
            self._events += [SendFailed(self._handle, "not connected"), PeerGone(peer, "not connected")]
        else:
            path.queue(self._handle, tag, pieces, self._clock())
            self._flush(path, only_full=True)
        return self._handle

    def poll(self, timeout_s: float) -> list[Event]:
        deadline = time.monotonic() + timeout_s
        turns = 0
        for path in list(self._outgoing.values()):
            self._flush(path)
        while True:
            left = deadline - time.monotonic()
            was_woken = self._serve_sockets(self._wait_s(turns, left))
            has_news = self._progress()
            self._expire()
            if self._events or was_woken or left <= 0:
                break
            turns = 0 if has_news else turns + 1
        events = list(self._events)
        self._events.clear()
        return events

    def wake(self) -> None:
        try:
            self._waker.send(b"x")
        except OSError:
            pass  # full: it will wake anyway. Closed: nobody waits any more

    def close(self) -> None:
        for path in list(self._outgoing.values()):
            self._end(path, "closed")
        for _ in range(_EAGER_TURNS):  # most of what is under way ends here; the rest ends with the agent
            self._progress()
        if self._incoming is not None:
            self._incoming.close()
        self._agent.close()
        for path in self._ending:
            path.line.close()
        self._selector.close()
        self._waker.close()
        self._woken.close()

    # -- one turn ------------------------------------------------------------------------------------------------

    @property
    def is_moving(self) -> bool:
        """Whether polling can bring anything: something is under way, here or towards here."""
        return (
            bool(self._ending)
            or any(path.is_moving for path in self._outgoing.values())
            or (self._incoming is not None and self._incoming.is_moving)
        )

    def _wait_s(self, turns: int, left: float) -> float:
        """How long this turn may wait on the sockets. Short waits are slept here: a selector counts in milliseconds."""
        if self._events or left <= 0:
            return 0.0
        if not self.is_moving:
            return left
        if turns < _EAGER_TURNS:
            return 0.0
        for until, pause in _PAUSES_S:
            if turns < until:
                time.sleep(pause)
                return 0.0
        return min(left, _SLOW_S)

    def _serve_sockets(self, timeout_s: float) -> bool:
        """Whether `wake` was called."""
        was_woken = False
        for key, mask in self._selector.select(timeout_s):
            if isinstance(key.data, Outgoing):
                self._serve_outgoing(key.data, mask)
            elif key.fileobj is self._woken:
                self._woken.recv(4096)
                was_woken = True
            elif self._incoming is not None:
                self._incoming.serve(key)
        return was_woken

    def _serve_outgoing(self, path: Outgoing, mask: int) -> None:
        if path.line.sock.fileno() < 0:
            return
        try:
            path.serve_line(bool(mask & selectors.EVENT_WRITE))
        except TransferError as error:
            if path.is_ended:
                self._selector.unregister(path.line.sock)  # its writes are waited for without it
            else:
                self._end(path, error.message)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if path.line.has_unsent else 0)
        if self._selector.get_key(path.line.sock).events != events:
            self._selector.modify(path.line.sock, events, path)
        if not path.is_ended:
            self._flush(path)

    def _progress(self) -> bool:
        before = len(self._events)
        has_news = False
        for path in [p for p in self._outgoing.values() if p.is_moving]:
            try:
                path.advance(self._events)
            except TransferError as error:
                self._end(path, error.message)
        for path in list(self._ending):
            path.advance_ended()
            if not path.writes:
                self._close_path(path)
                has_news = True
        if self._incoming is not None:
            has_news |= self._incoming.advance()
        return has_news or len(self._events) > before

    def _flush(self, path: Outgoing, *, only_full: bool = False) -> None:
        try:
            self.counters["writes"] += path.flush(self._clock(), only_full=only_full)
        except TransferError as error:
            self._end(path, error.message)

    def _expire(self) -> None:
        now = self._clock()
        for path in list(self._outgoing.values()):
            if path.waits_since is not None and now - path.waits_since > self._timeout_s:
                self.counters["stalled"] += 1
                self._end(path, f"no progress for {self._timeout_s:g} s")
        if self._incoming is not None:
            self._incoming.expire(now)

    def _end(self, path: Outgoing, reason: str) -> None:
        """Its posts have failed, whatever of them is still under way: it can land in quarantined slots only."""
        del self._outgoing[path.peer]
        self._events += [SendFailed(handle, reason) for handle in path.end()]
        self._events.append(PeerGone(path.peer, reason))
        if path.writes:
            self._ending.append(path)
        else:
            self._close_path(path)

    def _close_path(self, path: Outgoing) -> None:
        if path in self._ending:
            self._ending.remove(path)
        if path.line.sock.fileno() in self._selector.get_map():
            self._selector.unregister(path.line.sock)
        path.close()


def host_id() -> str:
    """The same for processes under one kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
