"""Clients come and go; nothing is left behind."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stack.harness import PD, Running, eventually, running


def one_request(url: str, seed: int) -> str:
    """A streamed or whole request of any size; a quarter hang up at a random moment."""
    rng = random.Random(seed)
    leaves = rng.random() < 0.25
    body = {
        "model": "m",
        "prompt": [rng.randrange(3, 512) for _ in range(rng.choice([1, 7, 16, 40, 64, 200, 500, 900]))],
        "max_tokens": rng.choice([1, 2, 8, 40]),
        "temperature": rng.choice([0, 1.0]),
        "ignore_eos": rng.random() < 0.5,
        "stream": leaves or rng.random() < 0.5,
    }
    if not body["stream"]:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")
        return "answered"
    if leaves:
        timeout = httpx.Timeout(60, read=rng.uniform(0.001, 0.3))  # hangs up when this runs out, or after some lines
        lines_wanted = rng.randrange(0, 6)
    else:
        timeout, lines_wanted = httpx.Timeout(60), 10**6
    lines: list[str] = []
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=timeout) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) > lines_wanted:
                    return "left"
    except httpx.ReadTimeout:
        assert leaves
        return "left"
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]"
    assert not any('"error"' in line for line in lines)
    return "answered"


def is_clean(state: dict[str, Any]) -> bool:
    workers = state["workers"]
    return all(
        w["load"]["blocks_used"] == 0
        and w["load"]["blocks_granted"] == 0
        and w["load"]["slots_free"] == w["load"]["slots_total"]
        and not any(w["load"][k] for k in ("waiting", "running", "expected", "receiving", "pushing"))
        for w in (workers.values() if isinstance(workers, dict) else workers)
    )


@pytest.mark.timeout(300)
def test_two_hundred_requests_a_quarter_of_them_leave(tmp_path: Path, tiny_model_dir: Path) -> None:
    with running(tmp_path, PD, model=tiny_model_dir) as stack:
        # 1. 200 requests, 16 at once.
        url = stack.url
        with ThreadPoolExecutor(16) as clients:
            outcomes = list(clients.map(lambda seed: one_request(url, seed), range(200)))
        assert outcomes.count("answered") > 130
        assert outcomes.count("left") > 20
        # 2. Afterwards: no block referenced, all slots free, queues empty, and the books agree.
        assert_nothing_left(stack)


def assert_nothing_left(stack: Running) -> None:
    eventually(lambda: is_clean(stack.admin("/admin/state")), 5, "every pool empty")
    workers = stack.admin("/admin/state")["workers"]
    for worker in workers.values() if isinstance(workers, dict) else workers:
        assert worker["load"]["integrity"] == ""
        assert worker["load"]["blocks_total"] > 0
