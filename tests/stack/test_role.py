"""A prefill worker becomes a decode worker and back while clients ask: same process, no weights loaded, no failure."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.stack import reference
from tests.stack.harness import PD, Running, complete, running
from tests.stack.test_churn import assert_nothing_left
from tests.stack.test_text import prompts

TWO = PD.replace("[prefill]\nworkers = 1\ncpus = [0]", "[prefill]\nworkers = 2\ncpus = [0, 0]")


def processes(stack: Running) -> dict[str, tuple[int, str, int]]:
    workers = [p for p in stack.status()["processes"] if p["role"] != "router"]
    return {p["name"]: (p["pid"], p["role"], p["restarts"]) for p in workers}


@pytest.mark.timeout(300)
def test_a_role_changes_and_back(tmp_path: Path, tiny_model_dir: Path) -> None:
    model = reference.load(tiny_model_dir)
    cases = [(p, reference.generate(model, p, 16)) for p in prompts([40, 100, 300, 600], 512, seed=41)]
    with running(tmp_path, TWO, model=tiny_model_dir) as stack, ThreadPoolExecutor(3) as clients:
        url, is_over = stack.url, threading.Event()
        seen: list[dict[str, Any]] = []

        def ask(number: int) -> None:
            while not is_over.is_set():
                prompt, expected = cases[number % len(cases)]
                choice = complete(url, prompt, max_tokens=16, cache_salt=str(len(seen)))  # nothing cached: all cross
                assert choice["token_ids"] == expected
                seen.append(choice["pdctl"])

        def wait_for(place: str, name: str) -> None:
            start = len(seen)
            while not any(record[place] == name for record in seen[start:]):
                assert not any(task.done() for task in asking), "a client has failed"
                assert not is_over.wait(0.1)

        before = processes(stack)
        asking = [clients.submit(ask, number) for number in range(3)]
        try:
            # 1. The second prefill worker becomes the second decode worker, in the same process.
            turned = stack.cli("role", "prefill-1", "decode", timeout_s=150)
            assert turned.returncode == 0, f"{turned.stderr}\n{stack.logs()}"
            now = processes(stack)
            assert set(now) == {"prefill-0", "decode-0", "decode-1"}
            assert now["decode-1"] == (before["prefill-1"][0], "decode", 0)
            wait_for("decode", "decode-1")
            assert "decode is decode-1 from here on" not in (stack.folder / "logs" / "decode-0.log").read_text()
            assert (stack.folder / "logs" / "decode-1.log").read_text().count("prefill is decode-1") == 1
            # 2. What cannot be is refused, and changes nothing.
            for worker, role, why in (
                ("prefill-0", "decode", "the only prefill worker"),
                ("decode-0", "prefill", "the last worker of a pool changes: decode-1"),
                ("decode-7", "prefill", "there is no worker decode-7"),
            ):
                refused = stack.cli("role", worker, role)
                assert (refused.returncode, why in refused.stderr) == (7, True), refused.stderr
            # 3. And back.
            back = stack.cli("role", "decode-1", "prefill", timeout_s=150)
            assert back.returncode == 0, f"{back.stderr}\n{stack.logs()}"
            assert processes(stack) == before
            wait_for("prefill", "prefill-1")
        finally:
            is_over.set()
        for each in asking:
            each.result()
        assert_nothing_left(stack)
