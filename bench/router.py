"""What one router process costs: a whole one, on a core of its own, before a worker that answers at once.

1. One request at a time, from the request to its first event: through the router, and of a bare server in its place
   that answers alike without looking at the request. The router adds the difference: its own work, and the way
   to a worker and back. One request after the other, and again ("rested") with 4 ms of sleep before each.
2. `--streams` at once: streamed and detokenized tokens a second, one token an event, and the router's CPU time a token.
   The worker sends a step of all streams in one message, as a real one does, and is at most `--ahead` steps ahead of
   what the clients have read: the router is the limit, and nothing piles up in it. A stream that is behind gets several
   events in one write; with `--ahead 1` every event is a write.

Worker and clients share one loop on the other core: less Python there than in the router. One JSON line at the end.

    python bench/router.py [--seconds 60] [--streams 64] [--ahead 8] [--requests 500] [--profile] [--check]
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing as mp
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import uvloop

from server import model_store
from server.boot import Boot
from server.card import text_facts
from server.config import Config
from server.errors import PdctlError
from server.messages import Abort, AbortAck, Card, Done, Heartbeat, Load, Prefill, SeqToken, SetKnobs, Tokens
from server.router.text import Text
from server.sequence import SeqId, Token
from server.wire import Channel, Identity, serve, welcome

ROOT = Path(__file__).parents[1]
SECRET = b"bench"
OUTPUT = 1000  # tokens of a stream, then the client asks again
ROW = 20  # single requests in a row, then as many to the other server
REST_S = 0.004  # before each of those that find a router which has slept: its code is out of the core's caches
MAX_ADDED_MS, MIN_TOKENS_S = 0.5, 30_000
PROSE = "The sun went down behind the hills, and the small boats came home one after another with their lamps lit. "


class PlayedWorker:
    """A colocated worker without a model: token i of every output is word i of the same prose."""

    def __init__(self, facts: dict[str, str], words: list[Token]) -> None:
        self.tokens: dict[SeqId, int] = {}  # streams under way, tokens said
        self.limits: dict[SeqId, int] = {}
        self.last_sent = 0.0
        self.num_sent = 0
        self.progress = asyncio.Event()  # something to send, or something was read
        self._card = Card({**facts})
        self._words = words
        self._channel: Channel | None = None

    async def handle(self, channel: Channel) -> None:
        try:
            await welcome(channel, Identity.new("colocated-0", "colocated"), SECRET, self._card)
            self._channel = channel
            beat = asyncio.create_task(_beat(channel))
            try:
                while True:
                    self._take(channel, await channel.recv())
            finally:
                beat.cancel()
        except PdctlError:
            return

    def _take(self, channel: Channel, message: Any) -> None:
        match message:
            case SetKnobs():
                channel.send(Load(0, 0, 0, 0, 0, 1000, 0, 0, rev=message.rev))
            case Prefill():
                self.tokens[message.id], self.limits[message.id] = 0, message.params.max_tokens
                if message.params.max_tokens <= 2:  # one at a time, and the router's own probe: all at once
                    while message.id in self.tokens:
                        self.step([message.id])
                else:
                    self.begin(message.id)
            case Abort():
                self.tokens.pop(message.id, None)
                channel.send(AbortAck(message.id))

    def begin(self, id: SeqId) -> None:
        """Whoever steps has something to do."""
        self.progress.set()

    def step(self, ids: list[SeqId]) -> None:
        """One token of each."""
        assert self._channel is not None
        self.last_sent = time.perf_counter()
        words, tokens = self._words, self.tokens
        items = [SeqToken(id, tokens[id], words[tokens[id] % len(words)]) for id in ids]
        self._channel.send(Tokens(tuple(items)))
        self.num_sent += len(items)
        for id in ids:
            tokens[id] += 1
            if tokens[id] == self.limits[id]:
                del tokens[id]
                self._channel.send(Done(id, "length", stages={"start": 0.0, "end": 0.0}))


async def _beat(channel: Channel) -> None:
    while True:
        channel.send(Heartbeat(steps=1))
        await asyncio.sleep(0.5)


W = TypeVar("W", bound=PlayedWorker)


class Client(asyncio.Protocol):
    """One connection, one streamed request after another. `on_events(client, count, is_over)` for each read: an event
    is a token, but for the last one, which has the finish reason."""

    def __init__(self, on_events: "Callable[[Client, int, bool], None]") -> None:
        self.transport: asyncio.Transport
        self._on_events = on_events
        self._tail = b""  # where a read may have cut through an event

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's own, of no common base

    def data_received(self, data: bytes) -> None:
        whole, _, self._tail = (self._tail + data).rpartition(b"\n\n")
        is_over = whole.endswith(b"[DONE]")
        self._on_events(self, whole.count(b"data: {") - is_over, is_over)

    def ask(self, max_tokens: int) -> None:
        body = json.dumps(
            {"prompt": "Once upon a time", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)


EVENTS = [
    {
        "id": "cmpl-" + "0" * 24,
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "smollm2-135m",
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}],
    }
    for text, reason in ((" The", None), ("", "length"))
]


class Bare(asyncio.Protocol):
    """A server that knows its answer, a stream of one token."""

    ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(
        b"%x\r\n%b\r\n" % (len(part), part)
        for part in (*(b"data: %b\n\n" % json.dumps(event).encode() for event in EVENTS), b"data: [DONE]\n\n", b"")
    )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(self.ANSWER)


def serve_bare(core: int, port: Connection) -> None:
    """Of a process of its own, until it is ended."""

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Bare, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    os.sched_setaffinity(0, {core})
    uvloop.run(run())


class Asking:
    """One request at a time on one connection."""

    def __init__(self) -> None:
        self._over = asyncio.Event()
        self._seen: asyncio.Future[float]
        self.client: Client

    @classmethod
    async def connect(cls, port: int) -> "Asking":
        asking = cls()
        loop = asyncio.get_running_loop()
        _, asking.client = await loop.create_connection(lambda: Client(asking._on_events), "127.0.0.1", port)
        return asking

    def _on_events(self, _: Client, count: int, is_over: bool) -> None:
        if (count or is_over) and not self._seen.done():
            self._seen.set_result(time.perf_counter())
        if is_over:
            self._over.set()

    async def first_event(self) -> tuple[float, float]:
        """When it was asked for, and when it came."""
        self._seen, began = asyncio.get_running_loop().create_future(), time.perf_counter()
        self._over.clear()
        self.client.ask(1)
        at = await asyncio.wait_for(self._seen, 10)
        await asyncio.wait_for(self._over.wait(), 10)
        return began, at


async def in_a_row(asking: Asking, rest_s: float) -> list[tuple[float, float]]:
    """Of ROW requests, each after `rest_s`: when it was asked for, and when its first event came. Not of the first,
    which comes after the other server's."""
    rows = []
    for _ in range(ROW + 1):
        await asyncio.sleep(rest_s)
        rows.append(await asking.first_event())
    return rows[1:]


async def added_latency(port: int, bare_port: int, worker: PlayedWorker, count: int, rest_s: float) -> dict[str, float]:
    """Milliseconds, in turns of ROW requests through the router and as many to the bare server. Without a rest
    between them the router works on what is left of a request, its records, while it has the next one."""
    router, bare = await Asking.connect(port), await Asking.connect(bare_port)
    whole, direct, added = [], [], []
    for turn in range(1 + -(-count // ROW)):
        through = [(at - began) * 1000 for began, at in await in_a_row(router, rest_s)]
        alone = [(at - began) * 1000 for began, at in await in_a_row(bare, rest_s)]
        if turn:  # warm
            whole += through
            direct += alone
            added += [value - statistics.median(alone) for value in through]
    for asking in (router, bare):
        asking.client.transport.close()
    return {
        "first_event_p50_ms": round(statistics.median(whole), 3),
        "bare_p50_ms": round(statistics.median(direct), 3),
        "over_bare_p50_ms": round(statistics.median(added), 3),
        "over_bare_p99_ms": round(sorted(added)[int(len(added) * 0.99)], 3),
    }


async def throughput(
    port: int, worker: PlayedWorker, router: psutil.Process, streams: int, ahead: int, seconds: float
) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    received, has_ended = 0, False

    def on_events(client: Client, count: int, is_over: bool) -> None:
        nonlocal received
        received += count
        if is_over and not has_ended:
            client.ask(OUTPUT)
        worker.progress.set()

    clients = [(await loop.create_connection(lambda: Client(on_events), "127.0.0.1", port))[1] for _ in range(streams)]
    for client in clients:
        client.ask(OUTPUT)
    before = worker.num_sent
    warm_until = time.perf_counter() + min(2.0, seconds / 4)
    start, cpu_before, received_before = 0.0, 0.0, 0
    while True:
        now = time.perf_counter()
        if not start and now >= warm_until:
            start, cpu_before, received_before = now, _cpu(router), received
        if start and now >= start + seconds:
            break
        if worker.tokens and worker.num_sent - before - received < ahead * streams:
            worker.step(list(worker.tokens))
            await asyncio.sleep(0)
        else:
            worker.progress.clear()
            await asyncio.wait_for(worker.progress.wait(), 10)
    has_ended = True
    count, took, cpu = received - received_before, time.perf_counter() - start, _cpu(router) - cpu_before
    for client in clients:
        client.transport.abort()
    return {
        "tokens_s": round(count / took),
        "cpu_us_token": round(cpu / count * 1e6, 2),
        "cpu_share": round(cpu / took, 3),
        "tokens": count,
        "seconds": round(took, 1),
    }


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    router_core, own_core = (int(core) for core in args.cores.split(","))
    os.sched_setaffinity(0, {own_core})
    profiler = ["-m", "cProfile", "-s", "tottime", "-o", args.profile] if args.profile else []
    started = router_before(
        PlayedWorker, core=router_core, streams=args.streams, profiler=profiler, is_loud=args.verbose
    )
    async with started as (worker, process, port):
        with bare_server(router_core) as bare_port:
            busy, rested = [
                await added_latency(port, bare_port, worker, args.requests, rest_s) for rest_s in (0.0, REST_S)
            ]
        rates = await throughput(port, worker, psutil.Process(process), args.streams, args.ahead, args.seconds)
    return {"streams": args.streams, **busy, "rested": rested, **rates}


@contextlib.contextmanager
def bare_server(core: int) -> Iterator[int]:
    """Its port."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_bare, args=(core, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(60):
            raise TimeoutError("the bare server does not start")
        yield ours.recv()
    finally:
        process.terminate()
        process.join(10)


@contextlib.asynccontextmanager
async def router_before(
    played: Callable[[dict[str, str], list[Token]], W],
    *,
    core: int,
    streams: int,
    profiler: Sequence[str] = (),
    is_loud: bool = False,
) -> AsyncIterator[tuple[W, int, int]]:
    """A router process on `core` that is ready, before a worker played in this one: the worker, its pid, its port."""
    model_dir = model_store.resolve("smollm2-135m")
    config = Config.model_validate(
        {"colocated": {"workers": 1}, "router": {"queue_high": 4 * streams}, "supervise": {"stop_timeout": 5}}
    )
    words = [Token(i, -0.5) for i in Text(model_dir).tokenizer.encode(PROSE).ids]
    worker = played(text_facts(model_dir, config.model.path), words)
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as listener:
        folder = Path(name)
        (folder / "secret").write_bytes(SECRET)
        address = f"unix:{folder}/colocated-0.sock"
        server = await serve(address, worker.handle)
        boot = Boot(
            "router",
            config,
            str(model_dir),
            name,
            str(folder / "secret"),
            {"colocated-0": address},
            listen_fd=listener.fileno(),
        )
        boot.save(folder / "boot.json")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            *profiler,
            "-m",
            "server.router",
            "--boot",
            str(folder / "boot.json"),
            pass_fds=(listener.fileno(),),
            # As the supervisor has it.
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
                "TOKENIZERS_PARALLELISM": "false",
            },
            stderr=None if is_loud else subprocess.DEVNULL,
        )
        port = listener.getsockname()[1]
        listener.close()
        try:
            os.sched_setaffinity(process.pid, {core})
            await _ready(port)
            yield worker, process.pid, port
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), 20)
            server.close()


async def _ready(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            status = await reader.readline()
            writer.close()
            if b" 200 " in status:
                return
            await asyncio.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--ahead", type=int, default=8, metavar="STEPS")
    parser.add_argument("--requests", type=int, default=500, help="of the latency part")
    parser.add_argument("--cores", default="0,1", help="of the router, and of everything else")
    parser.add_argument("--profile", metavar="FILE", default="", help="the router under cProfile: shares, no rates")
    parser.add_argument("--verbose", action="store_true", help="the router's log, on stderr")
    parser.add_argument("--check", action="store_true", help="exit 1 below the goals")
    args = parser.parse_args()
    result = uvloop.run(measure(args))
    print(json.dumps(result))
    is_good = result["over_bare_p50_ms"] < MAX_ADDED_MS and result["tokens_s"] >= MIN_TOKENS_S
    return 0 if is_good or not args.check else 1


if __name__ == "__main__":
    sys.exit(main())
