"""The closed loop of the tables in docs/benchmarks.md: random token-id prompts, 128 output tokens unless told.

Each of `concurrency` slots sends its next request when its last one ended; the first of each slot is dropped. A cell
`24xmix` draws four prompts of 128 tokens for each of 4096. One JSON line a cell as it goes, so that a cut run still
counts; what the workers counted meanwhile (KV bytes over each link, use of the GPUs) stands beside what the client saw.

    python bench/closed_loop.py PROFILE [--label NAME] [--cells 1x128,8x1024] [--per-slot 3] [--set k=v ...]
    python bench/closed_loop.py http://HOST:PORT,http://HOST:PORT ...     servers that run, in turn by slot
"""

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import os
import random
import shutil
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


@dataclass
class Sample:
    """One request: when it began, and when each of its tokens came."""

    began: float
    times: list[float] = field(default_factory=list)
    stages: dict[str, Any] = field(default_factory=dict)  # the server's stage record

    @property
    def ttft(self) -> float:
        return self.times[0] - self.began

    @property
    def tpot(self) -> float:
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)

    @property
    def second_token(self) -> float:
        return self.times[1] - self.times[0]

    @property
    def gaps(self) -> list[float]:
        """From the second token on."""
        return [b - a for a, b in itertools.pairwise(self.times[1:])]

    @property
    def late_share(self) -> float | None:
        """Of the time in prefill, what the KV took to be there after it; None where it did not move."""
        end, ready = self.stages.get("prefill_end_ms"), self.stages.get("kv_ready_ms")
        start = self.stages.get("prefill_start_ms")
        if end is None or ready is None or start is None or self.stages.get("path") != "pd":
            return None
        return max(0.0, float(ready - end)) / max(1e-3, float(end - start))


async def one(client: httpx.AsyncClient, model: str, prompt: list[int], tokens: int) -> Sample:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    sample = Sample(time.perf_counter())
    async with client.stream("POST", "/v1/completions", json=body, headers={"x-pdctl-timing": "1"}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                now, event = time.perf_counter(), json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(line)
                sample.times += [now] * sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
                sample.stages = event.get("pdctl") or sample.stages
    assert len(sample.times) == tokens, f"{len(sample.times)} tokens came"
    return sample


def lengths_of(kind: str, rng: random.Random, count: int) -> list[int]:
    if kind != "mix":
        return [int(kind)] * count
    return rng.choices((128, 4096), (4, 1), k=count)


async def cell(urls: list[str], model: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """`name`: concurrency, x, prompt length or "mix"."""
    concurrency, kind = int(name.split("x", 1)[0]), name.split("x", 1)[1]
    rng = random.Random(name)
    limits = httpx.Limits(max_connections=concurrency)
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=600, limits=limits)) for url in urls
        ]

        async def slot(client: httpx.AsyncClient) -> list[Sample]:
            prompts = [
                [rng.randrange(10, args.vocab) for _ in range(n)] for n in lengths_of(kind, rng, args.per_slot + 1)
            ]
            return [await one(client, model, prompt, args.tokens) for prompt in prompts]

        slots = await asyncio.gather(*(slot(clients[i % len(clients)]) for i in range(concurrency)))
    counted = summary([sample for slot in slots for sample in slot[1:]])
    return {"cell": name, **counted, "steady_requests_per_s": steady(slots, args.tokens)}


def steady(slots: list[list[Sample]], tokens: int) -> float | None:
    """Requests/s while all slots are busy with their second request or a later one, by the tokens that came meanwhile.

    `requests_per_s` is over the counted requests whole: from when the first slot began its second, and others had not
    ended their first, to the last slot's end, where it is alone. Who reads one prompt after the other pays for both."""
    begin, end = max(slot[0].times[-1] for slot in slots), min(slot[-1].times[-1] for slot in slots)
    count = sum(begin < at <= end for slot in slots for sample in slot for at in sample.times)
    return round(count / tokens / (end - begin), 3) if end > begin else None


def ms(seconds: float) -> float:
    return round(seconds * 1000, 2)


def at(share: float, values: list[float]) -> float:
    return sorted(values)[int(len(values) * share)]


def summary(samples: list[Sample]) -> dict[str, Any]:
    """Milliseconds; requests/s between the beginning of the first and the end of the last."""
    began = min(sample.began for sample in samples)
    ended = max(sample.times[-1] for sample in samples)
    gaps = [gap for sample in samples for gap in sample.gaps]
    seconds = [sample.second_token for sample in samples]
    late = [share for sample in samples if (share := sample.late_share) is not None]
    paths = [sample.stages.get("path", "?") for sample in samples]
    return {
        "requests": len(samples),
        "ttft_mean_ms": ms(statistics.fmean(s.ttft for s in samples)),
        "ttft_p99_ms": ms(at(0.99, [s.ttft for s in samples])),
        "tpot_mean_ms": ms(statistics.fmean(s.tpot for s in samples)),
        "second_token_mean_ms": ms(statistics.fmean(seconds)),
        "second_token_max_ms": ms(max(seconds)),
        "itl_p50_ms": ms(at(0.5, gaps)),
        "itl_p99_ms": ms(at(0.99, gaps)),
        "itl_max_ms": ms(max(gaps)),
        "requests_per_s": round(len(samples) / (ended - began), 3),
        "paths": {path: round(paths.count(path) / len(paths), 2) for path in sorted(set(paths))},
        "late_share": round(statistics.median(late), 4) if late else None,
    }


class Counters:
    """What the stack and the devices counted between two looks."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._links = self._read()
        self._gpus = subprocess.Popen(
            ["nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"],
            stdout=subprocess.PIPE, text=True,
        ) if shutil.which("nvidia-smi") else None  # fmt: skip

    def _read(self) -> tuple[float, float]:
        text = httpx.get(f"{self._url}/metrics").text  # another server's has none of these
        lines = [line for line in text.splitlines() if line.startswith("pdctl_kv_link_")]
        of = {name: sum(float(x.rsplit(" ", 1)[1]) for x in lines if name in x) for name in ("bytes", "seconds")}
        return of["bytes"], of["seconds"]

    def end(self) -> dict[str, Any]:
        time.sleep(0.5)  # workers report a few times a second
        then, now = self._links, self._read()
        moved, seconds = now[0] - then[0], now[1] - then[1]
        return {
            "kv_gb": round(moved / 1e9, 3),
            "kv_gb_per_s": round(moved / 1e9 / seconds, 1) if seconds > 0 else None,
            "gpu_use": self._gpu_use(),
        }

    def _gpu_use(self) -> dict[str, float] | None:
        if self._gpus is None:
            return None
        self._gpus.terminate()
        out = self._gpus.communicate(timeout=10)[0]
        use: dict[str, list[float]] = {}
        for index, value in (line.split(", ") for line in out.splitlines() if line.count(", ") == 1):
            use.setdefault(index, []).append(float(value))
        return {index: round(statistics.fmean(values), 1) for index, values in use.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("profile", help="or the addresses of servers, with commas between")
    parser.add_argument("--tokens", type=int, default=128, help="of output")
    parser.add_argument("--label", default="", help="stands in each line")
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--per-slot", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=128_000, help="prompts are drawn from token ids below it")
    parser.add_argument("--set", action="append", default=[], help="over the profile")
    parser.add_argument("--logs", help="a folder that the workers' logs are copied to")
    parser.add_argument("-o", "--output", help="a file for the JSON lines, beside stdout")
    args = parser.parse_args()
    gc.disable()  # a collection would show as a gap of 10 ms and more in every stream
    if args.profile.startswith("http"):
        measure(args.profile.split(","), args)
        return 0
    with tempfile.TemporaryDirectory() as state:
        env = os.environ | {"PDCTL_STATE_DIR": state, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        pdctl = [sys.executable, "-P", "-m", "pdctl"]
        more = [part for value in ["router.port=0", *args.set] for part in ("--set", value)]
        subprocess.run([*pdctl, "up", args.profile, "-d", "--progress", "plain", *more], env=env, check=True)
        try:
            out = subprocess.run([*pdctl, "env"], env=env, check=True, capture_output=True, text=True).stdout
            url = next(x.split("=", 1)[1].strip("'\"") for x in out.splitlines() if "OPENAI_BASE_URL=" in x)
            measure([url.removesuffix("/v1")], args)
        finally:
            if args.logs:
                shutil.copytree(next(Path(state).glob("*/logs")), args.logs, dirs_exist_ok=True)
            subprocess.run([*pdctl, "down", "--force"], env=env, check=False)
    return 0


def measure(urls: list[str], args: argparse.Namespace) -> None:
    model = httpx.get(f"{urls[0]}/v1/models").json()["data"][0]["id"]
    for name in args.cells.split(","):
        counters = Counters(urls[0])
        result = asyncio.run(cell(urls, model, name, args))
        line = json.dumps({"label": args.label, **result, **counters.end()})
        print(line, flush=True)
        if args.output:
            with Path(args.output).open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
