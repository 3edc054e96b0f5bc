"""Sender, Receiver and TransferThread by themselves, without a second end."""

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from server.errors import TransferError
from server.messages import ChunkTag
from server.sequence import SeqId
from server.transfer.base import Arrived, Offer, SendFailed, Sent
from server.transfer.checksum import Xxh3
from server.transfer.coverage import Coverage, adjacent, runs, union
from server.transfer.receiver import Receiver, ReceiveStats
from server.transfer.ring import LandingRing
from server.transfer.sender import Sender
from server.transfer.thread import TransferThread
from tests.transfer.world import WAIT_S, Clock, Wire, random_pool, seq

OFFER: Offer = {"kv_slot_bytes": 4 * 64}


class Prefill:
    """A Sender on a Wire, peer D connected, and what its callbacks said."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.released: list[SeqId] = []
        self.failed: list[tuple[SeqId, str]] = []
        self.lost: list[tuple[str, str]] = []
        self.sender = Sender(
            self.wire,
            random_pool(1, 64, 64),
            16,
            chunk_tokens=64,
            max_inflight=3,
            checksum=True,
            on_released=self.released.append,
            on_failed=lambda seq_id, reason: self.failed.append((seq_id, reason)),
        )
        self.sender.connect_peer("D", OFFER)

    def sent(self) -> list[tuple[int, int, int]]:
        return [(tag.id.seq, tag.first_block, tag.num_blocks) for _, tag, _ in self.wire.posts]


@pytest.fixture
def p() -> Prefill:
    return Prefill()


def test_runs_of_adjacent_blocks_are_one_piece(p: Prefill) -> None:
    p.sender.credit("D", [0])
    p.sender.open(seq(1), "D", 1, [7, 8, 9, 3], 64, 0)
    p.sender.push(seq(1), 4)
    _, tag, pieces = p.wire.posts[0]
    assert [piece.numel() for piece in pieces] == [192, 64]
    pool = random_pool(1, 64, 64)
    assert tag.checksum == Xxh3(256)([pool[[7, 8, 9, 3]].view(-1)])


def test_credit_and_inflight_bound_what_is_posted(p: Prefill) -> None:
    """Sent makes room in flight; only the peer's credit makes room in its ring."""
    p.sender.open(seq(1), "D", 1, list(range(40)), 640, 0)
    p.sender.push(seq(1), 40)
    assert p.sent() == []
    p.sender.credit("D", [5, 6, 7, 8])
    p.sender.credit("D", [8])
    assert len(p.wire.posts) == 3
    p.sender.ended(Sent(1))
    p.sender.pump()
    assert [tag.slot for _, tag, _ in p.wire.posts] == [5, 6, 7, 8]
    p.sender.max_inflight = 100
    p.sender.pump()
    assert len(p.wire.posts) == 4


def test_sequences_of_a_peer_take_turns(p: Prefill) -> None:
    p.sender.max_inflight = 100
    for number, blocks in ((1, 16), (2, 4), (3, 8)):
        p.sender.open(seq(number), "D", 1, list(range(blocks)), blocks * 16, 0)
        p.sender.push(seq(number), blocks)
    p.sender.credit("D", range(7))
    assert p.sent() == [(1, 0, 4), (2, 0, 4), (3, 0, 4), (1, 4, 4), (3, 4, 4), (1, 8, 4), (1, 12, 4)]


def test_resend_is_clipped_merged_and_goes_first(p: Prefill) -> None:
    p.sender.max_inflight = 100
    p.sender.open(seq(1), "D", 1, list(range(20)), 320, 2)
    p.sender.credit("D", [0, 1])
    p.sender.push(seq(1), 20)
    assert p.sent() == [(1, 2, 4), (1, 6, 4)]
    p.sender.resend(seq(1), [(0, 3), (8, 99), (9, 10)])
    p.sender.resend(seq(1), [(3, 4)])
    p.sender.credit("D", [2, 3, 4])
    assert p.sent()[2:] == [(1, 2, 2), (1, 8, 2), (1, 10, 4)]
    assert p.sender.counters["resent"] == 2


def test_released_once_after_the_last_post(p: Prefill) -> None:
    p.sender.credit("D", [0, 1])
    p.sender.open(seq(1), "D", 1, list(range(8)), 128, 0)
    p.sender.push(seq(1), 8)
    p.sender.drop(seq(1))
    p.sender.ended(Sent(1))
    assert p.released == []
    p.sender.ended(Sent(2))
    p.sender.drop(seq(1))
    assert p.released == [seq(1)]
    p.sender.push(seq(1), 8)
    p.sender.resend(seq(1), [(0, 8)])
    assert p.sender.counters["unexpected"] == 2


def test_failed_post_of_an_old_grant_elsewhere_is_not_the_new_ones_trouble(p: Prefill) -> None:
    p.sender.connect_peer("E", OFFER)
    p.sender.credit("D", [0])
    p.sender.credit("E", [0])
    p.sender.open(seq(1), "D", 1, list(range(4)), 64, 0)
    p.sender.push(seq(1), 4)
    p.sender.open(seq(1), "E", 1, list(range(4)), 64, 0)
    p.sender.push(seq(1), 4)
    p.sender.ended(SendFailed(1, "peer closed the path"))
    assert p.failed == []
    p.sender.drop(seq(1))
    assert p.released == []
    p.sender.ended(Sent(2))
    assert p.released == [seq(1)]


def test_impossible_opens(p: Prefill) -> None:
    p.sender.open(seq(1), "D", 1, [1, 2], 48, 0)
    p.sender.open(seq(2), "D", 1, [1, 64], 32, 0)
    p.sender.open(seq(3), "E", 1, [1], 16, 0)
    assert [reason for _, reason in p.failed] == [
        "blocks [0, 3) of a table of 2",
        "block 64 or 1 of 64",
        "no path to peer E",
    ]
    for number in (1, 2, 3):
        p.sender.drop(seq(number))
    assert len(p.released) == 3
    with pytest.raises(TransferError, match="a block has 64"):
        p.sender.connect_peer("E", {"kv_slot_bytes": 32})


def test_a_callback_that_fails_does_not_keep_blocks(p: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    p.sender.credit("D", [0])
    p.sender.open(seq(1), "D", 1, [1], 16, 0)
    p.sender.push(seq(1), 1)

    def drop_and_break(seq_id: SeqId, reason: str) -> None:
        p.sender.drop(seq_id)
        raise RuntimeError("callback")

    monkeypatch.setattr(p.sender, "_on_failed", drop_and_break)
    with pytest.raises(RuntimeError, match="callback"):
        p.sender.ended(SendFailed(1, "gone"))
    assert p.released == [seq(1)]


def test_coverage() -> None:
    coverage = Coverage(3, 5)
    assert coverage.missing() == ((3, 8),)
    assert coverage.prefix == 3
    assert not any(coverage.fits(*wrong) for wrong in ((2, 2), (7, 2), (3, 0), (3, -1), (2**62, 1)))
    coverage.cover(coverage.lacking(5, 2))
    coverage.cover(coverage.lacking(4, 3))
    assert (coverage.num_covered, coverage.prefix, coverage.missing()) == (3, 3, ((3, 4), (7, 8)))
    coverage.cover([3, 7])
    assert coverage.is_complete
    assert coverage.prefix == 8
    assert Coverage(3, 0).is_complete


def test_ranges() -> None:
    assert runs([7, 8, 9, 3]) == [(7, 10), (3, 4)]
    assert adjacent([0, 1, 3, 4], [7, 8, 9, 1, 2]) == [(0, 2), (3, 5)]
    assert adjacent([0, 1], [8, 7]) == [(0, 1), (1, 2)]
    assert union([(5, 6), (1, 3), (2, 4), (4, 5)]) == [(1, 6)]


class Decode:
    """A Receiver whose peer P writes by hand."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.ring = LandingRing(4 * 256, 64, 4, 1)
        self.pool = torch.zeros(64, 64, dtype=torch.uint8)
        self.source = random_pool(1, 64, 64)
        self.checksum = Xxh3(256)
        self.complete: list[tuple[SeqId, ReceiveStats]] = []
        self.missing: list[tuple[SeqId, tuple[tuple[int, int], ...]]] = []
        self.failed: list[tuple[SeqId, int]] = []
        self.credits: list[int] = []
        self.receiver = Receiver(
            self.ring,
            self.pool,
            checksum=True,
            on_complete=lambda seq_id, stats: self.complete.append((seq_id, stats)),
            on_missing=lambda seq_id, ranges: self.missing.append((seq_id, ranges)),
            on_failed=lambda seq_id, prefix: self.failed.append((seq_id, prefix)),
            on_credit=lambda peer, slots: self.credits.extend(slots),
            clock=self.clock,
        )
        self.slots = self.receiver.peer_joined("P")

    def chunk(self, number: int, first: int, count: int, slot: int = 0) -> Arrived:
        data = self.source[first : first + count].view(-1)
        self.ring.data[slot, : data.numel()] = data
        assert self.ring.landed("P", slot)
        return Arrived("P", ChunkTag(seq(number), 1, slot, first, count, data.numel(), self.checksum([data])))


@pytest.fixture
def d() -> Decode:
    return Decode()


def test_stats_and_overlap(d: Decode) -> None:
    d.receiver.open(seq(1), "P", 1, list(range(10, 18)), 0, 8)
    d.receiver.arrived(d.chunk(1, 0, 2))
    d.clock.now += 0.5
    d.receiver.token0(seq(1))
    d.receiver.arrived(d.chunk(1, 4, 4, slot=1))
    d.clock.now += 0.25
    d.receiver.arrived(d.chunk(1, 1, 4, slot=2))
    stats = ReceiveStats(100.0, 100.75, 0.75, 8 * 64, 10 * 64, 3, 0, 0.25)
    assert d.complete == [(seq(1), stats)]
    assert torch.equal(d.pool[10:18], d.source[:8])
    assert d.credits == [0, 1, 2]


def test_progress_starts_the_patience_anew(d: Decode) -> None:
    d.receiver.open(seq(1), "P", 1, list(range(8)), 0, 8)
    d.receiver.token0(seq(1))
    for _ in range(2):
        d.clock.now += 2.1
        d.receiver.tick(d.clock.now)
    assert d.missing == [(seq(1), ((0, 8),))] * 2
    d.receiver.arrived(d.chunk(1, 2, 2))
    d.clock.now += 1.1
    d.receiver.tick(d.clock.now)
    assert d.missing[2:] == [(seq(1), ((0, 2), (4, 8)))]


def test_covered_blocks_are_not_written_again(d: Decode) -> None:
    """A covered block may be in use by then; a chunk over its edge fills only the rest."""
    d.receiver.open(seq(1), "P", 1, list(range(8)), 0, 8)
    d.receiver.arrived(d.chunk(1, 0, 4))
    d.pool[3] = 0
    d.receiver.arrived(d.chunk(1, 2, 4))
    assert not d.pool[3].any()
    assert torch.equal(d.pool[4:6], d.source[4:6])
    assert d.receiver.revoke(seq(1)) == 6
    assert d.receiver.revoke(seq(1)) == 0


@pytest.mark.parametrize("num_come", [2, 4])
def test_who_revokes_first_learns_what_was_verified(d: Decode, num_come: int) -> None:
    """It ends of itself, and whoever it is for is about to hear of that, when he revokes it. 1. He learns what it had,
    once. 2. Nothing of it is left once he has heard. 3. Nor once the id is open anew."""

    def end() -> None:
        d.receiver.open(seq(1), "P", 1, list(range(4)), 0, 4)
        for first in range(0, num_come, 2):
            d.receiver.arrived(d.chunk(1, first, 2))
        d.receiver.fail(seq(1))  # where it is not complete

    end()
    assert [d.receiver.revoke(seq(1)) for _ in range(2)] == [num_come, 0]
    end()
    d.receiver.heard(seq(1))
    assert d.receiver.revoke(seq(1)) == 0
    end()
    d.receiver.open(seq(1), "P", 2, list(range(4)), 0, 4)
    assert d.receiver.revoke(seq(1)) == 0


def test_revoke_waits_for_the_copy_that_runs(d: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A copy is stopped half way. 2. Revoke is called elsewhere: it does not return. 3. The copy ends: it does, with
    the blocks counted. 4. Nothing is copied after it."""
    d.receiver.open(seq(1), "P", 1, list(range(8)), 0, 8)
    in_copy, go_on, revoked = threading.Event(), threading.Event(), threading.Event()
    copy = d.receiver._mover.scatter
    prefix: list[int] = []

    def slow_copy(*args: Any) -> int:
        in_copy.set()
        assert go_on.wait(WAIT_S)
        return copy(*args)

    monkeypatch.setattr(d.receiver._mover, "scatter", slow_copy)
    arrival = d.chunk(1, 0, 4)
    copier = threading.Thread(target=d.receiver.arrived, args=(arrival,))
    copier.start()
    assert in_copy.wait(WAIT_S)

    def revoke() -> None:
        prefix.append(d.receiver.revoke(seq(1)))
        revoked.set()

    revoker = threading.Thread(target=revoke)
    revoker.start()
    assert not revoked.wait(0.05)
    go_on.set()
    assert revoked.wait(WAIT_S)
    copier.join(WAIT_S)
    revoker.join(WAIT_S)
    assert prefix == [4]
    d.receiver.arrived(d.chunk(1, 4, 4, slot=1))
    assert not d.pool[4:8].any()
    assert d.credits == [0, 1]


def test_revoked_while_it_was_verified(d: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    d.receiver.open(seq(1), "P", 1, list(range(8)), 0, 8)
    intact = d.receiver._is_intact

    def revoke_then_verify(*args: object) -> bool:
        d.receiver.revoke(seq(1))
        return intact(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(d.receiver, "_is_intact", revoke_then_verify)
    d.receiver.arrived(d.chunk(1, 0, 4))
    assert not d.pool.any()
    assert d.receiver.counters["dropped_unknown"] == 1
    assert d.credits == [0]


@pytest.fixture
def thread() -> Iterator[tuple[TransferThread, Prefill]]:
    prefill = Prefill()
    thread = TransferThread(prefill.wire, sender=prefill.sender, on_peer_lost=lambda *lost: prefill.lost.append(lost))
    thread.start()
    yield thread, prefill
    assert thread.close(WAIT_S)


def test_nothing_ends_the_thread(thread: tuple[TransferThread, Prefill], caplog: pytest.LogCaptureFixture) -> None:
    """A command, a callback, an event for nobody and the transport itself go wrong: each is counted, and it goes on."""
    driver, prefill = thread
    driver.call(lambda: 1 / 0)
    prefill.wire.error = RuntimeError("poll")
    driver.run(lambda: None)
    prefill.wire.events.append(Sent(77))
    driver.run(lambda: None)
    driver.run(lambda: None)
    assert driver.counters()["errors"] == 3
    assert len(caplog.records) == 3
    with pytest.raises(ZeroDivisionError):
        driver.run(lambda: 1 / 0)
    assert driver.run(lambda: 5) == 5


def test_a_sequence_that_cannot_be_sent_fails_alone(p: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = p.sender._pieces

    def break_for_block_9(table: list[int]) -> list[torch.Tensor]:
        if 9 in table:
            raise RuntimeError("no such memory")
        return pieces(table)

    monkeypatch.setattr(p.sender, "_pieces", break_for_block_9)
    p.sender.open(seq(1), "D", 1, [9], 16, 0)
    p.sender.open(seq(2), "D", 1, [3], 16, 0)
    p.sender.push(seq(1), 1)
    p.sender.push(seq(2), 1)
    p.sender.credit("D", [0, 1])
    assert p.failed == [(seq(1), "RuntimeError: no such memory")]
    assert p.sent() == [(2, 0, 1)]
    p.sender.drop(seq(1))
    assert p.released == [seq(1)]


def test_path_that_cannot_be_opened_is_a_lost_peer(thread: tuple[TransferThread, Prefill]) -> None:
    driver, prefill = thread
    driver.connect_peer("E", {})
    driver.run(lambda: None)
    assert prefill.lost == [("E", "peer E has ring slots of None bytes, a block has 64")]


def test_close_without_start_and_run_without_thread() -> None:
    driver = TransferThread(Wire())
    with pytest.raises(TransferError, match="did not answer"):
        driver.run(lambda: None, timeout_s=0.01)
    assert driver.close()


def test_a_rank_writes_to_its_own(d: Decode, p: Prefill) -> None:
    """The tag says whose share of the heads the bytes are. Another rank's address is refused, and so is its chunk."""
    with pytest.raises(TransferError, match="peer E offers the address of rank 1; this is rank 0"):
        p.sender.connect_peer("E", {**OFFER, "kv_rank": 1})
    d.receiver.open(seq(1), "P", 1, list(range(8)), 0, 8)
    chunk = d.chunk(1, 0, 4)
    d.receiver.arrived(Arrived(chunk.peer, msgspec.structs.replace(chunk.tag, rank=1)))
    assert d.receiver.counters["dropped_range"] == 1
    assert not d.pool.any()
    assert d.credits == [0]
