"""`kill -9` of each process: said within 2 s, no request hangs or lies, what can comes back, the next request works."""

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.stack import reference
from tests.stack.harness import PD, Running, complete, eventually, running

PROMPT = list(range(3, 43))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("kill"), PD, model=tiny_model_dir) as stack:
        yield stack


class Stream:
    """A long streamed answer, read on a thread of its own."""

    def __init__(self, url: str) -> None:
        self.lines: list[str] = []
        self.started = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(url,), daemon=True)
        self._thread.start()
        assert self.started.wait(30), "no first token"

    def _read(self, url: str) -> None:
        body = {
            "model": "m",
            "prompt": PROMPT,
            "max_tokens": 1500,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line:
                        self.lines.append(line)
                        self.started.set()
        except httpx.HTTPError as error:
            self.error = error

    def end(self, within_s: float = 60.0) -> None:
        self._thread.join(within_s)
        assert not self._thread.is_alive(), "the stream hangs"

    @property
    def num_tokens(self) -> int:
        chunks = (json.loads(line.removeprefix("data: ")) for line in self.lines[:-1])
        return sum(len(choice.get("token_ids") or []) for chunk in chunks for choice in chunk["choices"])

    @property
    def error_event(self) -> dict[str, Any] | None:
        found = next((line for line in self.lines if '"error"' in line), None)
        return json.loads(found.removeprefix("data: "))["error"] if found else None


def process(stack: Running, name: str) -> dict[str, Any]:
    processes = stack.status()["processes"]
    found: dict[str, Any] = next(p for p in processes if p["name"] == name)
    return found


def is_alive(pid: int) -> bool:
    """A zombie is dead; whoever adopted it has yet to say so."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def comes_back(stack: Running, name: str, old_pid: int) -> None:
    eventually(
        lambda: process(stack, name)["pid"] not in (0, old_pid) and stack.status()["state"] == "ready",
        60,
        f"{name} ready again\n{stack.logs()}",
    )


def next_request_works(url: str) -> None:
    eventually(lambda: httpx.get(f"{url}/readyz", timeout=5).status_code == 200, 30, "router ready")
    assert len(complete(url, PROMPT)["token_ids"]) == 32


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0", "router"])
def test_kill(stack: Running, victim: str) -> None:
    # 1. A stream is under way.
    stream = Stream(stack.url)
    pid = process(stack, victim)["pid"]
    # 2. One process dies without a word.
    kill(pid)
    # 3. `status` says so within 2 s: it is not ready any more, or already another process.
    eventually(
        lambda: (p := process(stack, victim))["pid"] != pid or p["state"] != "ready", 2, f"status tells of {victim}"
    )
    # 4. The stream ends whole: prefill had handed over, and what decode had the only KV of is begun again by prefill.
    stream.end()
    if victim != "router":
        assert stream.error_event is None
        assert stream.lines[-1] == "data: [DONE]"
        assert stream.num_tokens == 1500
    else:
        assert stream.error is not None, "a router that dies cuts the connection: the client sees that"
    # 5. Who asks while the only decode worker is away is answered by prefill alone, or by both if it is back already.
    if victim == "decode-0":
        is_away = process(stack, victim)["state"] != "ready"
        answer = complete(stack.url, PROMPT)
        assert len(answer["token_ids"]) == 32
        assert answer["pdctl"]["path"] in (("colocated",) if is_away else ("colocated", "pd"))
    # 6. The supervisor brings it back and the next request works.
    comes_back(stack, victim, pid)
    next_request_works(stack.url)


def test_kill_prefill_while_it_reads(stack: Running, tiny_model_dir: Path) -> None:
    """Decode has the same model: it goes on from what has reached it. Nobody notices but by the time it takes."""
    # 1. More prompts than prefill reads at once: some wait, some are being read, some half sent.
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 512) for _ in range(1500)] for _ in range(8)]
    model = reference.load(tiny_model_dir)
    expected = [reference.generate(model, prompt, 200) for prompt in prompts]  # long enough to be caught reading
    url, secret = stack.url, (stack.folder / "secret").read_text().strip()
    pid = process(stack, "prefill-0")["pid"]
    with ThreadPoolExecutor(16) as clients:
        answers = clients.map(lambda prompt: complete(url, prompt, max_tokens=200)["token_ids"], prompts)
        eventually(lambda: num_running(url, secret), 30, "first of them reads its answer")
        # 2. Prefill dies.
        kill(pid)
        # 3. Every answer is whole, and the right one.
        assert list(answers) == expected
    comes_back(stack, "prefill-0", pid)
    next_request_works(stack.url)


def num_running(url: str, secret: str) -> int:
    answer = httpx.get(f"{url}/admin/state", headers={"Authorization": f"Bearer {secret}"}, timeout=10)
    return int(answer.json()["router"]["running"])


def test_kill_supervisor(tmp_path: Path, tiny_model_dir: Path) -> None:
    with running(tmp_path, PD, model=tiny_model_dir) as stack:
        status = stack.status()
        pids = [p["pid"] for p in status["processes"]]
        # 1. The supervisor dies; what it started goes on.
        url = stack.url
        kill(status["supervisor"]["pid"])
        eventually(lambda: stack.cli("status", stack.name).returncode == 4, 2, "status says so")
        next_request_works(url)
        # 2. `down` finds them all by pid, start time and run id, and leaves nothing.
        assert stack.cli("down", stack.name).returncode == 0
        assert not [pid for pid in pids if is_alive(pid)]
