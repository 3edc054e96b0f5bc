"""Where frames come from and where changes go: a stack on this host, one behind an address, a file, or a test's own.

A source is used from worker threads, one call at a time each; it knows no widget and keeps no screen state.
"""

import getpass
import socket
import time
from pathlib import Path
from typing import Protocol

import msgspec

from pdctl import control
from pdctl.client import Client, admin
from pdctl.exits import Refused, UsageError
from pdctl.process import Identity
from pdctl.rundir import Stack, StackDir
from pdctl.samples import Samples
from pdctl.snapshot import Json, LogTail, Reader, RouterReader, Snapshot, read_remote
from pdctl.status import running

# A second for each of the last two minutes, every fifth of a quarter of an hour: read in a third of a second.
FULL_S, EARLIER_S, THINNED = 120.0, 900.0, 5


class Source(Protocol):
    """`poll` raises PdctlError when nothing answers; so do the changes when they are refused."""

    name: str
    is_read_only: bool

    def poll(self) -> Snapshot: ...
    def earlier(self) -> list[Snapshot]: ...
    def change(self, values: Json, *, if_rev: int, reason: str, revert_after_s: float | None) -> Json: ...
    def undo(self) -> Json: ...
    def drain(self, worker: str) -> None: ...
    def resume(self, worker: str) -> None: ...
    def restart(self, worker: str) -> None: ...
    def kill(self, worker: str) -> None: ...
    def request(self, id: str) -> Json: ...
    def close(self) -> None: ...


def whoami() -> str:
    """Who the audit log names."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):
        return "tui"


class RouterSource:
    """What needs no more than the router: by URL and key. A read-only one has a key with which the router refuses."""

    def __init__(self, client: Client, *, name: str = "", is_read_only: bool = False) -> None:
        self.name = name or client.url
        self.is_read_only = is_read_only
        self._fixed = client
        self._router = RouterReader()

    def _client(self) -> Client:
        return self._fixed

    def poll(self) -> Snapshot:
        return read_remote(self._client(), self._router)

    def earlier(self) -> list[Snapshot]:
        """What was before the console came, oldest first, for its charts."""
        return []

    def _call(self, method: str, path: str, body: Json | None = None) -> Json:
        return self._client().call(method, path, body)

    def change(self, values: Json, *, if_rev: int, reason: str, revert_after_s: float | None) -> Json:
        body: Json = {"values": values, "if_rev": if_rev, "reason": reason, "by": whoami()}
        if revert_after_s is not None:
            body["revert_after_s"] = revert_after_s
        return self._call("PATCH", "/admin/knobs", body)

    def undo(self) -> Json:
        return self._call("POST", "/admin/knobs/undo", {"by": whoami(), "reason": "undo in the console"})

    def drain(self, worker: str) -> None:
        self._call("POST", f"/admin/workers/{worker}/drain", {"by": whoami()})

    def resume(self, worker: str) -> None:
        self._call("POST", f"/admin/workers/{worker}/resume", {"by": whoami()})

    def restart(self, worker: str) -> None:
        raise Refused(f"restarting {worker} needs its supervisor: run pdctl tui on that host, or --host ssh://HOST")

    def kill(self, worker: str) -> None:
        self.restart(worker)

    def request(self, id: str) -> Json:
        return self._client().get(f"/admin/requests/{id}")

    def close(self) -> None:
        return


class StackSource(RouterSource):
    """A stack of this user on this host: supervisor, router and log files."""

    def __init__(self, stack_dir: StackDir, *, is_read_only: bool = False) -> None:
        self.name = stack_dir.name
        self.is_read_only = is_read_only
        self._dir = stack_dir
        self._reader = Reader(stack_dir, is_view=is_read_only)
        self._tail = LogTail(stack_dir)

    def _stack(self) -> Stack:
        return running(self._dir)

    def _client(self) -> Client:
        return admin(self._dir, self._stack(), is_view=self.is_read_only)

    def poll(self) -> Snapshot:
        snapshot = self._reader.read()
        return msgspec.structs.replace(snapshot, logs=self._tail.read())

    def earlier(self) -> list[Snapshot]:
        try:
            samples = Samples(self._dir.history)
        except UsageError:
            return []
        try:
            now = time.time()
            ages = [(index, now - at) for index, at in enumerate(samples.times)]
            wanted = [i for i, age in ages if age < FULL_S or (age < EARLIER_S and i % THINNED == 0)]
            return [samples.read(index) for index in wanted]
        finally:
            samples.close()

    def close(self) -> None:
        self._tail.close()

    def restart(self, worker: str) -> None:
        if self.is_read_only:
            raise Refused("READ_ONLY: this console was started with --read-only")
        answer = control.ask(self._stack().control, {"op": "restart", "worker": worker}, timeout_s=5.0)
        if not answer.get("ok"):
            raise UsageError(str(answer.get("error")))

    def kill(self, worker: str) -> None:
        """SIGKILL to exactly the process that is on record; the supervisor sees it die and starts it again."""
        if self.is_read_only:
            raise Refused("READ_ONLY: this console was started with --read-only")
        stack = self._stack()
        process = stack.process(worker)
        if process is None or not process.pid:
            raise UsageError(f"no process {worker!r}")
        found = Identity(process.pid, process.create_time, stack.run_id).find()
        if found is None:
            raise UsageError(f"{worker} does not run")
        found.kill()


class ReplaySource:
    """A recorded file. `poll` plays it at the speed at which it was recorded; `read` is any moment of it."""

    is_read_only = True

    def __init__(self, file: Path) -> None:
        self.samples = Samples(file)
        self.name = file.stem
        self._started = time.monotonic()
        self.position = 0

    def earlier(self) -> list[Snapshot]:
        return []

    def seek(self, index: int) -> None:
        """Playing goes on from there."""
        self.position = min(max(0, index), len(self.samples.times) - 1)
        self._started = time.monotonic() - (self.samples.times[self.position] - self.samples.times[0])

    def poll(self) -> Snapshot:
        at = self.samples.times[0] + time.monotonic() - self._started
        while self.position + 1 < len(self.samples.times) and self.samples.times[self.position + 1] <= at:
            self.position += 1
        return self.samples.read(self.position)

    def change(self, values: Json, *, if_rev: int, reason: str, revert_after_s: float | None) -> Json:
        raise Refused("READ_ONLY: a recording cannot be changed")

    def undo(self) -> Json:
        raise Refused("READ_ONLY: a recording cannot be changed")

    def drain(self, worker: str) -> None:
        raise Refused("READ_ONLY: a recording cannot be changed")

    resume = restart = kill = drain

    def request(self, id: str) -> Json:
        raise Refused("a recording holds no stage records of single requests")

    def close(self) -> None:
        self.samples.close()
