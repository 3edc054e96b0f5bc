"""A decode worker more, then one less, while clients ask: no request fails, every text is right, both decode."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.stack import reference
from tests.stack.harness import PD, complete, running
from tests.stack.test_churn import assert_nothing_left
from tests.stack.test_text import prompts


@pytest.mark.timeout(300)
def test_scale_decode(tmp_path: Path, tiny_model_dir: Path) -> None:
    model = reference.load(tiny_model_dir)
    cases = [(p, reference.generate(model, p, 16)) for p in prompts([40, 100, 300, 600], 512, seed=31)]
    with running(tmp_path, PD, model=tiny_model_dir) as stack:
        url, is_over = stack.url, threading.Event()
        seen: list[str] = []

        def ask(number: int) -> None:
            while not is_over.is_set():
                prompt, expected = cases[number % len(cases)]
                salt = str(len(seen))  # nothing cached: every prompt crosses
                choice = complete(url, prompt, max_tokens=16, cache_salt=salt)
                assert choice["token_ids"] == expected
                seen.append(choice["pdctl"]["decode"])

        with ThreadPoolExecutor(3) as clients:
            asking = [clients.submit(ask, number) for number in range(3)]
            try:
                more = stack.cli("scale", "decode=2", "--timeout", "2m")
                assert more.returncode == 0, f"{more.stderr}\n{stack.logs()}"
                cores = {p["name"]: os.sched_getaffinity(p["pid"]) for p in stack.status()["processes"]}
                assert cores["decode-1"] != cores["prefill-0"], "not to the one where the supervisor is, too"
                while "decode-1" not in seen and not any(task.done() for task in asking):
                    is_over.wait(0.1)
                assert stack.admin("/admin/state")["routes"]["prefill-0>decode-1"]["proven"]
                fewer = stack.cli("scale", "decode=1", "--timeout", "2m")
                assert fewer.returncode == 0, fewer.stderr
            finally:
                is_over.set()
            for each in asking:
                each.result()
        assert "decode-1" in seen
        assert [p["name"] for p in stack.status()["processes"] if p["role"] == "decode"] == ["decode-0"]
        assert stack.cli("scale", "prefill=2").returncode == 7
        assert stack.cli("scale", "decode=0").returncode == 7
        assert_nothing_left(stack)
