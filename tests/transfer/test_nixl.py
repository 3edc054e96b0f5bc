"""What NIXL 1.5.1 does by itself, as measured, and what the transport makes of it. Two agents in one process, or a real
process to stop and kill."""

import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from server.errors import TransferError
from server.messages import ChunkTag
from server.transfer import nixl_outgoing
from server.transfer.base import Arrived, EndpointGone, Event, Offer, PeerGone
from server.transfer.lifeline import LineEnded
from server.transfer.nixl import NixlTransport
from server.transfer.nixl_agent import Agent, WriteState, piece
from server.transfer.ring import LandingRing
from tests.transfer.world import World, seq, until

BYTES = 64 * 1024


class Pair:
    """Two agents, without a transport around them."""

    def __init__(self, name: str) -> None:
        self.source, self.target = torch.full((BYTES,), 7, dtype=torch.uint8), torch.zeros(BYTES, dtype=torch.uint8)
        self.p, self.d = Agent(f"prefill-{name}"), Agent(f"decode-{name}")
        self.p.register(self.source)
        self.d.register(self.target)
        self.remote = self.p.add_remote(self.d.metadata())

    def write(self, note: bytes = b"note") -> object:
        return self.p.write(self.remote, [piece(self.source)], "DRAM", [piece(self.target)], "DRAM", note)

    def both(self, handle: object) -> list[tuple[str, bytes]]:
        """Polls both ends until the note is here."""
        notes: list[tuple[str, bytes]] = []
        for _ in range(100_000):
            self.p.state(handle)
            notes += self.d.notes()
            if notes:
                return notes
        raise AssertionError("no note")


def test_trait_a_write_is_done_only_when_the_target_has_polled() -> None:
    pair = Pair("trait1")
    handle = pair.write()
    assert all(pair.p.state(handle) is WriteState.UNDER_WAY for _ in range(2000))
    assert pair.both(handle) == [("prefill-trait1", b"note")]
    assert pair.p.state(handle) is WriteState.DONE
    assert torch.equal(pair.source, pair.target)


def test_trait_the_note_leaves_only_when_the_initiator_polls() -> None:
    pair = Pair("trait2")
    handle = pair.write()
    assert not any(pair.d.notes() for _ in range(2000))
    assert pair.both(handle) == [("prefill-trait2", b"note")]


def test_trait_a_released_write_is_not_recalled() -> None:
    """What was posted lands, whatever the initiator thinks by then. So a slot is the writer's until its line ends."""
    pair = Pair("trait3")
    handle = pair.write()
    pair.p.release(handle)
    for _ in range(2000):
        pair.d.notes()
        pair.p.notes()
    assert torch.equal(pair.source, pair.target)


def test_trait_a_restarted_agent_under_its_old_name_is_refused() -> None:
    pair = Pair("trait4")
    with pytest.raises(TransferError, match="NIXL refuses"):
        pair.p.add_remote(Agent("decode-trait4").metadata())
    assert pair.p.add_remote(Agent("decode-trait4-restarted").metadata()) == "decode-trait4-restarted"


@pytest.mark.parametrize("has_ring", [True, False])
def test_nothing_under_way_costs_nothing(has_ring: bool) -> None:
    """No progress thread, and no polling either."""
    transport = NixlTransport("idle", ring=LandingRing(8192, 1024, 2, 1) if has_ring else None)
    before = time.process_time()
    transport.poll(0.5)
    assert time.process_time() - before < 0.1
    transport.close()


def test_neither_end_polls_once_everything_is_taken(quiet: World) -> None:
    quiet.open(seq(1), [1, 2, 3, 4], [5, 6, 7, 8])
    quiet.push(seq(1), 4)
    quiet.complete(seq(1))
    for end in (quiet.p_end, quiet.d_end):
        assert isinstance(end, NixlTransport)
        until(lambda end=end: not end.is_moving, what="both ends at rest")  # type: ignore[misc]
    assert quiet.p_end.counters["writes"] == 1
    quiet.drop(seq(1))
    quiet.check()


def test_chunks_that_are_ready_together_leave_as_one_write(quiet: World) -> None:
    quiet.open(seq(1), list(range(1, 33)), list(range(41, 73)))
    quiet.push(seq(1), 32)
    assert quiet.complete(seq(1)).chunks == 8
    assert quiet.p_end.counters["writes"] < 8
    quiet.drop(seq(1))
    quiet.check()


def test_what_ended_well_before_the_path_failed_is_told(quiet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One look finds the first write done and the second one failed: the posts of both are terminal, or their blocks
    would never be free again."""
    assert isinstance(quiet.p_end, NixlTransport)
    monkeypatch.setitem(nixl_outgoing._WRITE_BYTES, "DRAM", 1)  # every chunk a write
    states = iter([WriteState.DONE])
    monkeypatch.setattr(quiet.p_end._agent, "state", lambda handle: next(states, WriteState.FAILED))
    quiet.open(seq(1), list(range(1, 17)), list(range(41, 57)))
    quiet.push(seq(1), 16)
    assert quiet.p.get("failed")[1] == seq(1)
    quiet.drop(seq(1))
    assert not quiet.sender.is_busy


@pytest.fixture
def quiet() -> Iterator[World]:
    world = World("nixl")
    yield world
    world.close()


def test_ended_path_keeps_its_slots_until_its_line_has_ended(quiet: World) -> None:
    """1. D's control connection is lost while P's write is under way. 2. Its slots are quarantined, and a second loss
    does not free them. 3. P hears of it and lets go: they are free."""
    entered, thaw = threading.Event(), threading.Event()
    quiet.open(seq(1), [1, 2, 3, 4], [5, 6, 7, 8])
    quiet.p_thread.call(lambda: (entered.set(), thaw.wait(10)))
    assert entered.wait(10)
    for _ in range(2):
        quiet.d_thread.peer_gone("P", "control connection lost")
        quiet.d_thread.run(lambda: None)
        assert quiet.ring.counts().quarantined == len(quiet.slots)
    with pytest.raises(TransferError, match="the landing ring is full"):
        quiet.d_thread.run(quiet.receiver.peer_joined, "P")
    thaw.set()
    until(lambda: quiet.ring.counts().free == quiet.ring.num_slots, what="slots free")


def test_line_that_only_timed_out_proves_nothing(quiet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what a peer beyond a dead network still writes: its slots stay out of use."""
    assert isinstance(quiet.d_end, NixlTransport)
    incoming = quiet.d_end._incoming
    assert incoming is not None
    until(lambda: "P" in incoming._paths, what="the path is admitted")
    path = incoming._paths["P"]

    def timed_out(num_bytes: int = 0) -> bytes:
        raise LineEnded("connection lost: Connection timed out", is_proof=False)

    monkeypatch.setattr(path.line, "hear", timed_out)
    quiet.p_thread.peer_gone("D", "over")
    assert quiet.d.get("lost")[1] == "P"
    for _ in range(400):
        quiet.d_thread.run(lambda: None)
    assert quiet.ring.counts().quarantined == len(quiet.slots)


# A real process at the other end.


def writer(instance: str, offer: Offer, pipe: Connection) -> None:
    source = torch.full((4096,), 9, dtype=torch.uint8)
    transport = NixlTransport(instance)
    transport.register(source)
    transport.connect("D", offer)
    while True:
        if pipe.poll():
            slot = pipe.recv()
            transport.post("D", ChunkTag(seq(1), 1, slot, 0, 1, 4096, 0), [source])
        transport.poll(0.01)


def start(instance: str, transport: NixlTransport) -> tuple[mp.process.BaseProcess, Connection]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=writer, args=(instance, transport.offer(), theirs), daemon=True)
    process.start()
    return process, ours


def wait_for(transport: NixlTransport, kind: type[Event], within_s: float = 30.0) -> Event:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        for event in transport.poll(0.1):
            if isinstance(event, kind):
                return event
    raise AssertionError(f"no {kind.__name__}")


@pytest.mark.timeout(120)
def test_stopped_killed_and_restarted_writer() -> None:
    """1. A writes. 2. A is stopped, D gives it up: its slots stay quarantined. 3. A is killed: they are free, D learns
    that from the kernel. 4. A comes back as another instance and writes, without D being restarted."""
    ring = LandingRing(8 * 4096, 4096, 1, 1)
    transport = NixlTransport("D", ring=ring)
    process, pipe = start("A", transport)
    slots = ring.assign("A")
    pipe.send(slots[0])
    assert wait_for(transport, Arrived) == Arrived("A", ChunkTag(seq(1), 1, slots[0], 0, 1, 4096, 0))
    assert (ring.data[slots[0]] == 9).all()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    ring.release("A")
    transport.disconnect("A")
    assert wait_for(transport, PeerGone) == PeerGone("A", "disconnected", is_quiet=False)
    assert not [event for _ in range(5) for event in transport.poll(0.1)]
    assert ring.counts().quarantined == len(slots) - 1  # the slot that had arrived could be freed at once
    os.kill(process.pid, signal.SIGKILL)
    assert wait_for(transport, EndpointGone) == EndpointGone("A")
    ring.endpoint_gone("A")
    process.join(10)
    again, pipe = start("A-restarted", transport)
    pipe.send(ring.assign("A-restarted")[1])
    arrived = wait_for(transport, Arrived)
    assert isinstance(arrived, Arrived)
    assert arrived.peer == "A-restarted"
    again.kill()
    again.join(10)
    transport.close()
