"""Transport within one process, over a hub that both ends share: for tests and for a worker that is both roles.

It keeps the traits that matter of a one-sided transport: bytes move only when the target polls, and the post's memory
is read until then. Faults are injected by `faults.FaultyTransport`, over this or any other transport.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from server.errors import TransferError
from server.messages import ChunkTag
from server.transfer.base import Arrived, Event, Offer, PeerGone, SendFailed, Sent
from server.transfer.ring import LandingRing


@dataclass(slots=True)
class _Post:
    handle: int
    sender: "LocalTransport"
    tag: ChunkTag
    pieces: list[Tensor]
    since: float


class LocalHub:
    """Where ends find each other. `lock` guards everything of every end: this is a fake, not a race for speed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ends: dict[str, LocalTransport] = {}
        self.key = secrets.token_hex(16)

    def pair(self, sender: str, receiver: str, ring: LandingRing) -> tuple["LocalTransport", "LocalTransport"]:
        """Two connected ends."""
        source, target = LocalTransport(self, sender), LocalTransport(self, receiver, ring=ring)
        source.connect(receiver, target.offer())
        return source, target


class LocalTransport:
    """One end; `ring` makes it one that can be written to."""

    name = "local"

    def __init__(
        self,
        hub: LocalHub,
        instance: str,
        *,
        ring: LandingRing | None = None,
        timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.instance = instance
        self.counters: dict[str, float] = {"refused": 0}
        self._hub = hub
        self._ring = ring
        self._timeout_s = timeout_s
        self._clock = clock
        self._happened = threading.Condition(hub.lock)
        self._events: list[Event] = []
        self._inbox: deque[_Post] = deque()
        self._paths: set[str] = set()  # peers that this end is connected to, in either direction
        self._woken = False
        self._handle = 0
        hub.ends[instance] = self

    def offer(self) -> Offer:
        if self._ring is None:
            return {"kv_transport": self.name}
        return {"kv_transport": self.name, "kv_key": self._hub.key, "kv_slot_bytes": self._ring.slot_bytes}

    def register(self, memory: Tensor) -> None:
        """Any memory will do."""

    def connect(self, peer: str, offer: Offer) -> None:
        with self._hub.lock:
            end = self._hub.ends.get(peer)
            if end is None or end._ring is None:
                raise TransferError(f"local: no end {peer!r} to connect to")
            if offer.get("kv_key") != self._hub.key:
                end.counters["refused"] += 1
                self._events.append(PeerGone(peer, "refused: wrong key"))
                return
            self._paths.add(peer)
            end._paths.add(self.instance)

    def disconnect(self, peer: str) -> None:
        with self._hub.lock:
            self._end_path(peer, "disconnected")

    def post(self, peer: str, tag: ChunkTag, pieces: list[Tensor]) -> int:
        with self._hub.lock:
            self._handle += 1
            if peer not in self._paths:
                self._events += [SendFailed(self._handle, "not connected"), PeerGone(peer, "not connected")]
            else:
                end = self._hub.ends[peer]
                end._inbox.append(_Post(self._handle, self, tag, pieces, self._clock()))
                end._happened.notify()
            return self._handle

    def poll(self, timeout_s: float) -> list[Event]:
        with self._hub.lock:
            if not (self._events or self._inbox or self._woken):
                self._happened.wait(timeout_s)
            self._woken = False
            self._deliver()
            self._expire()
            events, self._events = self._events, []
            return events

    def wake(self) -> None:
        with self._hub.lock:
            self._woken = True
            self._happened.notify()

    def close(self) -> None:
        with self._hub.lock:
            for peer in list(self._paths):
                self._end_path(peer, "closed")
            self._hub.ends.pop(self.instance, None)

    def _deliver(self) -> None:
        while self._inbox:
            post = self._inbox.popleft()
            sender = post.sender
            reason = self._write(post)
            if reason:
                self.counters["refused"] += 1
                self._inbox.appendleft(post)  # fails with the rest of its path
                self._end_path(sender.instance, f"refused: {reason}")
            else:
                sender._events.append(Sent(post.handle))
                sender._happened.notify()

    def _write(self, post: _Post) -> str:
        """Into the ring, if the slot is the sender's; "" or why not."""
        assert self._ring is not None
        peer, tag = post.sender.instance, post.tag
        reason = self._ring.begin_write(peer, tag.slot, tag.num_bytes)
        if not reason:
            target, position = self._ring.data[tag.slot], 0
            for piece in post.pieces:
                target[position : position + piece.numel()].copy_(piece)
                position += piece.numel()
            self._ring.landed(peer, tag.slot)
            self._events.append(Arrived(peer, tag, post.since))
        return reason

    def _expire(self) -> None:
        """A peer that does not poll for `timeout_s` while something waits for it is given up."""
        now = self._clock()
        for peer in list(self._paths):
            inbox = self._hub.ends[peer]._inbox
            if any(p.sender is self and now - p.since > self._timeout_s for p in inbox):
                self._end_path(peer, f"no progress for {self._timeout_s:g} s")

    def _end_path(self, peer: str, reason: str) -> None:
        """Both directions, both ends: what a closed socket does."""
        end = self._hub.ends.get(peer)
        if peer in self._paths and end is not None:
            self._fail_inbox(end, reason)
            end._fail_inbox(self, reason)
            end._paths.discard(self.instance)
            end._events.append(PeerGone(self.instance, reason))
            end._happened.notify()
        self._paths.discard(peer)
        self._events.append(PeerGone(peer, reason))
        self._happened.notify()

    def _fail_inbox(self, sender: "LocalTransport", reason: str) -> None:
        mine = [p for p in self._inbox if p.sender is sender]
        self._inbox = deque(p for p in self._inbox if p.sender is not sender)
        sender._events += [SendFailed(p.handle, reason) for p in mine]
