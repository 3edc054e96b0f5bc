"""A burst far beyond what a small decode pool holds: marks hold, 429s say when to come back, the rest is answered."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stack.harness import PD, Running, running
from tests.stack.test_churn import assert_nothing_left
from tests.stack.test_text import prompts

SLOTS = 8192
REQUESTS = 200


class Watch:
    """Worker loads, as often as the router has new ones."""

    def __init__(self, stack: Running, url: str) -> None:
        self.loads: dict[str, list[dict[str, Any]]] = {"prefill-0": [], "decode-0": []}
        self._stack, self._url = stack, url
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.2):
            for worker in self._stack.admin("/admin/state", url=self._url)["workers"]:
                self.loads[worker["name"]].append(worker["load"])

    def peak(self, worker: str) -> float:
        """Largest share of blocks written or promised."""
        return max((load["blocks_used"] + load["blocks_granted"]) / load["blocks_total"] for load in self.loads[worker])


def slots_in(folder: Path, slots: int) -> int:
    """Bytes of so many token slots of the tiny model in float32, and of the null block."""
    import json

    config = json.loads((folder / "config.json").read_text())
    heads = config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int((slots + 16) * config["num_hidden_layers"] * heads * size * 2 * 4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("threshold", [0, 256], ids=["pd", "hybrid"])
def test_burst(tmp_path: Path, tiny_model_dir: Path, threshold: int) -> None:
    profile = PD.replace("threshold_tokens = 0", f"threshold_tokens = {threshold}")
    with running(tmp_path, profile, model=tiny_model_dir, kv_bytes=slots_in(tiny_model_dir, SLOTS)) as stack:
        url = stack.url
        bodies = [
            {"model": "m", "prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
            for prompt in prompts([1024] * REQUESTS, 512, seed=21)
        ]
        start = time.monotonic()

        def ask(number: int) -> httpx.Response:
            time.sleep(max(0.0, start + number / REQUESTS - time.monotonic()))  # the burst: all within a second
            return httpx.post(f"{url}/v1/completions", json=bodies[number], timeout=240)

        with Watch(stack, url) as watch, ThreadPoolExecutor(REQUESTS) as clients:
            answers = list(clients.map(ask, range(REQUESTS)))

        counts = Counter(answer.status_code for answer in answers)
        assert set(counts) <= {200, 429}, counts
        assert counts[200] >= 50, "at least what the router's queue holds"
        for answer in answers:
            if answer.status_code == 429:
                assert 1 <= int(answer.headers["retry-after"]) <= 60
            else:
                assert answer.json()["usage"]["completion_tokens"] == 32
        assert watch.loads["decode-0"][-1]["blocks_total"] == SLOTS // 16
        assert watch.peak("decode-0") <= 0.92
        assert watch.loads["decode-0"][-1]["preemptions"] == 0, "growth is reserved with the grant"
        assert_nothing_left(stack)
        print(f"\n{dict(counts)} in {time.monotonic() - start:.1f} s; peak P {watch.peak('prefill-0'):.2f}, "
              f"D {watch.peak('decode-0'):.2f}")  # fmt: skip
