"""`pdctl bench` brings real stacks up and down; what it measures is what another client measures."""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

from tests.stack.harness import COLOCATED, PD, ROOT, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def bench(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "pdctl", "bench", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)


def test_both_sides_in_turn(tiny_model_dir: Path, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "PDCTL_STATE_DIR": str(tmp_path / "state")}
    values = {"dtype": "float32", "max_len": 2048, "kv_bytes": "32MiB", "model": tiny_model_dir}
    modes = []
    for name, profile in (("colocated", COLOCATED), ("pd", PD)):
        file = tmp_path / f"{name}.toml"
        file.write_text(profile.format(name=name, **values))
        modes += ["--mode", f"{name}={file}"]
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


def test_agrees_with_openai_on_a_real_stack(tiny_model_dir: Path, tmp_path: Path) -> None:
    """One request at a time, in turn with a timing loop around the openai package: medians within 3 % of each other."""
    out = tmp_path / "r.json"
    with running(tmp_path, PD, model=tiny_model_dir) as stack:
        times = by_openai(stack.url, 40)
        grid = ["--prompt", "600", "-c", "1", "--output", "64", "--rounds", "1", "--requests", "40", "--vocab", "512"]
        done = bench(stack.env, "--mode", f"pd={stack.url}", *grid, "-o", str(out))
        times += by_openai(stack.url, 40)
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(out.read_text())["cells"]
    assert cell["tpot_ms"]["p50"] == pytest.approx(statistics.median(t for _, t in times), rel=0.03)
    # The SDK takes about a millisecond to build a request; it is not the server's.
    assert cell["ttft_ms"]["p50"] == pytest.approx(statistics.median(t for t, _ in times), rel=0.03, abs=2.0)


def by_openai(url: str, count: int) -> list[tuple[float, float]]:
    """(TTFT, TPOT) in ms."""
    found = []
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for n in range(count):
            prompt = [100 + (7 * n + i) % 400 for i in range(600)]
            more = {"ignore_eos": True, "return_token_ids": True}
            sent, marks = time.perf_counter(), []
            stream = client.completions.create(
                model="m", prompt=prompt, max_tokens=64, temperature=0, stream=True, extra_body=more
            )
            for event in stream:
                if event.choices and (event.choices[0].model_extra or {}).get("token_ids"):
                    marks.append(time.perf_counter())  # noqa: PERF401  # it reads as a timing loop
            assert len(marks) == 64
            found.append((1e3 * (marks[0] - sent), 1e3 * (marks[-1] - marks[0]) / 63))
    return found
