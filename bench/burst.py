"""A burst against a small decode pool, and a plot of the blocks in use on both sides beside the marks.

`--requests` prompts of `--prompt` tokens within a second on one prefill and one decode worker, whose pool has `--slots`
token slots. One JSON line: how many were answered, how many got 429 and what Retry-After said, peaks, preemptions.

    python bench/burst.py [--requests 200] [--prompt 1024] [--output 32] [--slots 8192] [--svg docs/burst.svg]
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from pdctl.bench.svg import Series, axis, lines

ROOT = Path(__file__).parents[1]
SLOT_BYTES = 23_040  # of smollm2-135m: 30 layers, 3 KV heads of 64, K and V in two bytes
LOW, HIGH = 0.80, 0.92
STYLE = (
    "text{font:11px sans-serif;fill:#333}.title{font-weight:bold}.mid{text-anchor:middle}.end{text-anchor:end}"
    ".grid{stroke:#ddd}svg{background:#fff}"
)


async def watch(client: httpx.AsyncClient, key: str, began: float, rows: list[dict[str, Any]]) -> None:
    """Worker loads five times a second, for as long as it is not cancelled."""
    while True:
        state = (await client.get("/admin/state", headers={"Authorization": f"Bearer {key}"})).json()
        loads = {worker["name"]: worker["load"] for worker in state["workers"]}
        rows.append({"at": time.monotonic() - began, "waiting": state["router"]["waiting"], **loads})
        await asyncio.sleep(0.2)


async def burst(url: str, key: str, args: argparse.Namespace) -> tuple[list[httpx.Response], list[dict[str, Any]]]:
    rng = random.Random(21)
    prompts = [[rng.randrange(100, 49_000) for _ in range(args.prompt)] for _ in range(args.requests)]
    rows: list[dict[str, Any]] = []
    limits = httpx.Limits(max_connections=args.requests + 1)
    async with httpx.AsyncClient(base_url=url, timeout=3600, limits=limits) as client:
        began = time.monotonic()
        watching = asyncio.create_task(watch(client, key, began, rows))

        async def ask(number: int) -> httpx.Response:
            await asyncio.sleep(number / args.requests)
            body = {"prompt": prompts[number], "max_tokens": args.output, "temperature": 0, "ignore_eos": True}
            return await client.post("/v1/completions", json=body)

        answers = await asyncio.gather(*map(ask, range(args.requests)))
        await asyncio.sleep(1.0)  # the last blocks are given back
        watching.cancel()
    return answers, rows


def summary(answers: list[httpx.Response], rows: list[dict[str, Any]], output: int) -> dict[str, Any]:
    counts = Counter(answer.status_code for answer in answers)
    waits = [int(answer.headers["retry-after"]) for answer in answers if answer.status_code == 429]
    whole = sum(a.status_code == 200 and a.json()["usage"]["completion_tokens"] == output for a in answers)
    return {
        "answered": counts[200],
        "whole": whole,
        "refused_429": counts[429],
        "other": len(answers) - counts[200] - counts[429],
        "retry_after_s": [min(waits), max(waits)] if waits else None,
        "peak_prefill": round(max(share(row["prefill-0"], "blocks_used", "blocks_granted") for row in rows), 3),
        "peak_decode": round(max(share(row["decode-0"], "blocks_used", "blocks_granted") for row in rows), 3),
        "preemptions": rows[-1]["decode-0"]["preemptions"],
        "seconds": round(rows[-1]["at"], 1),
    }


def share(load: dict[str, Any], *names: str) -> float:
    return float(sum(load[name] for name in names)) / float(load["blocks_total"])


def plot(rows: list[dict[str, Any]]) -> str:
    """A whole SVG file."""
    span = (0.0, rows[-1]["at"])
    series = [
        Series(
            "decode: written or granted",
            [(r["at"], share(r["decode-0"], "blocks_used", "blocks_granted")) for r in rows],
        ),
        Series("decode: written", [(r["at"], share(r["decode-0"], "blocks_used")) for r in rows], 5),
        Series("prefill", [(r["at"], share(r["prefill-0"], "blocks_used")) for r in rows], 1),
        Series(f"kv_high {HIGH:g}, kv_low {LOW:g}", [(at, HIGH) for at in span], 3, 1),
        Series("", [(at, LOW) for at in span], 3, 2),
    ]
    figure = lines("Blocks in use", series, axis("seconds", span), axis("share of the pool", [], high=1.0))
    found = re.search(r"<svg (.*?)>(.*)</svg>", figure, re.DOTALL)
    assert found is not None
    keys = [
        f'<text x="{70 + 170 * (i % 2)}" y="{285 + 14 * (i // 2)}"><tspan fill="{colour}">━ </tspan>{s.label}</text>'
        for i, (s, colour) in enumerate(zip(series[:4], ("#0072B2", "#56B4E9", "#D55E00", "#CC79A7"), strict=True))
    ]
    attributes = found[1].replace("0 0 460 270", "0 0 460 310")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}><style>{STYLE}</style>{found[2]}{"".join(keys)}</svg>\n'
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--slots", type=int, default=8192, help="of the decode pool")
    parser.add_argument("--set", action="append", default=[], help="over the profile `demo`")
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    values = [
        "name=burst",
        "router.port=0",
        f"decode.kv_bytes={(args.slots + 16) * SLOT_BYTES}",
        "model.dtype=bfloat16",
    ]
    with tempfile.TemporaryDirectory() as state:
        env = os.environ | {"PDCTL_STATE_DIR": state, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        pdctl = [sys.executable, "-P", "-m", "pdctl"]
        more = [part for value in [*values, *args.set] for part in ("--set", value)]
        subprocess.run([*pdctl, "up", "demo", "-d", "--progress", "plain", *more], env=env, check=True)
        try:
            out = subprocess.run([*pdctl, "env"], env=env, check=True, capture_output=True, text=True).stdout
            url = next(x.split("=", 1)[1].strip("'\"") for x in out.splitlines() if "OPENAI_BASE_URL=" in x)
            key = (Path(state) / "burst" / "secret").read_text().strip()
            answers, rows = asyncio.run(burst(url.removesuffix("/v1"), key, args))
        finally:
            subprocess.run([*pdctl, "down", "--force"], env=env, check=False)
    print(json.dumps(summary(answers, rows, args.output)))
    if args.svg:
        args.svg.write_text(plot(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
