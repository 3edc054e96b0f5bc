"""One start of one process, from spawn to reaped.

1. spawned with the write end of a pipe, on which it reports stages, then `ready` or `error`, one JSON object a line.
2. ready when it says so, and only then.
3. ended when it is waited for: SIGCHLD makes the loop call `poll` on every live child. The end of the pipe says
   nothing, a grandchild may hold it open.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from pdctl.logs import last_line
from pdctl.process import Identity, describe_exit, signal_group, spawn

MAX_LINE = 64 * 1024


class Child:
    """`on_status` gets each report; `exited` is done with the exit code once the process is reaped."""

    def __init__(self, process: "subprocess.Popen[bytes]", status_fd: int, run_id: str, on_status: "OnStatus") -> None:
        self._process = process
        self._status_fd = status_fd
        self._buffer = b""
        self._on_status = on_status
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self.identity = Identity(process.pid, _create_time(process.pid), run_id)
        os.set_blocking(status_fd, False)
        self._loop.add_reader(status_fd, self._read)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> None:
        """Reaps it if it ended. What it said last is read first."""
        if self.exited.done() or (code := self._process.poll()) is None:
            return
        self._read()
        self._close()
        self.exited.set_result(code)

    def signal(self, signum: signal.Signals) -> None:
        """To the process and its group; nothing once it is reaped, for its pid may be another's then."""
        if not self.exited.done():
            signal_group(self.pid, signum)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """True when it has ended within the time."""
        done, _ = await asyncio.wait([self.exited], timeout=timeout_s)
        return bool(done)

    def _read(self) -> None:
        while self._status_fd >= 0:
            try:
                data = os.read(self._status_fd, MAX_LINE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._close()
                return
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            self._buffer = self._buffer[-MAX_LINE:]
            for line in lines:
                self._report(line)

    def _report(self, line: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            self._on_status(self, msgspec.json.decode(line, type=dict[str, Any]))

    def _close(self) -> None:
        if self._status_fd >= 0:
            self._loop.remove_reader(self._status_fd)
            os.close(self._status_fd)
            self._status_fd = -1


OnStatus = Callable[[Child, dict[str, Any]], None]


def start(
    argv: Callable[[int], list[str]],
    *,
    env: Mapping[str, str],
    log: Path,
    cpus: tuple[int, ...],
    run_id: str,
    on_status: OnStatus,
    answer: Path | None = None,
    pass_fds: tuple[int, ...] = (),
) -> Child:
    """Starts a process; `argv` is asked with the number of the status descriptor it inherits."""
    reader, writer = os.pipe()
    try:
        process = spawn(argv(writer), env=env, log=log, answer=answer, cpus=cpus, pass_fds=(*pass_fds, writer))
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return Child(process, reader, run_id, on_status)


def _create_time(pid: int) -> float:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0


def cause_of(code: int, log: Path) -> str:
    """Why a process that said nothing ended: the last line it logged, else how it ended."""
    how = describe_exit(code)
    if code == -signal.SIGKILL:
        how += " (out of memory?)"
    last = last_line(log)
    return f"{how}: {last}" if last and code >= 0 else how
