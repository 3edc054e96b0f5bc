"""What an open console costs, in a real terminal: CPU at one frame a second, and how soon a key is answered."""

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.stack.harness import ROOT, eventually

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")]


class Console:
    def __init__(self, socket: Path, count: int) -> None:
        self._socket = str(socket)
        pid_file = socket.with_suffix(".pid")
        command = f"echo $$ > {pid_file}; exec {sys.executable} -m tests.tui.fake_console {count}"
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", "120", "-y", "36", "-c", str(ROOT), command)
        eventually(lambda: "READY" in self.screen(), 20, "the first frame")
        self.process = psutil.Process(int(pid_file.read_text()))

    def _tmux(self, *arguments: str) -> str:
        argv = ["tmux", "-S", self._socket, *arguments]
        return subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False).stdout

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def press(self, key: str) -> None:
        self._tmux("send-keys", key)

    def cpu_share(self, seconds: float) -> float:
        times = self.process.cpu_times()
        time.sleep(seconds)
        after = self.process.cpu_times()
        return (after.user + after.system - times.user - times.system) / seconds

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def console(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Console]:
    it = Console(tmp_path / "tmux", request.param)
    with contextlib.closing(it):
        yield it


@pytest.mark.parametrize("console", [8], indirect=True)
def test_eight_workers_cost_under_four_percent(console: Console) -> None:
    assert console.cpu_share(60) < 0.04


@pytest.mark.parametrize("console", [100], indirect=True)
def test_a_hundred_workers_answer_keys_and_cost_under_fifteen_percent(console: Console) -> None:
    assert console.cpu_share(30) < 0.15
    took = []
    for key, said in (("2", "decode-0 "), ("3", "Requests ("), ("4", "History"), ("5", "lines"), ("1", "p50/p95")) * 4:
        started = time.monotonic()
        console.press(key)
        while said not in console.screen():
            assert time.monotonic() - started < 5, f"{key}: {console.screen()}"
        took.append(time.monotonic() - started)
    # tmux itself takes a few ms of each; the median is the console's, one that waited for a slow machine is not.
    assert sorted(took)[len(took) // 2] < 0.1
