"""Chunks are lost and corrupted on their way, and nobody can tell from the text."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stack.harness import PD, Running, eventually, running

NUM_REQUESTS = 500
FAULTS = "transfer.lose=0.05,transfer.corrupt=0.01,seed=7"


def prompts() -> list[list[int]]:
    """No two with a first block in common, so that nothing is resident and everything crosses."""
    rng = random.Random(3)
    lengths = [rng.choice([5, 16, 33, 64, 100, 129, 200, 400]) for _ in range(NUM_REQUESTS)]
    return [[3 + i % 500, 3 + i // 500, *(rng.randrange(3, 512) for _ in range(n))] for i, n in enumerate(lengths)]


def answers(stack: Running) -> list[list[int]]:
    url = f"{stack.url}/v1/completions"
    asked = {"model": "m", "max_tokens": 6, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    # One client: making one costs more than a request does.
    with httpx.Client(timeout=300, headers={"x-pdctl-timing": "1"}) as client, ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda prompt: client.post(url, json=asked | {"prompt": prompt}).json(), prompts()))
    assert {answer["pdctl"]["path"] for answer in found} == {"pd"}
    return [answer["choices"][0]["token_ids"] for answer in found]


def load(stack: Running, name: str) -> dict[str, Any]:
    workers = {worker["name"]: worker for worker in stack.admin("/admin/state")["workers"]}
    found: dict[str, Any] = workers[name]["load"] or {}
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["nixl", "tcp"])
def test_500_requests_with_lost_and_corrupt_chunks(tiny_model_dir: Path, tmp_path: Path, backend: str) -> None:
    profile = PD + f'[transfer]\nbackend = "{backend}"\n'
    with running(tmp_path, profile, name="clean", model=tiny_model_dir) as stack:
        expected = answers(stack)
    with running(tmp_path, profile, name="faulty", model=tiny_model_dir, env={"PDCTL_FAULTS": FAULTS}) as stack:
        assert answers(stack) == expected
        eventually(lambda: load(stack, "decode-0")["slots_free"] == load(stack, "decode-0")["slots_total"], 10, "idle")
        decode, prefill = load(stack, "decode-0")["counters"], load(stack, "prefill-0")["counters"]
        link = load(stack, "prefill-0")["links"]["decode-0"]
    # Each loss and each flip that was injected was noticed, and asked for again; ranges that lie side by side are one.
    assert decode["lost"] == decode["fault_lose"] > 30
    assert decode["checksum_failures"] == decode["fault_corrupt"] > 5
    assert 0 < decode["resends"] <= decode["lost"] + decode["checksum_failures"]
    assert prefill["resent"] == decode["lost"] + decode["checksum_failures"]
    never = ("duplicate", "dropped_range", "failed", "recomputed")
    assert {name: decode[name] for name in never} == dict.fromkeys(never, 0)
    assert prefill["sent"] + prefill["resent"] == decode["received"] + decode["lost"] + decode["checksum_failures"]
    assert link["transport"].startswith(backend)
    assert link["bytes"] == prefill["sent_bytes"]
