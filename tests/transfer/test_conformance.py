"""Every transport keeps the same promises: bytes equal, other sequences unharmed, no slot or block leaked."""

import random

import pytest
import torch

from server.transfer.faults import Fault
from tests.transfer.world import BLOCK_SIZE, World, seq, until


def test_in_order(world: World) -> None:
    source, target = list(range(10, 40)), list(range(100, 130))
    world.open(seq(1), source, target)
    for stop in (8, 9, 30):
        world.push(seq(1), stop)
    stats = world.complete(seq(1))
    assert world.same(source, target)
    assert stats.kv_bytes == stats.wire_bytes == 30 * 4096
    assert stats.overlap == 1.0
    assert stats.resends == 0
    world.drop(seq(1))
    world.check()


def test_scattered_tables(world: World) -> None:
    source, target = random.Random(3).sample(range(1, 500), 37), random.Random(4).sample(range(1, 500), 37)
    world.open(seq(1), source, target)
    world.push(seq(1), 37)
    world.complete(seq(1))
    assert world.same(source, target)
    world.drop(seq(1))
    world.check()


def test_partial_last_block_is_sent_whole(world: World) -> None:
    source, target = [5, 6, 7], [50, 51, 52]
    world.open(seq(1), source, target, num_tokens=2 * BLOCK_SIZE + 1)
    world.push(seq(1), 3)
    world.complete(seq(1))
    assert world.same(source, target)
    world.drop(seq(1))
    world.check()


def test_resident_prefix_is_not_sent(world: World) -> None:
    source, target = list(range(1, 11)), list(range(60, 70))
    world.open(seq(1), source, target, first=6)
    world.push(seq(1), 10)
    stats = world.complete(seq(1))
    assert stats.kv_bytes == 4 * 4096
    assert world.same(source[6:], target[6:])
    assert not world.pool[target[:6]].any()
    world.drop(seq(1))
    world.check()


def test_everything_resident_completes_at_once(world: World) -> None:
    world.open(seq(1), [1, 2], [1, 2], first=2)
    assert world.complete(seq(1)).kv_bytes == 0
    world.push(seq(1), 2)
    world.drop(seq(1))
    world.check()


def test_duplicate_arrival_and_duplicate_range(world: World) -> None:
    world.fault = lambda arrived: Fault.DUPLICATE
    source, target = list(range(1, 13)), list(range(60, 72))
    world.open(seq(1), source, target)
    world.push(seq(1), 8)
    until(lambda: world.receiver.counters["received"] == 2, what="two chunks")
    world.p_thread.call(world.sender.resend, seq(1), [(0, 8)])
    world.push(seq(1), 12)
    world.complete(seq(1))
    assert world.same(source, target)
    assert world.receiver.counters["duplicate"] >= 4
    world.drop(seq(1))
    world.check()


def test_lost_chunk_is_asked_for_again(world: World) -> None:
    """1. One of three chunks loses its bytes. 2. Nothing is asked before token 0, nor in the second after it.
    3. Then exactly that range is."""
    world.fault = lambda arrived: Fault.LOSE if arrived.tag.first_block == 4 else Fault.NONE
    source, target = list(range(1, 13)), list(range(60, 72))
    world.open(seq(1), source, target)
    world.push(seq(1), 12)
    until(lambda: world.receiver.counters["received"] == 2, what="the other two")
    until(lambda: world.faults.injected[Fault.LOSE] == 1, what="the loss")
    world.fault = lambda arrived: Fault.NONE
    world.tick(30.0)
    world.receiver.token0(seq(1))
    world.tick(0.9)
    assert world.d.count("missing") == 0
    world.tick(0.2)
    assert world.d.get("missing") == ("missing", seq(1), ((4, 8),))
    stats = world.complete(seq(1))
    assert stats.resends == 1
    assert stats.overlap == pytest.approx(8 / 12)
    assert world.same(source, target)
    assert world.receiver.counters["lost"] == 1
    world.drop(seq(1))
    world.check()


def test_four_asks_with_doubling_patience_then_failure(world: World) -> None:
    world.answers_missing = False
    world.fault = lambda arrived: Fault.LOSE if arrived.tag.first_block == 4 else Fault.NONE
    world.open(seq(1), list(range(1, 13)), list(range(60, 72)))
    world.push(seq(1), 12)
    until(lambda: world.faults.injected[Fault.LOSE] == 1, what="the loss")
    until(lambda: world.receiver.counters["received"] == 2, what="the other two")
    world.receiver.token0(seq(1))
    for asks, patience in enumerate((1.0, 2.0, 4.0, 8.0)):
        world.tick(patience - 0.1)
        assert world.d.count("missing") == asks
        world.tick(0.2)
        assert world.d.count("missing") == asks + 1
    world.tick(15.0)
    assert world.d.count("failed") == 0
    world.tick(1.1)
    assert world.d.get("failed") == ("failed", seq(1), 4)
    world.drop(seq(1))
    world.check()


def test_corrupt_chunk_is_asked_for_at_once(world: World) -> None:
    hit: list[int] = []

    def once(arrived: object) -> Fault:
        hit.append(1)
        return Fault.CORRUPT if len(hit) == 2 else Fault.NONE

    world.fault = once
    source, target = list(range(1, 13)), list(range(60, 72))
    world.open(seq(1), source, target)
    world.push(seq(1), 12)
    assert world.complete(seq(1)).resends == 1
    assert world.same(source, target)
    assert world.receiver.counters["checksum_failures"] == 1
    world.drop(seq(1))
    world.check()


def test_always_corrupt_gives_up_with_the_verified_prefix(world: World) -> None:
    world.fault = lambda arrived: Fault.CORRUPT if arrived.tag.first_block >= 4 else Fault.NONE
    world.open(seq(1), list(range(1, 9)), list(range(60, 68)))
    world.push(seq(1), 8)
    assert world.d.get("failed") == ("failed", seq(1), 4)
    assert not world.pool[64:68].any()
    world.drop(seq(1))
    world.check()


def test_late_after_revoke_leaves_the_next_owner_alone(world: World) -> None:
    """1. A's chunks are held. 2. A is revoked, its blocks go to B. 3. B completes. 4. A's chunks come: no change."""
    world.fault = lambda arrived: Fault.HOLD if arrived.tag.id == seq(1) else Fault.NONE
    target = list(range(60, 68))
    world.open(seq(1), list(range(1, 9)), target)
    world.push(seq(1), 8)
    until(lambda: world.faults.num_held == 2, what="A held")
    assert world.receiver.revoke(seq(1)) == 0
    world.open(seq(2), list(range(101, 109)), target)
    world.push(seq(2), 8)
    world.complete(seq(2))
    world.d_thread.run(world.faults.release)
    until(lambda: world.receiver.counters["dropped_unknown"] == 2, what="A dropped")
    assert world.same(list(range(101, 109)), target)
    world.drop(seq(1))
    world.drop(seq(2))
    world.check()


def test_reordered(world: World) -> None:
    world.fault = lambda arrived: Fault.HOLD
    source, target = list(range(1, 33)), list(range(60, 92))
    world.open(seq(1), source, target)
    world.push(seq(1), 32)
    until(lambda: world.faults.num_held == 8, what="all held")
    world.d_thread.run(lambda: world.faults.release(is_reversed=True))
    world.complete(seq(1))
    assert world.same(source, target)
    world.drop(seq(1))
    world.check()


@pytest.mark.parametrize("wrong", ["generation", "attempt", "instance"])
def test_chunks_of_another_grant_change_nothing(world: World, wrong: str) -> None:
    sent, wanted = seq(1), seq(1, attempt=1) if wrong == "attempt" else seq(1)
    peer = "another" if wrong == "instance" else "P"
    world.receiver.open(wanted, peer, 2 if wrong == "generation" else 1, list(range(60, 68)), 0, 8)
    world.p_thread.run(world.sender.open, sent, "D", 1, list(range(1, 9)), 8 * BLOCK_SIZE, 0)
    world.push(sent, 8)
    until(lambda: world.d.count("credit") == 2, what="both slots back")
    assert world.receiver.counters["dropped_unknown"] == 2
    assert not world.pool.any()
    assert world.receiver.revoke(wanted) == 0
    world.drop(sent)
    world.check()


@pytest.mark.parametrize(("first", "stop", "verified"), [(4, 9, 8), (0, 6, 4)])
def test_chunks_out_of_range_change_nothing(world: World, first: int, stop: int, verified: int) -> None:
    world.receiver.open(seq(1), "P", 1, list(range(60, 60 + stop)), first, stop - first)
    world.p_thread.run(world.sender.open, seq(1), "D", 1, list(range(1, 9)), 8 * BLOCK_SIZE, 0)
    world.push(seq(1), 8)
    until(lambda: world.d.count("credit") == 2, what="both slots back")
    assert world.receiver.counters["dropped_range"] == 1
    assert world.receiver.revoke(seq(1)) == verified
    world.drop(seq(1))
    world.check()


def test_chunk_tokens_changed_on_the_way(world: World) -> None:
    source, target = list(range(1, 101)), list(range(200, 300))
    world.open(seq(1), source, target)
    for stop, tokens in ((10, 16), (50, 32), (70, 4096), (100, 48)):
        world.sender.chunk_tokens = tokens
        world.push(seq(1), stop)
    world.complete(seq(1))
    assert world.same(source, target)
    world.drop(seq(1))
    world.check()


def test_200_sequences_at_once(world: World) -> None:
    rng = random.Random(5)
    ids = rng.sample(range(1, 2000), 1800)
    tables = [ids[9 * i : 9 * i + rng.randint(1, 9)] for i in range(200)]
    world.sender.chunk_tokens = 2 * BLOCK_SIZE
    for i, table in enumerate(tables):
        world.open(seq(i), table, table)
    for stop in (2, 5, 9):
        for i in range(200):
            world.push(seq(i), stop)
    done = {world.d.get("complete")[1] for _ in range(200)}
    assert done == {seq(i) for i in range(200)}
    for table in tables:
        assert world.same(table, table)
    used = {b for table in tables for b in table}
    assert not world.pool[[b for b in range(2048) if b not in used]].any()
    for i in range(200):
        world.drop(seq(i))
    world.check()


def test_short_one_does_not_wait_for_a_long_one(kind: str) -> None:
    world = World(kind, ring_slots=2)
    world.open(seq(1), list(range(1, 1001)), list(range(1, 1001)))
    world.open(seq(2), [1500, 1501], [1500, 1501])
    world.push(seq(1), 1000)
    world.push(seq(2), 2)
    assert world.d.get("complete")[1] == seq(2)
    assert world.d.get("complete")[1] == seq(1)
    world.drop(seq(1))
    world.drop(seq(2))
    world.check()
    world.close()


def test_new_generation_replaces_the_old(world: World) -> None:
    """A second grant for the same id: what the first one had in flight is old, what the second sends counts."""
    world.fault = lambda arrived: Fault.HOLD if arrived.tag.generation == 1 else Fault.NONE
    source = list(range(1, 9))
    world.open(seq(1), source, list(range(60, 68)))
    world.push(seq(1), 8)
    until(lambda: world.faults.num_held == 2, what="first grant held")
    world.open(seq(1), source, list(range(80, 88)), generation=2)
    world.push(seq(1), 8)
    world.complete(seq(1))
    world.d_thread.run(world.faults.release)
    until(lambda: world.receiver.counters["dropped_unknown"] == 2, what="old ones dropped")
    assert world.same(source, list(range(80, 88)))
    assert not world.pool[60:68].any()
    world.drop(seq(1))
    assert world.p.count("released") == 1
    world.check()


def test_without_checksum(kind: str) -> None:
    world = World(kind, checksum=False)
    world.open(seq(1), [1, 2, 3], [4, 5, 6])
    world.push(seq(1), 3)
    world.complete(seq(1))
    assert world.same([1, 2, 3], [4, 5, 6])
    world.drop(seq(1))
    world.check()
    world.close()


def test_random_faults_all_arrive(kind: str) -> None:
    """Loss, corruption and repetition by chance, 40 sequences; every byte right in the end."""
    rng = random.Random(11)
    faults = [Fault.LOSE, Fault.CORRUPT, Fault.DUPLICATE] + [Fault.NONE] * 12
    world = World(kind)
    world.fault = lambda arrived: rng.choice(faults)
    for i in range(40):
        table = list(range(1 + 20 * i, 21 + 20 * i))
        world.open(seq(i), table, table)
        world.receiver.token0(seq(i))
        world.push(seq(i), 20)

    while world.d.count("complete") + world.d.count("failed") < 40:
        until(world.is_quiet, what="everything posted has been answered")
        world.tick(1.1)
    assert torch.equal(world.source[1:801], world.pool[1:801])
    assert world.d.count("failed") == 0
    for i in range(40):
        world.drop(seq(i))
    world.check()
    world.close()


def test_slow_peer_is_waited_for(kind: str) -> None:
    """Each chunk takes a third of the limit; as long as there is progress, the whole may take any time."""
    world = World(kind, ring_slots=2)

    def slowly(arrived: object) -> Fault:
        world.clock.now += 10.0
        return Fault.NONE

    world.fault = slowly
    source, target = list(range(1, 33)), list(range(60, 92))
    world.open(seq(1), source, target)
    world.push(seq(1), 32)
    assert world.complete(seq(1)).transfer > world.timeout_s
    assert world.same(source, target)
    assert world.p.count("failed") == world.p.count("lost") == 0
    world.drop(seq(1))
    world.check()
    world.close()


@pytest.mark.parametrize("side", ["P", "D"])
@pytest.mark.parametrize("moment", ["opened", "posted", "held", "half", "complete"])
def test_abort_at_every_moment(world: World, moment: str, side: str) -> None:
    """One side gives the sequence up, then hears that the other has as well. Its blocks are clean for the next
    owner."""
    world.fault = lambda arrived: Fault.HOLD if moment == "held" and arrived.tag.id == seq(1) else Fault.NONE
    source, target = list(range(1, 17)), list(range(60, 76))
    thaw = world.freeze() if moment == "posted" else None
    world.open(seq(1), source, target)
    if moment != "opened":
        world.push(seq(1), 8 if moment == "half" else 16)
    if moment == "posted":
        until(lambda: world.sender.counters["sent"] == 4, what="posts under way")
    if moment == "held":
        until(lambda: world.faults.num_held == 4, what="all held")
    if moment == "half":
        until(lambda: world.receiver.counters["received"] == 2, what="half of it")
    if moment == "complete":
        world.complete(seq(1))
    ends = [lambda: world.receiver.revoke(seq(1)), lambda: world.p_thread.call(world.sender.drop, seq(1))]
    for end in ends if side == "D" else reversed(ends):
        end()
    world.open(seq(2), list(range(101, 117)), target)
    if thaw is not None:
        thaw.set()
    world.push(seq(2), 16)
    world.complete(seq(2))
    world.d_thread.run(world.faults.release)
    assert world.p.get("released") == ("released", seq(1))
    world.drop(seq(2))
    assert world.same(list(range(101, 117)), target)
    world.check()
