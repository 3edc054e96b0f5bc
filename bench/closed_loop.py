"""The closed loop of the table in docs/benchmarks.md against one stack: random token-id prompts, 128 output tokens.

Each of `concurrency` slots sends its next request when its last one ended; the first of each slot is dropped. One JSON
line a cell as it goes, so that a cut run still counts.

    python bench/closed_loop.py PROFILE [--cells 1x128,8x1024] [--per-slot 3] [--set k=v ...]
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
CELLS = "1x128,1x1024,1x4096,8x1024,8x4096,32x128,32x1024,32x4096"
OUTPUT = 128


@dataclass
class Sample:
    """One request: when it began, and when each of its tokens came."""

    began: float
    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.began

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.times)]


async def one(client: httpx.AsyncClient, model: str, prompt: list[int]) -> Sample:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": OUTPUT,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    sample = Sample(time.perf_counter())
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                if '"error"' in line:
                    raise RuntimeError(line)
                sample.times.append(time.perf_counter())
    assert len(sample.times) >= OUTPUT, f"{len(sample.times)} tokens came"
    del sample.times[OUTPUT:]  # a last chunk may carry the finish reason alone
    return sample


async def cell(url: str, model: str, vocab: int, concurrency: int, length: int, per_slot: int) -> dict[str, Any]:
    rng = random.Random(concurrency * 100_003 + length)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def slot() -> list[Sample]:
            prompts = [[rng.randrange(10, vocab) for _ in range(length)] for _ in range(per_slot + 1)]
            return [await one(client, model, prompt) for prompt in prompts]

        slots = await asyncio.gather(*(slot() for _ in range(concurrency)))
    return summary(slots, concurrency, length)


def summary(slots: list[list[Sample]], concurrency: int, length: int) -> dict[str, Any]:
    """Milliseconds, over all but the first request of each slot; requests/s between the first of those and the last."""
    samples = [sample for slot in slots for sample in slot[1:]]
    began = min(sample.began for sample in samples)
    ended = max(sample.times[-1] for sample in samples)
    gaps = sorted(gap for sample in samples for gap in sample.gaps)

    def ms(seconds: float) -> float:
        return round(seconds * 1000, 2)

    return {
        "concurrency": concurrency,
        "prompt": length,
        "requests": len(samples),
        "ttft_mean_ms": ms(statistics.fmean(s.ttft for s in samples)),
        "ttft_p99_ms": ms(sorted(s.ttft for s in samples)[int(len(samples) * 0.99)]),
        "tpot_mean_ms": ms(statistics.fmean(s.tpot for s in samples)),
        "itl_p50_ms": ms(gaps[len(gaps) // 2]),
        "itl_p99_ms": ms(gaps[int(len(gaps) * 0.99)]),
        "itl_max_ms": ms(gaps[-1]),
        "requests_per_s": round(len(samples) / (ended - began), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("profile")
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--per-slot", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=128_000, help="prompts are drawn from token ids below it")
    parser.add_argument("--set", action="append", default=[], help="over the profile")
    parser.add_argument("-o", "--output", help="a file for the JSON lines, beside stdout")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as state:
        env = os.environ | {"PDCTL_STATE_DIR": state, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        pdctl = [sys.executable, "-P", "-m", "pdctl"]
        more = [part for value in ["router.port=0", *args.set] for part in ("--set", value)]
        subprocess.run([*pdctl, "up", args.profile, "-d", "--progress", "plain", *more], env=env, check=True)
        try:
            out = subprocess.run([*pdctl, "env"], env=env, check=True, capture_output=True, text=True).stdout
            url = next(x.split("=", 1)[1].strip("'\"") for x in out.splitlines() if "OPENAI_BASE_URL=" in x)
            url = url.removesuffix("/v1")
            model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
            measure(url, model, args)
        finally:
            subprocess.run([*pdctl, "down", "--force"], env=env, check=False)
    return 0


def measure(url: str, model: str, args: argparse.Namespace) -> None:
    for name in args.cells.split(","):
        concurrency, length = map(int, name.split("x"))
        line = json.dumps(asyncio.run(cell(url, model, args.vocab, concurrency, length, args.per_slot)))
        print(line, flush=True)
        if args.output:
            with Path(args.output).open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
