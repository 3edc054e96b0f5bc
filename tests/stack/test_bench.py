"""`pdctl bench` brings real stacks up and down; what it measures is what another client measures."""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import psutil
import pytest
from openai import AsyncOpenAI

from pdctl.bench.driver import Driver, Server
from pdctl.bench.loads import ids
from tests.stack.harness import COLOCATED, PD, ROOT, running

ROUNDS = 20

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def bench(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pdctl", "bench", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)


def sides(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    """--mode for a colocated and for a disaggregated stack of the tiny model."""
    values = {"dtype": "float32", "max_len": 2048, "kv_bytes": "32MiB", "model": tiny_model_dir}
    modes = []
    for name, profile in (("colocated", COLOCATED), ("pd", PD)):
        file = tmp_path / f"{name}.toml"
        file.write_text(profile.format(name=name, **values))
        modes += ["--mode", f"{name}={file}"]
    return modes


def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "PDCTL_STATE_DIR": str(tmp_path / "state")}


def test_both_sides_in_turn(tiny_model_dir: Path, tmp_path: Path) -> None:
    env, modes = environment(tmp_path), sides(tiny_model_dir, tmp_path)
    out, report = tmp_path / "r.json", tmp_path / "r.html"
    grid = ["--prompt", "300", "-c", "2", "--output", "8", "--rounds", "2", "--requests", "4", "--vocab", "512"]
    done = bench(env, *modes, *grid, "--calibrate", "-o", str(out), "--report", str(report))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [(c["mode"], c["requests"], c["errors"]) for c in result["cells"]] == [("colocated", 8, 0), ("pd", 8, 0)]
    pd = result["cells"][1]
    assert pd["transfer"]["requests"] == 8
    assert pd["transfer"]["kv_bytes"] > 0
    assert {"prefill_end_ms", "kv_ready_ms", "second_token_ms"} <= set(pd["stages_ms"])
    assert result["modes"][1]["layout"] == {"prefill": 1, "decode": 1, "colocated": 0, "threshold": 0}
    assert {row[0] for row in result["calibration"]["decode"]} == {"colocated", "decode"}
    assert "pd against colocated" in done.stdout
    assert report.read_text().count("<svg") > 4
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert not left, "no process is left behind"


def test_budgets_are_swept(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Each budget is a stack of its own with that budget; report and verdict know that they are one side."""
    out, report = tmp_path / "r.json", tmp_path / "r.html"
    grid = ["--prompt", "300", "-c", "2", "--output", "8", "--rounds", "1", "--requests", "5", "--vocab", "512"]
    sweep = ["--sweep-budget", "64", "--sweep-budget", "256"]
    modes = sides(tiny_model_dir, tmp_path)
    done = bench(environment(tmp_path), *modes, *grid, *sweep, "-o", str(out), "--report", str(report))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [(m["name"], m["family"], m["sizes"]["token_budget"]) for m in result["modes"][:2]] == [
        ("colocated-64", "colocated", 64),
        ("colocated-256", "colocated", 256),
    ]
    assert [(c["mode"], c["requests"], c["errors"]) for c in result["cells"]] == [
        ("colocated-64", 5, 0),
        ("colocated-256", 5, 0),
        ("pd", 5, 0),
    ]
    assert "frontier of requests/s and p99 gap: pd is" in done.stdout
    assert "Frontier over budgets, prompt 300" in report.read_text()


async def test_agrees_with_openai_on_a_real_stack(smollm2_dir: Path, tmp_path: Path) -> None:
    """TTFT and TPOT within 3 % of a timing loop around the openai package.

    TTFT in turn, each first in every other round. TPOT at the same moment: both sequences then share every step.
    """
    ttfts: tuple[list[float], list[float]] = ([], [])
    tpots: tuple[list[float], list[float]] = ([], [])
    values = {"model": smollm2_dir, "dtype": "auto", "kv_bytes": "256MiB"}
    with running(tmp_path, PD, **values) as stack:
        client = AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none")
        async with client, Driver(Server(stack.url, "none", "m")) as driver:
            for number in range(ROUNDS + 1):
                for which in (0, 1)[:: -1 if number % 2 else 1]:
                    prompt = ids(Random(2 * number + which), 256)
                    ttft, _ = await (by_openai(client, prompt, 1) if which else by_driver(driver, prompt, 1))
                    ttfts[which].append(ttft)
                one, two = (ids(Random(1000 + 2 * number + n), 64) for n in (0, 1))
                pair = await asyncio.gather(by_driver(driver, one, 24), by_openai(client, two, 24))
                for which, (_, tpot) in enumerate(pair):
                    tpots[which].append(tpot)
    # Of TTFT the least: what another process on this machine adds to one of them says nothing about the two clients.
    assert min(ttfts[0]) == pytest.approx(min(ttfts[1]), rel=0.03)
    # The first round opens connections.
    assert statistics.median(tpots[0][1:]) == pytest.approx(statistics.median(tpots[1][1:]), rel=0.03)


async def by_driver(driver: Driver, prompt: list[int], count: int) -> tuple[float, float]:
    sample = await driver.send(prompt, count)
    assert sample.is_good, sample.error
    return sample.ttft, sample.tpot or 0.0


async def by_openai(client: AsyncOpenAI, prompt: list[int], count: int) -> tuple[float, float]:
    """The plainest loop there is: a clock, and a for."""
    more = {"ignore_eos": True, "return_token_ids": True}
    sent, marks = time.perf_counter(), []
    stream = await client.completions.create(
        model="m", prompt=prompt, max_tokens=count, temperature=0, stream=True, extra_body=more
    )
    async for event in stream:
        if event.choices and (event.choices[0].model_extra or {}).get("token_ids"):
            marks.append(time.perf_counter())  # noqa: PERF401  # it reads as a timing loop
    assert len(marks) == count
    return marks[0] - sent, (marks[-1] - marks[0]) / max(1, count - 1)
