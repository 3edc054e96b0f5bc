"""Connections: who is given up, and who only looks silent."""

import asyncio
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from server.errors import PeerLost, ProtocolError
from server.messages import Heartbeat
from server.wire import FAIR_SHARE, MAX_UNREAD, Channel, connect, serve


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Channel, Channel]]:
    """Two ends of a connection, without a handshake."""
    ends: asyncio.Queue[Channel] = asyncio.Queue()
    over = asyncio.Event()

    async def hold(channel: Channel) -> None:
        ends.put_nowait(channel)
        await over.wait()

    server = await serve(f"unix:{tmp_path}/s", hold)
    near = await connect(f"unix:{tmp_path}/s")
    yield near, await ends.get()
    over.set()
    await near.close()
    server.close()
    await server.wait_closed()


async def test_a_silent_peer_is_given_up(pair: tuple[Channel, Channel]) -> None:
    near, _ = pair
    with pytest.raises(TimeoutError):
        await near.recv(0.05)


async def test_a_stall_of_ones_own_is_not_the_peers_silence(pair: tuple[Channel, Channel]) -> None:
    """1 a wait, 2 the peer speaks in time, 3 this loop stands still past the limit, 4 it hears the peer."""
    near, far = pair
    waiting = asyncio.create_task(near.recv(0.1))
    await asyncio.sleep(0)
    far.send(Heartbeat(steps=7))
    time.sleep(0.6)  # noqa: ASYNC251  # the stall is the story
    assert await waiting == Heartbeat(steps=7)


def framed(messages: list[Heartbeat]) -> bytes:
    bodies = [msgspec.msgpack.encode(message) for message in messages]
    return b"".join(struct.pack(">I", len(body)) + body for body in bodies)


async def test_messages_are_delivered_in_order_to_the_last(pair: tuple[Channel, Channel]) -> None:
    """1 Three wait before anybody takes them. 2 A hundred come in one write: a share of them a turn, for others on this
    loop want theirs. 3 The peer writes ten more and is gone: they come before the end does."""
    near, far = pair
    for number in range(3):
        far.send(Heartbeat(steps=number))
    while near.num_unread < len(framed([Heartbeat(steps=n) for n in range(3)])) - 3 * 4:
        await asyncio.sleep(0.001)
    came: list[int] = []
    taking = asyncio.create_task(near.deliver(lambda m: came.append(m.steps), lambda: 10.0))  # type: ignore[union-attr]
    await asyncio.sleep(0)
    assert came == [0, 1, 2]
    near.data_received(framed([Heartbeat(steps=n) for n in range(3, 103)]))
    assert len(came) == 3 + FAIR_SHARE
    await asyncio.sleep(0)
    assert len(came) == 3 + 2 * FAIR_SHARE
    near.data_received(framed([Heartbeat(steps=n) for n in range(103, 113)]))
    near.eof_received()
    with pytest.raises(PeerLost):
        await taking
    assert came == list(range(113))


async def test_a_frame_that_is_none_ends_a_delivery(pair: tuple[Channel, Channel]) -> None:
    near, _ = pair
    came: list[object] = []
    taking = asyncio.create_task(near.deliver(came.append, lambda: 10.0))
    await asyncio.sleep(0)
    near.data_received(framed([Heartbeat(steps=1)]) + struct.pack(">I", 3) + b"abc" + framed([Heartbeat(steps=2)]))
    with pytest.raises(ProtocolError, match="no message"):
        await taking
    assert came == [Heartbeat(steps=1)]


async def test_whoever_is_done_gets_nothing_more(pair: tuple[Channel, Channel]) -> None:
    """Of a worker that is given up, nothing must reach what stands for the next one of its name."""
    near, _ = pair
    came: list[object] = []
    taking = asyncio.create_task(near.deliver(came.append, lambda: 10.0))
    await asyncio.sleep(0)
    near.data_received(framed([Heartbeat(steps=n) for n in range(5 * FAIR_SHARE)]))
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    count = len(came)
    near.data_received(framed([Heartbeat()]))
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(came) == count < 5 * FAIR_SHARE


async def test_silence_while_messages_are_delivered(pair: tuple[Channel, Channel]) -> None:
    """1 This loop stands still past the limit while the peer speaks: it is heard. 2 It is silent: given up."""
    near, far = pair
    came: list[object] = []
    taking = asyncio.create_task(near.deliver(came.append, lambda: 0.2))
    await asyncio.sleep(0)
    far.send(Heartbeat(steps=7))
    time.sleep(0.8)  # noqa: ASYNC251  # the stall is the story
    with pytest.raises(TimeoutError):
        await taking
    assert came == [Heartbeat(steps=7)]


async def test_a_backlog_is_not_the_peers_silence(pair: tuple[Channel, Channel]) -> None:
    """1 More lies here than is read at once, so nothing more is read. 2 To hand it over takes longer than the peer may
    be silent. 3 All of it is handed over; then the peer is silent."""
    near, _ = pair
    came: list[object] = []

    def take_slowly(message: object) -> None:
        came.append(message)
        time.sleep(0.002)  # what it takes is the story: 0.6 s for all of them

    taking = asyncio.create_task(near.deliver(take_slowly, lambda: 0.1))
    await asyncio.sleep(0)
    near.data_received(framed([Heartbeat(steps=n, busy="x" * 1500) for n in range(300)]))
    with pytest.raises(TimeoutError):
        await taking
    assert len(came) == 300


@pytest.mark.parametrize("at", [0, 2 * FAIR_SHARE])
async def test_whoever_cannot_take_a_message_ends_the_connection(pair: tuple[Channel, Channel], at: int) -> None:
    """In the turn in which it came, and in a later one: a message that is lost without a word would be a hole."""
    near, _ = pair

    def take(message: object) -> None:
        if message == Heartbeat(steps=at):
            raise RuntimeError("no")

    taking = asyncio.create_task(near.deliver(take, lambda: 10.0))
    await asyncio.sleep(0)
    near.data_received(framed([Heartbeat(steps=n) for n in range(3 * FAIR_SHARE)]))
    with pytest.raises(ProtocolError, match="could not be handled"):
        await taking


async def test_frames_come_whole_however_they_are_cut(tmp_path: Path) -> None:
    """One byte a write, then many frames in one."""
    messages = [Heartbeat(steps=n, busy="x" * n) for n in (0, 300, 5)]
    frames = b""
    for message in messages:
        body = msgspec.msgpack.encode(message)
        frames += struct.pack(">I", len(body)) + body
    parts = [frames[at : at + 1] for at in range(len(frames))]
    channel = Channel()
    for part in (*parts, frames + frames[:7], frames[7:]):
        channel.data_received(part)
    assert [await channel.recv(1.0) for _ in range(9)] == messages * 3


async def test_what_nobody_takes_stays_with_the_peer(pair: tuple[Channel, Channel]) -> None:
    """1 a peer sends more than is kept unread, 2 most of it waits in its own buffer, 3 read, all of it comes."""
    near, far = pair
    sent = [Heartbeat(steps=n, busy="x" * 2**16) for n in range(64)]
    for message in sent:
        far.send(message)
    async with asyncio.timeout(10):
        while near.num_unread <= MAX_UNREAD:
            await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert near.num_unread < 2 * MAX_UNREAD
    assert [await near.recv(10.0) for _ in sent] == sent
