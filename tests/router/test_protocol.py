"""Writes to a client: how many there are, and when."""

import asyncio
from typing import Any, cast

from server.router.protocol import HeadWithBody


class Played:
    """A transport that remembers."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.written.append(b"closed")


def a_transport() -> tuple[Any, Played]:
    played = Played()
    return HeadWithBody(cast("asyncio.Transport", played), asyncio.get_running_loop()), played


async def test_a_head_leaves_with_the_first_event() -> None:
    transport, played = a_transport()
    for data in (b"HTTP/1.1 200 OK\r\n\r\n", b"data: 1\n\n", b"data: 2\n\n"):
        transport.write(data)
    assert played.written == [b"HTTP/1.1 200 OK\r\n\r\ndata: 1\n\n", b"data: 2\n\n"]
    await asyncio.sleep(0)
    assert len(played.written) == 2


async def test_a_head_alone_leaves_in_the_same_turn() -> None:
    """Where the first event is late, and where there is none."""
    transport, played = a_transport()
    transport.write(b"HTTP/1.1 200 OK\r\n\r\n")
    await asyncio.sleep(0)
    assert played.written == [b"HTTP/1.1 200 OK\r\n\r\n"]
    transport.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    transport.close()
    await asyncio.sleep(0)
    assert played.written[1:] == [b"HTTP/1.1 204 No Content\r\n\r\n", b"closed"]
