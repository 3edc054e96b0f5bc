"""Two ends with real threads, and what a conformance story needs: pools with known bytes, faults by script, waits that
end. P is the prefill side, D the decode side."""

import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from server.messages import ChunkTag
from server.sequence import SeqId
from server.transfer.base import Arrived, Event, KVTransport, Offer, PeerGone
from server.transfer.codec import Codec
from server.transfer.either import EitherTransport
from server.transfer.faults import Fault, FaultyTransport
from server.transfer.local import LocalHub, LocalTransport
from server.transfer.nixl import NixlTransport
from server.transfer.receiver import Receiver, ReceiveStats
from server.transfer.ring import LandingRing
from server.transfer.sender import Sender
from server.transfer.tcp import TcpTransport
from server.transfer.thread import TransferThread

BLOCK_SIZE = 16
BLOCK_BYTES = 4096
NUM_BLOCKS = 2048
WAIT_S = 40.0


class Clock:
    """Stands still unless told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Box:
    """Callbacks in, waits out."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.seen: list[tuple[Any, ...]] = []

    def put(self, *event: Any) -> None:
        self.seen.append(event)
        self._queue.put(event)

    def get(self, what: str) -> tuple[Any, ...]:
        """The next event of this name; others are skipped."""
        deadline = time.monotonic() + WAIT_S
        while True:
            event = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            if event[0] == what:
                return event

    def count(self, what: str) -> int:
        return sum(e[0] == what for e in self.seen)


def seq(number: int, attempt: int = 0) -> SeqId:
    return SeqId("router", number, attempt)


def until(condition: Callable[[], bool], *, what: str = "") -> None:
    """For what has no event: polls, without being a synchronisation of its own."""
    pause = threading.Event()
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        pause.wait(0.002)


def random_pool(seed: int, num_blocks: int = NUM_BLOCKS, block_bytes: int = BLOCK_BYTES) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_blocks, block_bytes), dtype=torch.uint8, generator=generator)


class Wire:
    """A transport that only keeps what was posted."""

    name = "wire"

    def __init__(self) -> None:
        self.posts: list[tuple[str, ChunkTag, list[torch.Tensor]]] = []
        self.events: list[Event] = []
        self.counters: dict[str, float] = {}
        self.error: Exception | None = None
        self._woken = threading.Event()

    def offer(self) -> Offer:
        return {}

    def register(self, memory: torch.Tensor) -> None: ...

    def connect(self, peer: str, offer: Offer) -> None: ...

    def disconnect(self, peer: str) -> None:
        self.events.append(PeerGone(peer, "disconnected"))

    def post(self, peer: str, tag: ChunkTag, pieces: list[torch.Tensor]) -> int:
        self.posts.append((peer, tag, pieces))
        return len(self.posts)

    def poll(self, timeout_s: float) -> list[Event]:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if not self.events:
            self._woken.wait(timeout_s)
        self._woken.clear()
        events, self.events = self.events, []
        return events

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None: ...


class World:
    """`kind` is local, tcp, nixl or auto. Messages between P and D workers (credit, grant with missing) go straight
    across, as their control connection would carry them."""

    def __init__(
        self,
        kind: str,
        *,
        ring_slots: int = 8,
        chunk_blocks: int = 4,
        max_peers: int = 1,
        max_inflight: int = 16,
        timeout_s: float = 30.0,
        block_bytes: int = BLOCK_BYTES,
        num_blocks: int = NUM_BLOCKS,
        checksum: bool = True,
        codec: Codec | None = None,
        receiver_codec: Codec | None = None,
        offered_codec: str = "none",
        device: str = "cpu",
        start: bool = True,
    ) -> None:
        self.kind = kind
        self.offered_codec = offered_codec
        self.clock = Clock()
        self.hub = LocalHub()
        self.fault: Callable[[Arrived], Fault] = lambda arrived: Fault.NONE
        self.ring = LandingRing(ring_slots * chunk_blocks * block_bytes, block_bytes, chunk_blocks, max_peers, device)
        self.source = random_pool(1, num_blocks, block_bytes).to(device)
        self.pool = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)
        self.p, self.d = Box(), Box()
        self.timeout_s = timeout_s
        self.p_end = self.end("P")
        self.d_end = self.end("D", self.ring)
        self.faults = FaultyTransport(self.d_end, self.ring, lambda arrived: self.fault(arrived))
        self.sender = Sender(
            self.p_end,
            self.source,
            BLOCK_SIZE,
            chunk_tokens=chunk_blocks * BLOCK_SIZE,
            max_inflight=max_inflight,
            checksum=checksum,
            codec=codec,
            on_released=lambda seq_id: self.p.put("released", seq_id),
            on_failed=lambda seq_id, reason: self.p.put("failed", seq_id, reason),
        )
        self.receiver = Receiver(
            self.ring,
            self.pool,
            checksum=checksum,
            codec=receiver_codec,
            on_complete=lambda seq_id, stats: self.d.put("complete", seq_id, stats),
            on_missing=self._missing,
            on_failed=lambda seq_id, prefix: self.d.put("failed", seq_id, prefix),
            on_credit=self._credit,
            clock=self.clock,
            wake=self.faults.wake,
        )
        self.answers_missing = True
        self.p_thread = TransferThread(
            self.p_end,
            sender=self.sender,
            on_peer_lost=lambda peer, why: self.p.put("lost", peer, why),
            device=self.source.device,
            clock=self.clock,
        )
        self.d_thread = TransferThread(
            self.faults,
            receiver=self.receiver,
            on_peer_lost=lambda peer, why: self.d.put("lost", peer, why),
            device=self.pool.device,
            clock=self.clock,
        )
        self.slots: tuple[int, ...] = ()
        if start:
            self.p_thread.start()
            self.d_thread.start()
            self.join()

    def end(self, instance: str, ring: LandingRing | None = None) -> KVTransport:
        if self.kind == "local":
            return LocalTransport(self.hub, instance, ring=ring, timeout_s=self.timeout_s, clock=self.clock)
        if self.kind == "nixl":
            return NixlTransport(instance, ring=ring, timeout_s=self.timeout_s, clock=self.clock)
        if self.kind == "auto":
            nixl = NixlTransport(instance, ring=ring, timeout_s=self.timeout_s, clock=self.clock)
            tcp = TcpTransport(instance, ring=ring, timeout_s=self.timeout_s, clock=self.clock)
            return EitherTransport([nixl, tcp], {})
        return TcpTransport(instance, ring=ring, timeout_s=self.timeout_s, clock=self.clock)

    def join(self) -> None:
        self.p_thread.connect_peer("D", {**self.faults.offer(), "kv_codec": self.offered_codec})
        if isinstance(self.d_end, TcpTransport):
            incoming = self.d_end._incoming
            until(lambda: "P" in incoming, what="the path is admitted")
        until(lambda: self.ring.counts().quarantined == 0, what="an earlier path is quiet")
        self.slots = self.receiver.peer_joined("P")
        self.p_thread.call(self.sender.credit, "D", self.slots)

    def _credit(self, peer: str, slots: tuple[int, ...]) -> None:
        if peer == "P":
            self.p_thread.call(self.sender.credit, "D", slots)
        self.d.put("credit", peer, slots)

    def _missing(self, id: SeqId, ranges: tuple[tuple[int, int], ...]) -> None:
        if self.answers_missing:
            self.p_thread.call(self.sender.resend, id, ranges)
        self.d.put("missing", id, ranges)

    def open(
        self,
        id: SeqId,
        source: list[int],
        target: list[int],
        *,
        first: int = 0,
        generation: int = 1,
        num_tokens: int | None = None,
    ) -> None:
        """What a Grant does on both sides: D first."""
        num_tokens = len(source) * BLOCK_SIZE if num_tokens is None else num_tokens
        self.receiver.open(id, "P", generation, target, first, len(target) - first)
        self.p_thread.run(self.sender.open, id, "D", generation, source, num_tokens, first)

    def push(self, id: SeqId, stop: int) -> None:
        self.p_thread.call(self.sender.push, id, stop)

    def complete(self, id: SeqId) -> ReceiveStats:
        event = self.d.get("complete")
        assert event[1] == id
        stats = event[2]
        assert isinstance(stats, ReceiveStats)
        return stats

    def drop(self, id: SeqId) -> None:
        self.p_thread.call(self.sender.drop, id)
        assert self.p.get("released") == ("released", id)

    def tick(self, seconds: float) -> None:
        """Time passes, and the decode side's timers see it."""
        self.clock.now += seconds
        self.d_thread.run(self.receiver.tick, self.clock.now)

    def same(self, source: list[int], target: list[int]) -> bool:
        return torch.equal(self.source[source], self.pool[target])

    def freeze(self) -> threading.Event:
        """D's thread stands still until the event is set."""
        entered, thaw = threading.Event(), threading.Event()

        def stand_still() -> None:
            entered.set()
            thaw.wait(WAIT_S)

        self.d_thread.call(stand_still)
        assert entered.wait(WAIT_S)
        return thaw

    def raw(self) -> socket.socket:
        """A plain connection to D's listener, for what no well-behaved peer sends."""
        offer = self.faults.offer()
        return socket.create_connection((str(offer["kv_host"]), int(str(offer["kv_port"]))), timeout=WAIT_S)

    def is_quiet(self) -> bool:
        """P has every credit: whatever it posted was taken out at D."""
        return self.p_thread.run(lambda: len(self.sender._peers["D"].credits)) == len(self.slots)

    def check(self) -> None:
        """Nothing leaked: every slot is free or credited, all credits are back with P, nothing is open."""
        until(lambda: len(self.ring.credited("P")) == len(self.slots), what="all slots credited")
        self.p_thread.run(self.sender.pump)
        self.ring.check_integrity()
        counts = self.ring.counts()
        assert counts.quarantined == 0
        assert counts.free + counts.credited == counts.total
        if self.slots:  # D's word follows the slot's return by a moment
            until(
                lambda: sorted(self.p_thread.run(lambda: list(self.sender._peers["D"].credits))) == sorted(self.slots),
                what="all credits back with P",
            )
        assert not self.sender.is_busy
        assert self.sender.num_open == 0
        assert not self.receiver.is_busy
        assert self.p_thread.counters()["errors"] == self.d_thread.counters()["errors"] == 0

    def close(self) -> None:
        assert self.p_thread.close(WAIT_S)
        assert self.d_thread.close(WAIT_S)
