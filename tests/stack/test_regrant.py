"""A decode worker dies in the middle of a transfer: the client notices nothing, and nobody reads the prompt again."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.stack import reference
from tests.stack.harness import PD, Running, complete, eventually, running

CHUNK = 16
TWO_DECODE = (
    PD.replace("cpus = [0]", f"cpus = [0]\nchunk_tokens = {CHUNK}")
    .replace("workers = 1\ncpus = [1]", "workers = 2\ncpus = [1, 1]")
    .replace('name = "{name}"', 'name = "{name}"\n[supervise]\nrestart = "no"', 1)
)


def workers(stack: Running, url: str) -> dict[str, dict[str, Any]]:
    return {worker["name"]: worker for worker in stack.admin("/admin/state", url=url)["workers"]}


def fresh(stack: Running, url: str) -> dict[str, dict[str, Any]]:
    """What every worker has said since this was called."""
    asked = time.monotonic()

    def said() -> dict[str, dict[str, Any]] | None:
        found, age_s = workers(stack, url), time.monotonic() - asked
        return found if all(w["load"] and (w["heartbeat_age_s"] or 99) < age_s for w in found.values()) else None

    answer: dict[str, dict[str, Any]] = eventually(said, 10, "a word of everybody")
    return answer


def recomputed(worker: dict[str, Any]) -> float:
    return float(worker["load"]["counters"]["recomputed"])


@pytest.mark.slow
def test_kill_decode_in_the_middle_of_a_transfer(tmp_path: Path, tiny_model_dir: Path) -> None:
    prompt = [3 + (11 * i) % 500 for i in range(3900)]
    expected = reference.generate(reference.load(tiny_model_dir), prompt, 32)
    with running(tmp_path, TWO_DECODE, model=tiny_model_dir) as stack:
        url = stack.url
        pids = {p["name"]: p["pid"] for p in stack.status()["processes"]}
        before = fresh(stack, url)
        with ThreadPoolExecutor(1) as client:
            # 1. A prompt of many small steps is being read, and pushed to one of two decode workers.
            answer = client.submit(complete, url, prompt)
            victim = eventually(
                lambda: next((n for n, w in workers(stack, url).items() if n != "prefill-0" and w["open"]), ""),
                20,
                "it",
            )
            # 2. That one dies. The answer comes from the other, and is the right one.
            os.kill(pids[victim], signal.SIGKILL)
            found = answer.result(120)
        assert found["token_ids"] == expected
        assert found["pdctl"]["path"] == "pd"
        assert found["pdctl"]["decode"] != victim
        # 3. Prefill made as many steps as the prompt has chunks; decode read nothing of it.
        others = workers(stack, url)
        assert others["prefill-0"]["load"]["counters"]["regranted"] == 1
        name = found["pdctl"]["decode"]
        assert recomputed(others[name]) == recomputed(before[name])
        steps = before["prefill-0"]["heartbeat"]["steps"] + -(-len(prompt) // CHUNK)
        eventually(lambda: workers(stack, url)["prefill-0"]["heartbeat"]["steps"] >= steps, 10, "all steps told")
        assert workers(stack, url)["prefill-0"]["heartbeat"]["steps"] == steps
