"""How much a long prompt disturbs a running stream: `demo` beside `colocated`, in one run.

While one client reads a stream, another sends a 3000-token prompt. Shown: the stream's median gap between tokens, its
largest gap while the prompt was read, and their ratio; median of the rounds. `--max-ratio` makes it a check.

    python bench/stalls.py [--rounds 5] [--max-ratio 2]
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
VOCAB = 49152


def tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(100, VOCAB) for _ in range(n)]


def stream_times(url: str, prompt: list[int], num_tokens: int, started: threading.Event, out: list[float]) -> None:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                out.append(time.monotonic())
                if len(out) == 8:
                    started.set()


def one_round(url: str, rng: random.Random, long_prompt: int) -> tuple[float, float, float]:
    """(median gap in the undisturbed part, largest gap while the prompt was read, seconds of reading)."""
    times: list[float] = []
    started = threading.Event()
    reader = threading.Thread(target=stream_times, args=(url, tokens(rng, 64), 160, started, times), daemon=True)
    reader.start()
    if not started.wait(120):
        raise SystemExit("the stream does not start")
    begin = time.monotonic()
    body = {"model": MODEL, "prompt": tokens(rng, long_prompt), "max_tokens": 1, "temperature": 0}
    httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status()
    end = time.monotonic()
    reader.join(300)
    gaps = [(b, b - a) for a, b in itertools.pairwise(times)]
    during = [gap for at, gap in gaps if begin <= at and at - gap <= end]
    return statistics.median(gap for _, gap in gaps), max(during), end - begin


MODEL = "smollm2-135m"


def measure(profile: str, rounds: int, long_prompt: int, seed: int) -> tuple[float, float, float]:
    """Medians over `rounds` of (median gap, largest gap, reading time), against a stack of its own."""
    with tempfile.TemporaryDirectory() as state:
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "PDCTL_STATE_DIR": state}
        pdctl = [sys.executable, "-P", "-m", "pdctl"]
        subprocess.run(
            [*pdctl, "up", profile, "-d", "--set", "router.port=0", "--progress", "quiet"], env=env, check=True
        )
        try:
            out = subprocess.run([*pdctl, "env"], env=env, check=True, capture_output=True, text=True).stdout
            url = next(x.split("=", 1)[1].strip("'\"") for x in out.splitlines() if "OPENAI_BASE_URL=" in x)
            url = url.removesuffix("/v1")
            rng = random.Random(seed)
            one_round(url, rng, long_prompt)  # warm
            results = [one_round(url, rng, long_prompt) for _ in range(rounds)]
        finally:
            subprocess.run([*pdctl, "down", "--force"], env=env, check=False)
    median, largest, reading = (statistics.median(column) for column in zip(*results, strict=True))
    return median, largest, reading


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=3000)
    parser.add_argument("--max-ratio", type=float, default=0.0, help="exit 1 when demo's ratio is above")
    args = parser.parse_args()
    ratios = {}
    print("profile      median gap ms   largest gap ms   ratio   3000-token TTFT s")
    for profile in ("demo", "colocated"):
        median, largest, reading = measure(profile, args.rounds, args.prompt, seed=1)
        ratios[profile] = largest / median
        print(f"{profile:<12} {median * 1e3:13.0f} {largest * 1e3:16.0f} {largest / median:7.1f} {reading:19.1f}")
    return int(bool(args.max_ratio) and ratios["demo"] > args.max_ratio)


if __name__ == "__main__":
    sys.exit(main())
