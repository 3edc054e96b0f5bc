"""A stack of fake processes in a state folder of its own, driven through the real command line."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import psutil
import pytest

from pdctl.cli import main
from pdctl.down import take_down
from pdctl.process import RUN_ID, environment
from pdctl.rundir import Stack, StackDir

TREE = Path(__file__).parents[2]
FAKE = Path(__file__).parent / "fake"
DEADLINE_S = 20.0
PROFILE = """
name = "box"
[router]
port = 0
[prefill]
workers = 1
[decode]
workers = 1
[supervise]
backoff = "0.1s..0.2s"
max_restarts = 2
stop_timeout = "10s"
"""


def until(condition: Callable[[], Any], what: str = "", timeout_s: float = DEADLINE_S) -> Any:
    """Polls until `condition` is true; its value. Fails with `what` after the time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        time.sleep(0.02)
    return value


class Answer(NamedTuple):
    stdout: str
    stderr: str


class Box:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "state"
        self.profile = folder / "box.toml"
        self.profile.write_text(PROFILE)
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(("PDCTL", "OPENAI"))} | {
            "PYTHONPATH": f"{FAKE}{os.pathsep}{TREE}",
            "PDCTL_TEST_TREE": str(TREE),
            "PDCTL_STATE_DIR": str(self.root),
            "FAKE_SCRIPT": str(folder / "script.json"),
            "XDG_CONFIG_HOME": str(folder / "config"),
        }
        self.script()

    def script(self, **plans: Any) -> None:
        """What the fake processes do; `_` stands for `-` in their names."""
        named = {name.replace("_", "-"): plan for name, plan in plans.items()}
        (self.folder / "script.json").write_text(json.dumps(named))

    def file(self, name: str) -> Path:
        return self.folder / name

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """A command that goes on while the test does."""
        argv = [sys.executable, "-P", "-m", "pdctl", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, env=self.env, cwd=self.folder, stdout=pipe, stderr=pipe, text=True)

    def __call__(self, *arguments: str, expect: int = 0) -> Answer:
        """A command that ends, with the exit code it is expected to have. In this process, for Python starts slowly; a
        supervisor that it starts is a process of its own all the same."""
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, self.env, clear=True),
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = main(arguments)
        assert code == expect, f"exit {code}, expected {expect}\n{out.getvalue()}\n{err.getvalue()}"
        return Answer(out.getvalue(), err.getvalue())

    def up(self, *arguments: str, expect: int = 0) -> Answer:
        return self("up", str(self.profile), "-d", *arguments, expect=expect)

    @property
    def dir(self) -> StackDir:
        return StackDir(self.root / "box")

    @property
    def stack(self) -> Stack:
        stack = self.dir.read()
        assert stack is not None
        return stack

    def pid(self, name: str) -> int:
        process = self.stack.process(name)
        assert process is not None
        return process.pid

    def state(self, name: str) -> str:
        process = self.stack.process(name)
        return process.state if process else ""

    def starts(self, name: str) -> int:
        file = self.dir.path / f"starts.{name}"
        return int((file.read_text() if file.exists() else "") or 0)  # it may be caught while it is written

    def log(self, name: str) -> str:
        file = self.dir.log(name)
        return file.read_text() if file.exists() else ""

    def status(self, expect: int) -> dict[str, Any]:
        """`pdctl status --json`, which has two seconds whatever is dead."""
        started = time.monotonic()
        value: dict[str, Any] = json.loads(self("status", "box", "--json", expect=expect).stdout)
        assert time.monotonic() - started < 2.0
        return value

    def left(self) -> list[int]:
        """Every process that carries a run id of this box."""
        here = str(self.dir.path)
        return [
            process.pid
            for process in psutil.process_iter()
            if (env := environment(process)) and env.get("PDCTL_STACK_DIR") == here and RUN_ID in env
            if process.status() != psutil.STATUS_ZOMBIE
        ]


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    it = Box(tmp_path)
    yield it
    if it.root.exists():
        take_down(it.dir, lambda _: None, is_forced=True)
    for pid in it.left():
        os.kill(pid, signal.SIGKILL)
