"""`pdctl drain --wait` and `resume` on a running stack: what a worker has goes on, new work goes elsewhere."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.stack.harness import PD, complete, eventually, running

TWO = PD.replace("[decode]\nworkers = 1\ncpus = [1]", "[decode]\nworkers = 2\ncpus = [1, 1]")
PROMPT = list(range(3, 43))
LONG = 3900  # tokens of an answer that outlasts a few commands


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.timeout(200)
def test_drain_and_resume(tmp_path: Path, tiny_model_dir: Path) -> None:
    with running(tmp_path, TWO, model=tiny_model_dir) as stack, ThreadPoolExecutor(1) as clients:
        url = stack.url

        def served_by(number: int) -> str:
            return str(complete(url, [number, *PROMPT], max_tokens=2)["pdctl"]["decode"])

        def open_on(name: str) -> int:
            workers = stack.admin("/admin/state", url=url)["workers"]
            return next(int(worker["open"]) for worker in workers if worker["name"] == name)

        # 1. A long answer is under way on one decode worker.
        answer = clients.submit(complete, url, PROMPT, max_tokens=LONG)
        eventually(lambda: open_on("decode-0") + open_on("decode-1") == 1, 10, "an answer under way")
        busy, other = sorted(("decode-0", "decode-1"), key=open_on, reverse=True)
        # 2. It gets nothing new, whoever asks; its answer goes on, and a wait that is too short says so.
        said = stack.cli("drain", busy)
        assert (said.returncode, f"{busy} is draining, 1 open" in said.stderr) == (0, True), said.stderr
        late = stack.cli("drain", busy, "--wait", "--timeout", "0.1s")
        assert (late.returncode, f"{busy} still has 1" in late.stderr) == (124, True), late.stderr
        assert {served_by(number) for number in range(3, 9)} == {other}
        # 3. `--wait` returns when it holds nothing any more, and the answer is whole.
        drained = stack.cli("drain", busy, "--wait", "--timeout", "2m", timeout_s=150)
        assert (drained.returncode, f"{busy} is drained" in drained.stderr) == (0, True), drained.stderr
        assert len(answer.result(30)["token_ids"]) == LONG
        # 4. A restarted router knows of it.
        assert stack.cli("restart", "router").returncode == 0
        eventually(lambda: is_ready(url), 60, "the router is back")
        assert {served_by(number) for number in range(9, 15)} == {other}
        # 5. Resumed, it works again.
        resumed = stack.cli("resume", busy)
        assert (resumed.returncode, f"{busy} is ready" in resumed.stderr) == (0, True), resumed.stderr
        assert busy in {served_by(number) for number in range(15, 25)}
        # 6. A name that is none is refused with those there are.
        unknown = stack.cli("drain", "decode-7")
        assert (unknown.returncode, "prefill-0, decode-0, decode-1" in unknown.stderr) == (7, True), unknown.stderr
