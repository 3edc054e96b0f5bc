"""Does `pdctl bench` measure what others do? One load against one running stack, by its driver, by a timing loop around
the openai package, and by llmeter, which wants a virtual environment of its own.

    python -m venv /tmp/llmeter      (what goes into it: docs/measuring.md)
    pdctl up colocated --set colocated.workers=1 -d && eval "$(pdctl env)"
    python bench/clients.py [--llmeter /tmp/llmeter/bin/python] [--words 300] [--output 32] [-c 1] [--requests 8]

Every client asks for answers to prompts of its own, of the same length, so that none finds the blocks of another.
Rounds alternate. The first request of each user opens its connection and is dropped. Ends with 1 above `--bar` %.
httpx, which the other two are built on, takes 2 ms of a core for each request; under short prompts that is what shows.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

WORDS = ["river", "stone", "window", "morning", "letter", "garden", "winter", "silver", "market", "engine", "paper"]
HERE = Path(__file__).resolve()
CLIENTS = ("pdctl bench", "openai", "llmeter")
Times = tuple[float, float]  # TTFT, TPOT [s]
Load = list[list[str]]  # a user's questions


def load_of(args: argparse.Namespace, seed: str) -> Load:
    random = Random(seed)
    return [[" ".join(random.choices(WORDS, k=args.words)) for _ in range(args.requests + 1)] for _ in range(args.c)]


def body(args: argparse.Namespace, text: str) -> dict[str, Any]:
    """As the openai package takes it; so does llmeter, which hands it on."""
    more = {"ignore_eos": True, "min_tokens": args.output}
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": args.output, "temperature": 0, "extra_body": more}


async def by_bench(args: argparse.Namespace, load: Load) -> list[Times]:
    """Chat as the others send it, not the token ids of a bench: the router's reading of text is no client's matter."""
    from pdctl.bench.driver import Driver, Server
    from pdctl.bench.sample import Sample

    async def ask(driver: Driver, text: str) -> Sample:
        said = body(args, text)
        more = said.pop("extra_body") | {"model": args.model, "stream": True, "stream_options": {"include_usage": True}}
        return await driver.post("/v1/chat/completions", said | more)

    async def user(driver: Driver, mine: list[str]) -> list[Times]:
        samples = [await ask(driver, text) for text in mine]
        assert all(sample.is_good for sample in samples), [sample.error for sample in samples]
        return [(sample.ttft, sample.tpot or 0.0) for sample in samples[1:]]

    async with Driver(Server(args.url, args.key, args.model)) as driver:
        return [t for times in await asyncio.gather(*(user(driver, mine) for mine in load)) for t in times]


async def by_openai(args: argparse.Namespace, load: Load) -> list[Times]:
    """The plainest loop there is: a clock, and a for."""
    from openai import AsyncOpenAI

    async def ask(client: AsyncOpenAI, text: str) -> Times:
        marks, begun = [], time.perf_counter()
        async for event in await client.chat.completions.create(model=args.model, stream=True, **body(args, text)):
            if event.choices and event.choices[0].delta.content:
                marks.append(time.perf_counter())  # noqa: PERF401  # it reads as a timing loop
        return marks[0] - begun, (marks[-1] - marks[0]) / max(1, args.output - 1)

    async def user(client: AsyncOpenAI, texts: list[str]) -> list[Times]:
        return [await ask(client, text) for text in texts][1:]

    async with AsyncOpenAI(base_url=args.url, api_key=args.key, timeout=120, max_retries=0) as client:
        return [t for times in await asyncio.gather(*(user(client, texts) for texts in load)) for t in times]


async def by_llmeter(args: argparse.Namespace, load: Load) -> list[Times]:
    """In the other environment: this file again, which there imports nothing of ours."""
    words, told = [args.llmeter, str(HERE), "--inside"], json.dumps(vars(args) | {"load": load})
    done = await asyncio.to_thread(
        subprocess.run, words, input=told, capture_output=True, text=True, timeout=1200, check=False
    )
    if done.returncode:
        raise SystemExit(f"llmeter failed: {done.stderr[-2000:]}")
    return [(ttft, tpot) for ttft, tpot in json.loads(done.stdout.splitlines()[-1])]


async def inside(args: argparse.Namespace, load: Load) -> list[Times]:
    """A runner a user: runners of several clients send the same prompts, which would be cache hits."""
    from llmeter.endpoints import OpenAICompletionStreamEndpoint
    from llmeter.runner import Runner

    async def user(texts: list[str]) -> list[Times]:
        endpoint = OpenAICompletionStreamEndpoint(args.model, api_key=args.key, base_url=args.url, max_retries=0)
        runner = Runner(endpoint, disable_per_client_progress_bar=True, disable_clients_progress_bar=True)
        result = await runner.run(payload=[body(args, text) for text in texts], n_requests=len(texts), clients=1)
        assert not any(r.error for r in result.responses), [r.error for r in result.responses]
        times = [(r.time_to_first_token, r.time_to_last_token) for r in result.responses[1:]]
        return [(first, (last - first) / max(1, args.output - 1)) for first, last in times]

    return [t for times in await asyncio.gather(*map(user, load)) for t in times]


async def measure(args: argparse.Namespace) -> dict[str, list[Times]]:
    by = dict(zip(CLIENTS, (by_bench, by_openai, by_llmeter), strict=True))
    names = [name for name in CLIENTS if name != "llmeter" or args.llmeter]
    seen: dict[str, list[Times]] = {name: [] for name in names}
    for number in range(args.rounds):
        for name in names[:: -1 if number % 2 else 1]:
            seen[name] += await by[name](args, load_of(args, f"{args.seed} {number} {name}"))
            print(f"round {number + 1} of {args.rounds}: {name}", file=sys.stderr)
    return seen


def show(seen: dict[str, list[Times]], bar: float) -> int:
    """The medians, and by how much the others differ from ours."""
    mine, *_ = figures = [[median(t[i] for t in times) for i in (0, 1)] for times in seen.values()]
    worst = 0.0
    for name, own in zip(seen, figures, strict=True):
        off = [100 * (value / base - 1) for value, base in zip(own, mine, strict=True)]
        worst = max([worst, *map(abs, off)])
        ttft, tpot = (f"{1e3 * value:8.2f} ms {change:+6.2f} %" for value, change in zip(own, off, strict=True))
        print(f"{name:<12} TTFT {ttft}   TPOT {tpot}   {len(seen[name])} requests")
    print(f"largest difference {worst:.2f} %, the bar is {bar:g} %")
    return int(worst > bar)


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        told = json.load(sys.stdin)
        print(json.dumps(asyncio.run(inside(argparse.Namespace(**told), told["load"]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"))
    parser.add_argument("--model", default="", help="the first that the server names unless given")
    parser.add_argument(
        "--llmeter", default="", help="python of the environment that has it; without one it is left out"
    )
    parser.add_argument("--words", type=int, default=300, help="of a prompt; about as many tokens")
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("-c", type=int, default=1, help="users at once")
    parser.add_argument("--requests", type=int, default=8, help="a user and round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--seed", default=str(time.time_ns()), help="of the prompts; those of an earlier run are cached"
    )
    parser.add_argument("--bar", type=float, default=3.0)
    args = parser.parse_args()
    return show(asyncio.run(measure(named(args))), args.bar)


def named(args: argparse.Namespace) -> argparse.Namespace:
    from pdctl.client import Client

    args.url, args.key = args.url.rstrip("/"), os.environ.get("OPENAI_API_KEY", "none")
    args.model = args.model or Client(args.url.removesuffix("/v1"), args.key).get("/v1/models")["data"][0]["id"]
    return args


if __name__ == "__main__":
    sys.exit(main())
