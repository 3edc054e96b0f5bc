"""The process itself: `python -P -m server.router`, its status lines, signals, and what it does not load."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from server.boot import Boot, Status
from server.card import text_facts
from server.config import Config
from server.errors import StartError
from server.messages import Abort, Prefill
from server.router.__main__ import Shutdown, serve
from server.router.text import Text
from server.router.worker import SILENT_S
from tests.router.conftest import SECRET, Cluster, read_answer
from tests.router.fake_worker import FakeWorker

ROOT = Path(__file__).parents[2]


@dataclass
class Running:
    process: asyncio.subprocess.Process
    fake: FakeWorker
    port: int
    status: asyncio.StreamReader

    async def line(self) -> Any:
        async with asyncio.timeout(20):
            return json.loads(await self.status.readline())

    async def ready(self) -> Any:
        while "ready" not in (line := await self.line()):
            assert "error" not in line, line
        return line

    async def post(self, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        cluster = Cluster(None, {}, self.port, None)  # type: ignore[arg-type]
        return await cluster.send("POST", "/v1/completions", body)

    async def ended(self) -> int:
        async with asyncio.timeout(10):
            return await self.process.wait()


@pytest.fixture
async def running(smollm2_dir: Path, text: Text, tmp_path: Path) -> AsyncIterator[Running]:
    (tmp_path / "secret").write_bytes(SECRET)
    config = Config.model_validate({"colocated": {"workers": 1}, "supervise": {"stop_timeout": 10}})
    facts = text_facts(smollm2_dir, config.model.path)
    ids = [*text.tokenizer.encode("Hello there").ids, 2]
    fake = FakeWorker("colocated-0", "colocated", tmp_path, SECRET, facts, lambda prompt: ids)
    await fake.start()
    listener = socket.create_server(("127.0.0.1", 0))
    read_fd, write_fd = os.pipe()
    boot = Boot(
        "router",
        config,
        str(smollm2_dir),
        str(tmp_path),
        str(tmp_path / "secret"),
        {"colocated-0": fake.address},
        listen_fd=listener.fileno(),
        status_fd=write_fd,
    )
    boot.save(tmp_path / "boot.json")
    command = [sys.executable, "-P", "-m", "server.router", "--boot", str(tmp_path / "boot.json")]
    process = await asyncio.create_subprocess_exec(
        *command,
        pass_fds=(listener.fileno(), write_fd),
        env={**os.environ, "PYTHONPATH": str(ROOT), "PDCTL_LOG": "json"},
    )
    port = listener.getsockname()[1]
    listener.close()
    os.close(write_fd)
    status = asyncio.StreamReader()
    pipe = os.fdopen(read_fd)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(status), pipe
    )
    yield Running(process, fake, port, status)
    if process.returncode is None:
        process.kill()
        await process.wait()
    transport.close()
    await fake.stop()


async def test_ready_then_drain(running: Running) -> None:
    """1 ready, 2 a request in flight, 3 SIGTERM: new ones are refused, 4 it ends whole, 5 exit 0."""
    ready = await running.ready()
    assert ready["detail"]["routes"]["colocated-0"]["total_ms"] > 0
    running.fake.stepwise = True
    reader, writer = await running.post({"prompt": "Once", "stream": True})
    await running.fake.saw(Prefill)

    running.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(5):
        while True:
            other, other_writer = await running.post({"prompt": "Once", "max_tokens": 0, "echo": True})
            refused = await read_answer(other)
            other_writer.close()
            if refused.status == 503:
                break
    assert refused.json["error"]["code"] == "draining"
    assert "retry-after" in refused.headers

    running.fake.step(10)
    answer = await read_answer(reader)
    writer.close()
    assert "".join(chunk["choices"][0]["text"] for chunk in answer.events) == "Hello there"
    assert await running.ended() == 0


async def test_second_signal_forces(running: Running) -> None:
    await running.ready()
    running.fake.stepwise = True
    _, writer = await running.post({"prompt": "Once", "stream": True})
    await running.fake.saw(Prefill)
    running.process.send_signal(signal.SIGTERM)
    running.process.send_signal(signal.SIGINT)
    await running.fake.saw(Abort)
    assert await running.ended() == 0
    writer.close()


async def test_a_frozen_router_finds_its_workers_again(running: Running) -> None:
    """1 a stream, 2 the router stands still for longer than it lets a worker be silent, 3 the stream goes on."""
    await running.ready()
    running.fake.stepwise = True
    reader, writer = await running.post({"prompt": "Once", "stream": True})
    await running.fake.saw(Prefill)
    running.fake.step()
    await reader.readuntil(b"Hello")
    running.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(SILENT_S + 1)  # the time that nothing happens in
    running.process.send_signal(signal.SIGCONT)
    running.fake.step(10)
    async with asyncio.timeout(5):
        rest = await reader.readuntil(b"[DONE]")
    writer.close()
    assert b"there" in rest
    assert b"error" not in rest


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    config = Config.model_validate({"colocated": {"workers": 1}, "router": {"port": 0}})
    boot = Boot("router", config, str(tmp_path), str(tmp_path), str(tmp_path / "no"), {}, status_fd=write_fd)
    boot.save(tmp_path / "boot.json")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "server.router", "--boot", str(tmp_path / "boot.json")],
        pass_fds=(write_fd,),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=30,
        check=False,
    )
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        lines = [json.loads(line) for line in pipe]
    assert done.returncode == 1
    assert "no usable tokenizer" in lines[-1]["error"]
    assert b"Traceback" not in done.stderr


async def test_a_refused_handshake_ends_the_start(smollm2_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    config = Config.model_validate({"colocated": {"workers": 1}, "router": {"port": 0}})
    facts = {**text_facts(smollm2_dir, config.model.path), "tokenizer": "another"}
    fake = FakeWorker("colocated-0", "colocated", tmp_path, SECRET, facts, lambda prompt: [])
    await fake.start()
    boot = Boot(
        "router", config, str(smollm2_dir), str(tmp_path), str(tmp_path / "secret"), {"colocated-0": fake.address}
    )
    status = tmp_path.joinpath("status").open("w")
    with pytest.raises(StartError, match="colocated-0 refuses the router: .*tokenizer: "):
        await serve(boot, Status(status.fileno()), Shutdown())
    status.close()
    stages = [json.loads(line) for line in (tmp_path / "status").read_text().splitlines()]
    assert stages[0] == {"stage": "loading the tokenizer", "share": 0.0}
    await fake.stop()


def test_no_torch_in_the_router(smollm2_dir: Path) -> None:
    code = f"""
import sys, server.router.__main__
from server.router.text import Text
from server.router.worker import SILENT_S
text = Text({str(smollm2_dir)!r})
text._render([{{"role": "user", "content": "hi"}}], True, False, {{}})
heavy = {{"torch", "tensorflow", "jax", "pandas"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
