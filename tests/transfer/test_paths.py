"""Paths that stall, break or are abused: the sequences of that peer fail, its slots come back, nobody else notices."""

import errno
import random
import socket
from collections.abc import Iterator

import pytest

from server.messages import ChunkTag
from server.transfer.tcp import TcpTransport
from server.transfer.tcp_path import MAX_HEADER, frame_header, preface
from tests.transfer.world import BLOCK_BYTES, WAIT_S, World, seq, until

BIG_BLOCK = 256 * 1024


@pytest.fixture
def big(kind: str) -> Iterator[World]:
    """More bytes in flight than socket buffers hold, so that a frozen peer leaves posts unfinished."""
    world = World(kind, ring_slots=80, max_inflight=80, block_bytes=BIG_BLOCK, chunk_blocks=2, num_blocks=256)
    yield world
    world.close()


def everything(world: World) -> list[int]:
    return list(range(1, 161)) if world.source.shape[1] == BIG_BLOCK else list(range(1, 33))


def test_drop_in_flight_releases_only_after_the_last_post(big: World) -> None:
    """1. D stands still with posts under way. 2. Drop: not released. 3. D moves again: released, once."""
    blocks = everything(big)
    big.open(seq(1), blocks, blocks)
    thaw = big.freeze()
    big.push(seq(1), len(blocks))
    until(lambda: big.p_thread.run(lambda: big.sender.is_busy), what="posts under way")
    big.p_thread.run(big.sender.drop, seq(1))
    big.p_thread.run(big.sender.pump)
    assert big.p.count("released") == 0
    thaw.set()
    assert big.p.get("released") == ("released", seq(1))
    big.p_thread.run(big.sender.drop, seq(1))
    assert big.p.count("released") == 1
    big.receiver.revoke(seq(1))
    big.check()


def test_frozen_peer_fails_after_the_timeout(big: World) -> None:
    blocks = everything(big)
    big.open(seq(1), blocks, blocks)
    thaw = big.freeze()
    big.push(seq(1), len(blocks))
    until(lambda: big.p_thread.run(lambda: big.sender.is_busy), what="posts under way")
    big.clock.now += 29.0
    big.p_thread.run(big.sender.pump)
    assert big.p.count("failed") == 0
    big.clock.now += 2.0
    big.p_end.wake()
    assert big.p.get("failed") == ("failed", seq(1), "no progress for 30 s")
    assert big.p.get("lost")[1] == "D"
    big.drop(seq(1))
    thaw.set()
    failed = big.d.get("failed")
    assert failed[1] == seq(1)
    assert 0 <= failed[2] < len(blocks)
    assert big.d.get("lost")[1] == "P"
    until(lambda: big.ring.counts().free == big.ring.num_slots, what="slots free")
    big.ring.check_integrity()


def test_prefill_side_vanishes(big: World) -> None:
    """D keeps what is verified, says how far that is, and has every slot back."""
    blocks = everything(big)
    big.open(seq(1), blocks, blocks)
    big.push(seq(1), 10)
    until(lambda: big.receiver.counters["received"] == 5, what="five chunks")
    thaw = big.freeze()
    big.push(seq(1), len(blocks))
    until(lambda: big.p_thread.run(lambda: big.sender.is_busy), what="posts under way")
    assert big.p_thread.close(WAIT_S)
    thaw.set()
    _, failed, prefix = big.d.get("failed")
    assert failed == seq(1)
    assert prefix >= 10
    assert big.same(blocks[:prefix], blocks[:prefix])
    assert big.d.get("lost")[1] == "P"
    until(lambda: big.ring.counts().free == big.ring.num_slots, what="slots free")
    big.ring.check_integrity()


def test_decode_side_vanishes(big: World) -> None:
    """Everything for D fails once, and is released when dropped, not before."""
    blocks = everything(big)
    big.open(seq(1), blocks[:80], blocks[:80])
    big.open(seq(2), blocks[80:], blocks[80:])
    thaw = big.freeze()
    big.push(seq(1), 80)
    big.push(seq(2), 80)
    until(lambda: big.p_thread.run(lambda: big.sender.is_busy), what="posts under way")
    big.d_thread._closing.set()
    thaw.set()
    assert {big.p.get("failed")[1], big.p.get("failed")[1]} == {seq(1), seq(2)}
    assert big.p.get("lost")[1] == "D"
    assert big.p.count("released") == 0
    big.drop(seq(1))
    big.drop(seq(2))
    assert big.p.count("failed") == big.p.count("released") == 2
    big.p_thread.run(big.sender.open, seq(3), "D", 1, [1], 16, 0)
    assert big.p.get("failed")[1:] == (seq(3), "no path to peer D")
    big.drop(seq(3))


def test_peer_comes_back_with_new_slots(world: World) -> None:
    """The control connection ended and the same instance joins again: both sides forget, then start afresh."""
    world.open(seq(1), [1, 2, 3, 4], [1, 2, 3, 4])
    world.p_thread.peer_gone("D", "control connection lost")
    world.d_thread.peer_gone("P", "control connection lost")
    assert world.p.get("failed")[1] == seq(1)
    assert world.d.get("failed") == ("failed", seq(1), 0)
    world.drop(seq(1))
    world.d_thread.run(lambda: None)
    world.join()
    world.open(seq(2), [1, 2, 3, 4], [5, 6, 7, 8])
    world.push(seq(2), 4)
    world.complete(seq(2))
    assert world.same([1, 2, 3, 4], [5, 6, 7, 8])
    world.drop(seq(2))
    world.check()


def test_wrong_key_is_refused(world: World) -> None:
    world.p_thread.peer_gone("D", "start over")
    world.p_thread.run(lambda: None)
    world.d_thread.peer_gone("P", "start over")
    world.d_thread.run(lambda: None)
    offer = {**world.faults.offer(), "kv_key": "0" * 32}
    world.p_thread.run(world.sender.connect_peer, "D", offer)
    assert world.p.get("lost")[1] == "D"
    assert world.faults.counters["refused"] == 1


class BreaksAfterOne:
    """A socket that takes one post whole, and is dead then."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._num_sent = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)

    def sendmsg(self, batch: list[memoryview]) -> int:
        self._num_sent += 1
        if self._num_sent > 1:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        return self._sock.sendmsg(batch[:2])  # header and the blocks, which lie side by side


def test_what_was_sent_before_the_socket_broke_is_told() -> None:
    """As with one-sided writes: a post that is done stays done, whatever the next one meets in the same turn."""
    world = World("tcp")
    assert isinstance(world.p_end, TcpTransport)
    path = world.p_end._outgoing["D"]
    until(lambda: not path.is_waiting, what="the preface is out")
    world.open(seq(1), list(range(1, 17)), list(range(41, 57)))
    world.p_thread.run(lambda: setattr(path, "_is_connected", False))  # so that posts wait for one another
    world.p_thread.run(lambda: setattr(path, "_finish_connect", lambda: False))
    world.push(seq(1), 16)
    until(lambda: world.sender.counters["sent"] == 4, what="four posts wait")
    world.p_thread.run(lambda: setattr(path, "sock", BreaksAfterOne(path.sock)))
    world.p_thread.run(lambda: setattr(path, "_is_connected", True))
    assert world.p.get("failed")[1] == seq(1)
    world.drop(seq(1))
    assert not world.sender.is_busy
    world.close()


# What no well-behaved peer sends: raw sockets, so tcp only. "X" holds the key and has joined, as far as the first line.


@pytest.fixture
def abused() -> Iterator[World]:
    world = World("tcp", max_peers=2)
    yield world
    world.open(seq(9), [1, 2, 3, 4], [101, 102, 103, 104])
    world.push(seq(9), 4)
    world.complete(seq(9))
    assert world.same([1, 2, 3, 4], [101, 102, 103, 104])
    world.drop(seq(9))
    world.check()
    world.close()


def key(world: World) -> str:
    return str(world.faults.offer()["kv_key"])


def tag(slot: int, num_bytes: int) -> ChunkTag:
    return ChunkTag(seq(7), 1, slot, 0, 1, num_bytes, 0)


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True  # closed with some of ours unread


def refused(world: World, data: bytes) -> str:
    """Sends `data` as X; the reason its path ended with."""
    with world.raw() as sock:
        sock.sendall(preface(key(world), "X") + data)
        assert is_closed(sock)
    return str(world.d.get("lost")[2])


def test_vanishes_in_the_middle_of_a_chunk(abused: World) -> None:
    slots = abused.receiver.peer_joined("X")
    with abused.raw() as sock:
        sock.sendall(preface(key(abused), "X") + frame_header(tag(slots[0], BLOCK_BYTES)) + b"x" * 1000)
    assert abused.d.get("lost") == ("lost", "X", f"peer closed the path, 1000 of {BLOCK_BYTES} payload bytes")
    until(lambda: abused.ring.counts().free == 4, what="its slots free")


def test_slot_of_another_peer_is_refused(abused: World) -> None:
    abused.receiver.peer_joined("X")
    assert "is not credited to it" in refused(abused, frame_header(tag(abused.slots[0], BLOCK_BYTES)) + b"x" * 100)
    assert abused.faults.counters["refused"] == 1


@pytest.mark.parametrize("slot", [-1, 8, 10**6])
def test_slot_that_is_not_there_is_refused(abused: World, slot: int) -> None:
    abused.receiver.peer_joined("X")
    assert refused(abused, frame_header(tag(slot, 10))) == f"refused: slot {slot} of 8"


@pytest.mark.parametrize("num_bytes", [-1, 4 * BLOCK_BYTES + 1, 2**40])
def test_more_bytes_than_a_slot_are_refused(abused: World, num_bytes: int) -> None:
    slots = abused.receiver.peer_joined("X")
    assert refused(abused, frame_header(tag(slots[0], num_bytes))).startswith(f"refused: {num_bytes} bytes")


def test_slot_is_credited_once(abused: World) -> None:
    """Without D's word a slot is written once: the second frame comes before the first was taken out."""
    slots = abused.receiver.peer_joined("X")
    frame = frame_header(tag(slots[0], BLOCK_BYTES)) + b"x" * BLOCK_BYTES
    assert "is not credited to it" in refused(abused, frame + frame)


@pytest.mark.parametrize("length", [0, MAX_HEADER + 1, 2**32 - 1])
def test_header_of_impossible_length_is_refused(abused: World, length: int) -> None:
    abused.receiver.peer_joined("X")
    assert refused(abused, length.to_bytes(4, "big") + b"x" * 64).startswith(f"refused: header of {length} bytes")


def test_header_that_is_no_tag_is_refused(abused: World) -> None:
    abused.receiver.peer_joined("X")
    assert refused(abused, b"\0\0\0\x01\x05").startswith("refused: bad header")


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n" * 10, preface("0" * 32, "X"), preface("", "")])
def test_stranger_is_refused(abused: World, data: bytes) -> None:
    with abused.raw() as sock:
        sock.sendall(data)
        assert is_closed(sock)
    until(lambda: abused.faults.counters["refused"] == 1, what="refused")
    assert abused.d.count("lost") == 0


def test_stranger_that_says_nothing_is_closed(abused: World) -> None:
    with abused.raw() as sock:
        abused.d_thread.run(lambda: None)
        abused.d_thread.run(lambda: None)
        abused.clock.now += 6.0
        abused.faults.wake()
        assert sock.recv(1) == b""


def test_second_path_of_one_peer_is_refused(abused: World) -> None:
    with abused.raw() as sock:
        sock.sendall(preface(key(abused), "P"))
        assert sock.recv(1) == b""
    assert abused.d.count("lost") == 0


def test_noise_after_the_preface(abused: World) -> None:
    """Random bytes, and good frames with a few of them changed: whatever they mean, X's path ends or waits, and no more
    happens. The fixture then shows that P goes on."""
    rng = random.Random(9)
    for _ in range(60):
        slots = abused.d_thread.run(abused.receiver.peer_joined, "X")
        frame = bytearray(frame_header(tag(slots[0], 100)) + rng.randbytes(100))
        for _ in range(rng.randint(1, 4)):
            frame[rng.randrange(len(frame) - 100)] = rng.randrange(256)
        noise = bytes(frame) if rng.random() < 0.7 else rng.randbytes(rng.randint(1, 3000))
        with abused.raw() as sock:
            sock.sendall(preface(key(abused), "X") + noise)
        assert abused.d.get("lost")[1] == "X"
        abused.ring.check_integrity()


def test_nobody_listens(kind: str) -> None:
    """Connecting does not wait; that it failed comes as an event."""
    if kind == "local":
        return
    world = World(kind)
    offer = world.faults.offer()
    world.p_thread.peer_gone("D", "start over")
    world.p_thread.run(lambda: None)
    assert world.d_thread.close(WAIT_S)
    world.p_thread.connect_peer("D", offer)
    assert world.p.get("lost")[2].startswith(
        "NIXL refuses" if kind in ("nixl", "auto") else "cannot connect: Connection refused"
    )
    world.close()
