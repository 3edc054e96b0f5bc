"""Does `pdctl bench` measure what others do? One load against one server, by its driver, by a timing loop around the
openai package, and by llmeter, which wants a virtual environment of its own.

    python -m venv /tmp/llmeter      (what goes into it: docs/measuring.md)
    python bench/clients.py --steady 100,20 [--llmeter /tmp/llmeter/bin/python] [-c 1] [--words 300] [--output 32]
    pdctl up colocated --set colocated.workers=1 -d && python bench/clients.py [STACK]

1. Each client is a process that stays; a turn is a line to it with a load, and a line back with times. Turns are short
   and go round, so that what the machine does besides hits all alike.
2. In a turn every user sends one request that is dropped: it opens the connection, and is longer from user to user, so
   that they are not in step. Prompts are all of one length and no two the same: none finds the blocks of another.
3. After each turn the router is asked for what it recorded of just these requests. A client's figure is compared to
   that, and these differences to ours: a server that was slower in one client's turns is so in its own record too.

`--steady` starts such a server (bench/steady.py) on the first core, and the clients go to the last. Ends with 1 where
a client is further than `--bar` % from ours, or ours from the router's.
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
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:  # llmeter's environment has nothing of ours
    from pdctl.client import Client

WORDS = ["river", "stone", "window", "morning", "letter", "garden", "winter", "silver", "market", "engine", "paper"]
HERE = Path(__file__).resolve()
CLIENTS = ("pdctl bench", "openai", "llmeter")
Times = tuple[float, float]  # TTFT, TPOT [s]
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
        return sample.ttft, sample.tpot or 0.0

    return ask


def by_openai(args: argparse.Namespace) -> Ask:
    """The plainest loop there is: a clock, and a for."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=args.url, api_key=args.key, timeout=120, max_retries=0)

    async def ask(said: dict[str, Any]) -> Times:
        marks, begun = [], time.perf_counter()
        async for event in await client.chat.completions.create(model=args.model, stream=True, **said):
            if event.choices and event.choices[0].delta.content:
                marks.append(time.perf_counter())  # noqa: PERF401  # it reads as a timing loop
        return marks[0] - begun, (marks[-1] - marks[0]) / max(1, len(marks) - 1)

    return ask


def by_llmeter(args: argparse.Namespace) -> Ask:
    """A thread a user, as its runner does it; but that gives every user the same prompts, which would be cache hits."""
    from llmeter.endpoints import OpenAICompletionStreamEndpoint

    endpoint = OpenAICompletionStreamEndpoint(args.model, api_key=args.key, base_url=args.url, max_retries=0)
    threads = ThreadPoolExecutor(args.c)

    async def ask(said: dict[str, Any]) -> Times:
        seen = await asyncio.get_running_loop().run_in_executor(threads, endpoint.invoke, said)
        assert not seen.error, seen.error
        first, last = seen.time_to_first_token, seen.time_to_last_token
        return first, (last - first) / max(1, seen.num_tokens_output - 1)

    return ask


async def inside(name: str, args: argparse.Namespace) -> None:
    """A client's process: a load a line comes in, the times of it go out."""
    ask = dict(zip(CLIENTS, (by_bench, by_openai, by_llmeter), strict=True))[name](args)

    async def user(number: int, texts: list[str]) -> list[Times]:
        await ask(body(texts[0], 1 + number * args.output // args.c))
        return [await ask(body(text, args.output)) for text in texts[1:]]

    while line := await asyncio.to_thread(sys.stdin.readline):
        users = (user(number, texts) for number, texts in enumerate(json.loads(line)))
        print(json.dumps([times for mine in await asyncio.gather(*users) for times in mine]), flush=True)


# The comparison.


@dataclass
class Seen:
    """What one client made of its requests, and what the router did."""

    own: list[Times] = field(default_factory=list)
    router: list[Times] = field(default_factory=list)

    def medians(self) -> list[tuple[float, float]]:
        """Of TTFT and of TPOT: the client's, the router's [s]."""
        return [(median(t[i] for t in self.own), median(t[i] for t in self.router)) for i in (0, 1)]

    @property
    def beyond(self) -> list[float]:
        """The client's figures by the router's."""
        return [own / base for own, base in self.medians()]


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

    def say(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

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
        told = json.dumps(vars(args))
        pythons = {"llmeter": args.llmeter}
        talks = {
            name: stack.enter_context(Talk(pythons.get(name, sys.executable), str(HERE), "--inside", name, told))
            for name in names
        }
        for number in range(args.rounds):
            for name in names[:: -1 if number % 2 else 1]:
                talks[name].say(json.dumps(load_of(args, f"{args.seed} {number} {name}")))
                own = json.loads(talks[name].hear())
                rows = router.get(f"/admin/requests?limit={args.c * (args.requests + 1)}")["requests"]
                rows = [row for row in rows if row["output_tokens"] == args.output]
                assert len(rows) == len(own), "somebody else asks this server"
                seen[name].own += own
                seen[name].router += [(row["ttft_ms"] / 1e3, row["tpot_ms"] / 1e3) for row in rows]
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    return seen


def show(seen: dict[str, Seen], bar: float) -> int:
    """The medians, by how much each client is beyond the router's record of its requests, and that beside ours."""
    ours, *others = (each.beyond for each in seen.values())
    for name, each in seen.items():
        columns = []
        for title, (own, base), mine in zip(("TTFT", "TPOT"), each.medians(), ours, strict=True):
            beside = _percent(own / base / mine)
            columns.append(f"{title} {1e3 * own:7.2f} ms ({_percent(own / base)} to the router's) {beside}")
        print(f"{name:<12}{'   '.join(columns)}   {len(each.own)} requests")
    gaps = [1 - value for value in ours] + [1 - value / mine for each in others for value, mine in zip(each, ours, strict=True)]
    worst = 100 * max(map(abs, gaps))
    print(f"largest difference {worst:.2f} %, the bar is {bar:g} %")
    return int(worst > bar)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+5.2f} %"


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        asyncio.run(inside(sys.argv[2], argparse.Namespace(**json.loads(sys.argv[3]))))
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
    if not args.steady:
        return show(measure(args, *of_stack(args.stack)), args.bar)
    from bench.router import SECRET
    from pdctl.client import Client

    ttft, tpot = args.steady.split(",")
    words = (sys.executable, "-m", "bench.steady", "--ttft", ttft, "--tpot", tpot, "--streams", str(args.c))
    with Talk(*words) as server:
        router = Client(server.hear(), SECRET.decode())
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        seen = measure(args, router, "none")
        p50, p99 = server.end().split()
    print(f"steady at {ttft} and {tpot} ms, -c {args.c}: its tokens left {p50} ms late at p50, {p99} at p99")
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
