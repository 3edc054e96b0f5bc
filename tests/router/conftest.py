"""A whole router over fake workers, in the test's own loop, on a real socket."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from server.boot import Boot, Status
from server.card import text_facts
from server.config import Config
from server.router.__main__ import HttpServer
from server.router.stack import Stack
from server.router.text import Text
from tests.router.fake_worker import FakeWorker

SECRET = b"not much of a secret"
HELLO = "Hello, world! How are you?"


@pytest.fixture(scope="session")
def text(smollm2_dir: Path) -> Text:
    return Text(smollm2_dir)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The JSON of every event; asserts that the last one is [DONE], once."""
        lines = self.body.decode().split("\n\n")
        assert lines.pop() == ""
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]


@dataclass
class Cluster:
    """`fakes` by name; `say` sets what all of them answer."""

    stack: Stack
    fakes: dict[str, FakeWorker]
    port: int
    text: Text
    status: list[Any] = field(default_factory=list)

    def __getattr__(self, name: str) -> FakeWorker:
        """cluster.prefill, .decode, .colocated: the first of its role."""
        try:
            return self.fakes[f"{name}-0"]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def say(self, words: str, *, eos: bool = True) -> list[int]:
        ids = self.text.tokenizer.encode(words).ids + ([2] if eos else [])
        for fake in self.fakes.values():
            fake.reply = lambda prompt: ids
        return ids

    async def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        async with asyncio.timeout(20):
            reader, writer = await self.send(method, path, body, headers)
            try:
                return await read_answer(reader)
            finally:
                writer.close()

    async def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        payload = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(payload)}"]
        lines += [f"{key}: {value}" for key, value in (headers or {}).items()]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write("\r\n".join([*lines, "", ""]).encode() + payload)
        return reader, writer

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        return await self.request("POST", path, body, headers)

    async def chat(self, headers: dict[str, str] | None = None, **body: Any) -> Answer:
        return await self.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **body}, headers
        )

    async def complete(self, headers: dict[str, str] | None = None, **body: Any) -> Answer:
        return await self.post("/v1/completions", {"prompt": "Once", "max_tokens": 100, **body}, headers)


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in head[1:] if line)}
    raw = await reader.read()
    body = _dechunk(raw) if headers.get("transfer-encoding") == "chunked" else raw
    return Answer(int(head[0].split()[1]), headers, body)


def _dechunk(raw: bytes) -> bytes:
    out = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        out += raw[: int(size, 16)]
        raw = raw[int(size, 16) + 2 :]
    return out


async def until(condition: Callable[[], bool]) -> None:
    """For what announces itself to nobody but the prober: looks each time the loop has turned."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


Start = Callable[..., Awaitable[Cluster]]


class _Recorder(Status):
    def __init__(self) -> None:
        super().__init__(None)
        self.lines: list[Any] = []

    def _write(self, record: dict[str, Any]) -> None:
        self.lines.append(record)


@pytest.fixture
async def start(smollm2_dir: Path, text: Text, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Start]:
    """`await start(prefill=1, decode=1, **profile keys)`: a running router; ready unless told not to wait."""
    undo: list[Callable[[], Awaitable[None]]] = []

    async def run(
        prefill: int = 0,
        decode: int = 0,
        colocated: int = 0,
        *,
        wait: bool = True,
        fakes_up: bool = True,
        max_len: int = 0,
        send_buffer: int = 0,
        **sections: dict[str, Any],
    ) -> Cluster:
        folder = tmp_path_factory.mktemp("run")
        (folder / "secret").write_bytes(SECRET)
        pools = {"prefill": prefill, "decode": decode, "colocated": colocated}
        profile: dict[str, Any] = {"hybrid": {"threshold_tokens": 0}, **sections}
        profile |= {role: {"workers": count, **sections.get(role, {})} for role, count in pools.items()}
        config = Config.model_validate(profile)
        facts = text_facts(smollm2_dir, config.model.path)
        fakes = {
            spec.name: FakeWorker(spec.name, spec.role, folder, SECRET, facts, lambda prompt: [])
            for spec in config.workers
        }
        addresses = {name: fake.address for name, fake in fakes.items()}
        boot = Boot("router", config, str(smollm2_dir), str(folder), str(folder / "secret"), addresses)
        status = _Recorder()
        words = text
        if max_len:
            words = Text(smollm2_dir, max_len)
        stack = Stack.create(boot, status, words)
        for fake in fakes.values():
            if fakes_up:
                await fake.start()
        listener = socket.create_server(("127.0.0.1", 0))
        if send_buffer:  # what it accepts inherits it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        server = HttpServer.of(stack.app)
        http = asyncio.create_task(server.serve(sockets=[listener]))
        stack.start()
        cluster = Cluster(stack, fakes, listener.getsockname()[1], text, status.lines)
        cluster.say(HELLO)

        async def stop() -> None:
            server.should_exit = True
            await asyncio.gather(*(fake.stop() for fake in fakes.values()))
            await http
            await stack.stop()

        undo.append(stop)
        if wait:
            async with asyncio.timeout(10):
                await stack.prober.started.wait()
        return cluster

    yield run
    for each in undo:
        await each()
