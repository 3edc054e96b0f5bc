"""Does `pdctl bench` measure what others do? One load against one server, by its driver, by a timing loop around the
openai package, and by llmeter, which wants a virtual environment of its own.

    python -m venv /tmp/llmeter      (what goes into it: docs/measuring.md)
    python bench/clients.py --steady 100,20 [--llmeter /tmp/llmeter/bin/python] [-c 1] [--words 300] [--output 32]
    pdctl up colocated --set colocated.workers=1 -d && python bench/clients.py [STACK]

1. Each client is a process that stays; a turn is a line to it with a load, and a line back with times. Turns are short
   and go round, so that what the machine does besides hits all alike.
2. In a turn every user sends one request that is dropped: it opens the connection, and is longer from user to user, so
   that they are not in step. Prompts are all of one length and no two the same: none finds the blocks of another.
3. The others work before their request has left and after its answer is here: httpx and pydantic, some ms in each. What
   passed on the wire between, httpx itself tells: from the last byte written to the head, which comes with a token.
4. After each turn the router is asked for what it recorded of just these requests. A client's TTFT on the wire and TPOT
   are taken as shares of that, and these shares compared: where the server was slower, its own record is so too.

`--steady` starts a server of known times (bench/steady.py) on the first core, and puts the clients on the last. Ends
with 1 where a client is further than `--bar` % from ours, or ours from the router's.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:  # llmeter's environment has nothing of ours
    from pdctl.client import Client

WORDS = ["river", "stone", "window", "morning", "letter", "garden", "winter", "silver", "market", "engine", "paper"]
HERE = Path(__file__).resolve()
SENT, HEAD = "http11.send_request_body.complete", "http11.receive_response_headers.complete"  # httpx's words
CLIENTS = ("pdctl bench", "openai", "llmeter")
Times = tuple[float, float, float]  # TTFT, TPOT, and of TTFT what passed on the wire [s]
Load = list[list[str]]  # a user's questions; the first is dropped
Ask = Callable[[dict[str, Any]], Awaitable[Times]]


def load_of(args: argparse.Namespace, seed: str) -> Load:
    random = Random(seed)
    return [[" ".join(random.choices(WORDS, k=args.words)) for _ in range(args.requests + 1)] for _ in range(args.c)]


def body(text: str, output: int) -> dict[str, Any]:
    """As the openai package takes it; so does llmeter, which hands it on."""
    more = {"ignore_eos": True, "min_tokens": output}
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": output, "temperature": 0, "extra_body": more}


# The clients: what each makes of one request.


def by_bench(args: argparse.Namespace) -> Ask:
    """Chat as the others send it, not the token ids of a bench: the router's reading of text is no client's matter."""
    from pdctl.bench.driver import Driver, Server

    driver = Driver(Server(args.url, args.key, args.model, timeout_s=120))

    async def ask(said: dict[str, Any]) -> Times:
        more = said.pop("extra_body") | {"model": args.model, "stream": True, "stream_options": {"include_usage": True}}
        sample = await driver.post("/v1/chat/completions", said | more)
        assert sample.is_good, sample.error
        return sample.ttft, sample.tpot or 0.0, sample.ttft

    return ask


traced: ContextVar[dict[str, float]] = ContextVar("traced")  # when httpx came how far with the request of this context


def by_openai(args: argparse.Namespace) -> Ask:
    """The plainest loop there is: a clock, and a for."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    async def note(name: str, _: Any) -> None:
        traced.get()[name] = time.perf_counter()

    async def trace(request: Any) -> None:
        request.extensions["trace"] = note

    http = DefaultAsyncHttpxClient(event_hooks={"request": [trace]})
    client = AsyncOpenAI(base_url=args.url, api_key=args.key, timeout=120, max_retries=0, http_client=http)

    async def ask(said: dict[str, Any]) -> Times:
        seen: dict[str, float] = {}
        traced.set(seen)
        marks, begun = [], time.perf_counter()
        async for event in await client.chat.completions.create(model=args.model, stream=True, **said):
            if event.choices and event.choices[0].delta.content:
                marks.append(time.perf_counter())  # noqa: PERF401  # it reads as a timing loop
        return marks[0] - begun, (marks[-1] - marks[0]) / max(1, args.output - 1), seen[HEAD] - seen[SENT]

    return ask


def by_llmeter(args: argparse.Namespace) -> Ask:
    """A thread a user, as its runner does it; but that gives every user the same prompts, which would be cache hits."""
    from llmeter.endpoints import OpenAICompletionStreamEndpoint
    from openai import DefaultHttpxClient

    def note(name: str, _: Any) -> None:
        traced.get()[name] = time.perf_counter()

    def trace(request: Any) -> None:
        request.extensions["trace"] = note

    http = DefaultHttpxClient(event_hooks={"request": [trace]})
    endpoint = OpenAICompletionStreamEndpoint(
        args.model, api_key=args.key, base_url=args.url, max_retries=0, http_client=http
    )
    threads = ThreadPoolExecutor(args.c)

    def invoke(said: dict[str, Any]) -> Times:
        at: dict[str, float] = {}
        traced.set(at)
        seen = endpoint.invoke(said)
        assert not seen.error, seen.error
        first, last = seen.time_to_first_token, seen.time_to_last_token
        return first, (last - first) / max(1, seen.num_tokens_output - 1), at[HEAD] - at[SENT]

    async def ask(said: dict[str, Any]) -> Times:
        return await asyncio.get_running_loop().run_in_executor(threads, invoke, said)

    return ask


async def inside(name: str) -> None:
    """A client's process: first come the arguments, then a load a line, and its times go out."""
    args = argparse.Namespace(**json.loads(sys.stdin.readline()))
    ask = dict(zip(CLIENTS, (by_bench, by_openai, by_llmeter), strict=True))[name](args)
    print("null", flush=True)

    async def user(number: int, texts: list[str]) -> list[Times]:
        await ask(body(texts[0], 1 + number * (args.output - 1) // args.c))
        return [await ask(body(text, args.output)) for text in texts[1:]]

    while line := await asyncio.to_thread(sys.stdin.readline):
        users = (user(number, texts) for number, texts in enumerate(json.loads(line)))
        print(json.dumps([times for mine in await asyncio.gather(*users) for times in mine]), flush=True)


# The comparison.


@dataclass
class Seen:
    """What one client made of its requests, and what the router recorded of them: TTFT, TPOT [s]."""

    own: list[Times] = field(default_factory=list)
    router: list[tuple[float, float]] = field(default_factory=list)

    def medians(self) -> tuple[float, ...]:
        """TTFT, TPOT, TTFT on the wire; the router's TTFT and TPOT."""
        columns = (*zip(*self.own, strict=True), *zip(*self.router, strict=True))
        return tuple(median(column) for column in columns)

    def beyond(self) -> tuple[float, float]:
        """TTFT on the wire and TPOT, as shares of the router's."""
        _, tpot, wire, its_ttft, its_tpot = self.medians()
        return wire / its_ttft, tpot / its_tpot


class Talk:
    """A process that is spoken to in lines."""

    def __init__(self, *words: str) -> None:
        told = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=told)
        self._words = words

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, value: Any) -> Any:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()
        return json.loads(self.hear())

    def hear(self) -> str:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{' '.join(self._words[:3])} ended early")
        return line.strip()

    def end(self) -> str:
        """What it says at its end."""
        try:
            return self._process.communicate(timeout=30)[0] if self._process.returncode is None else ""
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.communicate()[0]


def measure(args: argparse.Namespace, router: "Client", key: str) -> dict[str, Seen]:
    args.url, args.key, args.model = f"{router.url}/v1", key, router.get("/v1/models")["data"][0]["id"]
    names = [name for name in CLIENTS if name != "llmeter" or args.llmeter]
    seen = {name: Seen() for name in names}
    with ExitStack() as stack:
        pythons = {"llmeter": args.llmeter}
        talks = {
            name: stack.enter_context(Talk(pythons.get(name, sys.executable), str(HERE), "--inside", name))
            for name in names
        }
        for talk in talks.values():
            talk.ask(vars(args))
        for number in range(args.rounds):
            for name in names[:: -1 if number % 2 else 1]:
                times = talks[name].ask(load_of(args, f"{args.seed} {number} {name}"))
                rows = router.get(f"/admin/requests?limit={args.c * (args.requests + 1)}")["requests"]
                rows = [row for row in rows if row["output_tokens"] == args.output]
                assert len(rows) == len(times), "somebody else asks this server"
                seen[name].own += times
                seen[name].router += [(row["ttft_ms"] / 1e3, row["tpot_ms"] / 1e3) for row in rows]
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    return seen


def show(seen: dict[str, Seen], bar: float) -> int:
    """A line a client: its medians, those of the router's record of the same requests, and the differences to ours."""
    ours, *others = (each.beyond() for each in seen.values())
    print(f"{'':<12}    TTFT  on the wire  router    to ours       TPOT  router    to ours   [ms]")
    for name, each in seen.items():
        ttft, tpot, wire, its_ttft, its_tpot = (1e3 * value for value in each.medians())
        off = [_percent(value / mine) for value, mine in zip(each.beyond(), ours, strict=True)]
        print(f"{name:<12}{ttft:8.2f}{wire:13.2f}{its_ttft:8.2f} {off[0]}   {tpot:8.2f}{its_tpot:8.2f} {off[1]}")
    ratios = [*ours, *(value / mine for each in others for value, mine in zip(each, ours, strict=True))]
    worst = max(abs(ratio - 1) for ratio in ratios)
    print(f"{len(next(iter(seen.values())).own)} requests each; ours to the router's:", *map(_percent, ours))
    print(f"largest difference {100 * worst:.2f} %, the bar is {bar:g} %")
    return int(100 * worst > bar)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+8.2f} %"


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        asyncio.run(inside(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stack", nargs="?", help="that runs; the one there is, unless named")
    parser.add_argument("--steady", metavar="TTFT,TPOT", default="", help="ms; start a server of these times")
    parser.add_argument("--llmeter", default="", help="python of the environment that has it; else it is left out")
    parser.add_argument("--words", type=int, default=300, help="of a prompt; about as many tokens")
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("-c", type=int, default=1, help="users at once")
    parser.add_argument("--requests", type=int, default=2, help="a user and turn")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", default=str(time.time_ns()), help="of prompts; those of an earlier run are cached")
    parser.add_argument("--bar", type=float, default=3.0)
    args = parser.parse_args()
    if args.output < 2:
        parser.error("--output: a TPOT needs two tokens")
    if args.c * (args.requests + 1) > 1000:
        parser.error("-c times --requests: the router keeps the records of 1000 requests")
    if not args.steady:
        return show(measure(args, *of_stack(args.stack)), args.bar)
    from pdctl.client import Client

    ttft, tpot = args.steady.split(",")
    words = (sys.executable, "-m", "bench.steady", "--ttft", ttft, "--tpot", tpot, "--streams", str(args.c))
    note = ""
    try:  # niceness counts within a session only: others that work here would be in the figures
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        note = ", no real-time priority"
    with Talk(*words) as server:
        router = Client(*server.hear().split())
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the clients', which inherit it
        seen = measure(args, router, "none")
        p50, p99 = server.end().split()
    print(f"steady at {ttft} and {tpot} ms, -c {args.c}: its tokens left {p50} ms late at p50, {p99} at p99{note}")
    return show(seen, args.bar)


def of_stack(name: str | None) -> "tuple[Client, str]":
    """Its admin, and the key for everybody else."""
    from pdctl.client import admin, api_key
    from pdctl.rundir import find, state_root
    from pdctl.status import running

    stack = running(there := find(state_root(), name))
    return admin(there, stack), api_key(stack)


if __name__ == "__main__":
    sys.exit(main())
