"""Slots: shares, states, quarantine."""

import pytest

from server.errors import ConfigError, TransferError
from server.transfer.ring import LandingRing, RingCounts


def counts(ring: LandingRing) -> tuple[int, int, int]:
    c = ring.counts()
    return c.free, c.credited, c.quarantined


@pytest.fixture
def ring() -> LandingRing:
    return LandingRing(ring_bytes=9 * 256, block_bytes=64, blocks_per_slot=4, max_peers=2)


def test_shares_are_even_and_whole(ring: LandingRing) -> None:
    assert (ring.num_slots, ring.slot_bytes, ring.slots_per_peer) == (9, 256, 4)
    first, second = ring.assign("a"), ring.assign("b")
    assert len(first) == len(second) == 4
    assert not set(first) & set(second)
    assert isinstance(ring.counts(), RingCounts)
    assert counts(ring) == (1, 8, 0)
    with pytest.raises(TransferError, match="full"):
        ring.assign("c")
    with pytest.raises(TransferError, match="already"):
        ring.assign("a")
    ring.check_integrity()


def test_too_small_says_by_how_much() -> None:
    with pytest.raises(ConfigError, match=r"1000 gives 3 slots of 256 bytes \(4 blocks of 64\) for 2 peers") as e:
        LandingRing(1000, 64, 4, 2)
    assert "1024" in e.value.help
    with pytest.raises(ConfigError, match="32-bit words"):
        LandingRing(1000, 6, 4, 2)


def test_life_of_a_slot(ring: LandingRing) -> None:
    slot = ring.assign("a")[0]
    assert not ring.is_held("a", slot)
    assert ring.begin_write("a", slot, 256) == ""
    assert "not credited" in ring.begin_write("a", slot, 256)
    assert ring.landed("a", slot)
    assert ring.is_held("a", slot)
    assert not ring.is_held("b", slot)
    assert not ring.landed("a", slot)
    assert ring.credit("a", slot)
    assert not ring.credit("a", slot)
    assert ring.landed("a", slot)  # a one-sided write is only seen when it has landed
    ring.check_integrity()


@pytest.mark.parametrize(("slot", "num_bytes"), [(-1, 1), (9, 1), (0, -1), (0, 257), (8, 1)])
def test_what_a_peer_cannot_write(ring: LandingRing, slot: int, num_bytes: int) -> None:
    ring.assign("a")
    assert ring.begin_write("a", slot, num_bytes)
    assert counts(ring) == (5, 4, 0)


def test_quarantine_ends_with_the_endpoint(ring: LandingRing) -> None:
    """1. A held slot is free at once. 2. The others might be written now. 3. The endpoint is gone: free."""
    held, writing, *_ = ring.assign("a")
    ring.begin_write("a", held, 1)
    ring.landed("a", held)
    ring.begin_write("a", writing, 1)
    ring.release("a")
    assert counts(ring) == (6, 0, 3)
    assert not ring.has("a")
    assert not ring.credit("a", held)
    ring.check_integrity()
    ring.endpoint_gone("a")
    assert counts(ring) == (9, 0, 0)
    assert not ring.landed("a", writing)
    ring.check_integrity()


def test_quarantine_ends_with_the_write(ring: LandingRing) -> None:
    slot, *others = ring.assign("a")
    ring.release("a")
    assert not ring.landed("a", slot), "what lands late means nothing"
    assert counts(ring) == (6, 0, 3)
    again = ring.assign("a")
    assert not set(again) & set(others)
    ring.endpoint_gone("a")
    assert counts(ring) == (5, 4, 0), "the new share is not touched"
    ring.check_integrity()
