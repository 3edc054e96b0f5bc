"""How far `pdctl plan` is off on two H200s: its simulator beside what bench/two_gpu.sh measured.

The stage model comes from steps measured apart from the load (bench/engine.py's table in docs/benchmarks.md) and from
the cells with one request at a time, which are marked as fitted. Goodput stands for all requests/s here: no objective
is so short that one misses it.

    python bench/grade_two_gpu.py RESULTS.jsonl GRADED.json && pdctl plan --check GRADED.json
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pdctl.bench.target import layout_of
from pdctl.profile import load

HERE = Path(__file__).parent
KV_TOKEN_BYTES = 131072
# Seconds of a step, engine alone, one H200, the device's own time: Python's is hidden since ADR 0014.
PREFILL = {128: 0.00615, 512: 0.0129, 1024: 0.0244, 2048: 0.0481, 4096: 0.0989}
DECODE = {(1, 1024): 0.00439, (22, 4160): 0.00785, (64, 144): 0.00522, (64, 1024): 0.00704, (64, 4096): 0.0133}
PAIR = ("colocated.workers=2", "colocated.gpus=[0,1]")
MODES: dict[str, tuple[str, tuple[str, ...]]] = {
    **{
        f"colocated-{n}": ("colocated", (*PAIR, f"colocated.token_budget={n}", f"colocated.chunk_tokens={n}"))
        for n in (8192, 512)
    },
    "1p1d": ("1p1d", ()),
    "hybrid": ("1p1d", ("hybrid.threshold_tokens=256", "hybrid.rest_s=1", "slo.tpot_p95=0.0135")),
}


def mode(name: str) -> dict[str, Any]:
    """As two_gpu.sh starts it."""
    profile, sets = MODES[name]
    layout, sizes = layout_of(load(str(HERE / f"h200-{profile}.toml"), sets=sets).config)
    return {"name": name, "layout": layout, "sizes": sizes}


def cell(line: dict[str, Any]) -> dict[str, Any]:
    concurrency, prompt = (int(part) for part in line["cell"].split("x"))
    return {
        "mode": line["label"], "prompt": prompt, "prompt_tokens": prompt, "output": 128, "output_tokens": 128,
        "concurrency": concurrency, "rounds": 1, "requests": line["requests"], "dropped": concurrency,
        "ttft_ms": {"mean": line["ttft_mean_ms"]}, "tpot_ms": {"mean": line["tpot_mean_ms"]},
        "goodput": line["steady_requests_per_s"], "fitted": concurrency == 1,
    }  # fmt: skip


def calibration(lines: list[dict[str, Any]]) -> dict[str, Any]:
    alone = {line["cell"]: line for line in lines if line["label"] == "1p1d" and line["cell"].startswith("1x")}
    late = [(int(name[2:]), line["late_share"] * line["ttft_mean_ms"] / 1e3) for name, line in alone.items()]
    roles = ("prefill", "decode", "colocated")
    return {
        "chunk_tokens": 1024,
        "prefill": [[role, n, seconds, 0] for role in roles for n, seconds in PREFILL.items()],
        "decode": [[role, b, c, seconds, 0] for role in roles[1:] for (b, c), seconds in DECODE.items()],
        "transfer": [[n, n * KV_TOKEN_BYTES, seconds] for n, seconds in late],
        "router_s": max(0.0, alone["1x128"]["ttft_mean_ms"] / 1e3 - PREFILL[128]),
    }


def main() -> int:
    lines = [json.loads(text) for text in Path(sys.argv[1]).read_text().splitlines()]
    result = {
        "version": 1,
        "kind": "bench",
        "slo": {"ttft_ms": 1e6, "tpot_ms": 1e6},
        "modes": [mode(name) for name in MODES],
        "cells": [cell(line) for line in lines if not line["cell"].endswith("mix")],
        "calibration": calibration(lines),
    }
    Path(sys.argv[2]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
