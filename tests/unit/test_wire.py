"""Connections: who is given up, and who only looks silent."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from server.messages import Heartbeat
from server.wire import Channel, connect, serve


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
