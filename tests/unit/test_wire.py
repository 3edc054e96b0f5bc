"""Connections: who is given up, and who only looks silent."""

import asyncio
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from server.messages import Heartbeat
from server.wire import MAX_UNREAD, Channel, connect, serve


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
