"""An OpenAI server that paces its tokens by the clock: what a client measures of it is known."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeServer:
    """`first_s` until the first token, then one each `gap_s`; one prompt after another when `is_serial`."""

    first_s: float = 0.05
    gap_s: float = 0.01
    is_serial: bool = False
    extra_prompt_tokens: int = 0
    fails_every: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_connections: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                length = next((int(x.split(":")[1]) for x in lines if x.lower().startswith("content-length")), 0)
                body = await reader.readexactly(length)
                if lines[0].startswith("GET /v1/models"):
                    _plain(writer, 200, {"data": [{"id": "fake"}]})
                elif lines[0].startswith("GET"):
                    _plain(writer, 404, {})
                else:
                    await self.answer(json.loads(body), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.requests.append(body)
        if self.fails_every and len(self.requests) % self.fails_every == 0:
            _plain(writer, 500, {"error": {"message": "no luck"}})
            return
        clock = asyncio.get_running_loop().time
        begun = clock()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(self.first_s)
        for n in range(body["max_tokens"]):
            await asyncio.sleep(max(0.0, begun + self.first_s + n * self.gap_s - clock()))
            delta = {"delta": {"content": "x"}} if "messages" in body else {"text": "x", "token_ids": [5]}
            _event(writer, {"choices": [{"index": 0, **delta}]})
        usage = {
            "prompt_tokens": len(body.get("prompt", "")) + self.extra_prompt_tokens,
            "completion_tokens": body["max_tokens"],
        }
        _event(writer, {"choices": [], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def _event(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    full = {"id": "1", "object": "x", "created": 0, "model": "fake", **value}
    _chunk(writer, b"data: " + json.dumps(full).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _plain(writer: asyncio.StreamWriter, status: int, value: dict[str, Any]) -> None:
    data = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


@contextmanager
def in_a_thread(**settings: Any) -> Iterator[FakeServer]:
    """For tests that run a command which has an event loop of its own."""
    loop, fake = asyncio.new_event_loop(), FakeServer(**settings)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    context = running_as(fake)
    asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(5)
    try:
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(_end(context), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


async def _end(context: AbstractAsyncContextManager[FakeServer]) -> None:
    await context.__aexit__(None, None, None)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[FakeServer]:
    async with running_as(FakeServer(**settings)) as fake:
        yield fake


@asynccontextmanager
async def running_as(fake: FakeServer) -> AsyncIterator[FakeServer]:
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    fake.url = f"http://{host}:{port}"
    try:
        yield fake
    finally:
        server.close()
