"""A real terminal: a command in tmux, its keys and its screen."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.stack.harness import ROOT, eventually


class Terminal:
    def __init__(
        self, folder: Path, command: Sequence[str], env: Mapping[str, str], size: tuple[int, int] = (120, 36)
    ) -> None:
        """`folder` for the socket; what ends says `left CODE` on the screen."""
        self._socket = str(folder / "tmux")
        pid_file = folder / "pid"
        line = f"sh -c 'echo $$ > {pid_file}; exec {' '.join(command)}'; echo left $?; sleep 600"
        settings = [f"-e{key}={value}" for key, value in env.items()]
        width, height = (str(cells) for cells in size)
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", width, "-y", height, "-c", str(ROOT), *settings, line)
        eventually(lambda: pid_file.exists() and pid_file.read_text().strip(), 20, "the command is started")
        self.process = psutil.Process(int(pid_file.read_text()))

    def _tmux(self, *arguments: str) -> str:
        argv = ["tmux", "-S", self._socket, *arguments]
        env = dict(os.environ)  # readline, which pytest imports, exports a size behind os.environ's back
        return subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False, env=env).stdout

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p")

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def close(self) -> None:
        self._tmux("kill-server")
