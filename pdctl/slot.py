"""One named process of the stack over all its starts.

waiting -> starting -> ready -> (ended) -> restarting -> starting ...
           starting -> (ended, first time) -> dead, and the start of the whole stack fails with the cause
                       ready -> (ended) -> dead once the policy gives up; `restart` brings it back
           any      -> stopping -> stopped
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdctl.child import Child, cause_of
from pdctl.exits import TimedOut
from pdctl.launch import Launch
from pdctl.restart import RestartPolicy
from pdctl.rundir import ExitRecord, ProcessInfo
from server.errors import PdctlError, StartError

# A process that said `error` is expected to end by itself.
LAST_WORDS_S = 5.0
MAX_EXITS = 10
LOOK_S = 1.0


class Slot:
    """`spawn` starts one incarnation; `changed` is told of every change of `info`."""

    def __init__(
        self,
        launch: Launch,
        info: ProcessInfo,
        policy: RestartPolicy,
        *,
        spawn: Callable[["Slot"], Child],
        changed: Callable[["Slot"], None],
        ready_timeout_s: float,
        stop_timeout_s: float,
    ) -> None:
        self.launch = launch
        self.info = info
        self.child: Child | None = None
        self.first_ready = self._new_future()
        self._was_ready = False  # in an earlier role
        self.boot_file = Path()
        self.status_fd = -1  # as the process knows it
        self._policy = policy
        self._spawn = spawn
        self._changed = changed
        self._ready_timeout_s = ready_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._is_stopping = False
        self._has_failed = False
        self._restart_asked = False
        self._wake = asyncio.Event()
        self._deadline = 0.0
        self._said: dict[str, Any] = {}

    def turn(self, launch: Launch, log: Path) -> None:
        """The process takes another name and role, by the boot file it has; `first_ready` says when it has."""
        assert self.child is not None and self.is_running
        info = self.info
        self.launch, info.name, info.role, info.log = launch, launch.name, launch.role, str(log)
        info.stage, info.share, info.detail, info.ready_at = f"becoming {launch.role}", 0.0, {}, 0.0
        self.first_ready = self._new_future()
        self._was_ready = True
        self._set("starting")
        os.kill(self.child.pid, signal.SIGUSR2)  # not to its group: who is not asked would die of it

    def _new_future(self) -> "asyncio.Future[None]":
        # Only the first failure of a start is raised; the others are seen here, or asyncio would complain of each.
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    @property
    def is_running(self) -> bool:
        return self.child is not None and not self.child.exited.done()

    async def keep(self) -> None:
        """Keeps the process running until told to stop."""
        while not self._is_stopping:
            code, ready_for_s = await self._run_once()
            delay = self._after(code, ready_for_s)
            if self._has_failed:
                return
            if delay != 0 and not self._is_stopping:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), delay)
            if not self._is_stopping:
                self._wake.clear()
                self._restart_asked = False
                self.info.restarts += 1
        self._set("stopped")

    def restart(self) -> None:
        """Ends the process, if it runs, and starts it again at once."""
        self._policy.reset()
        self._restart_asked = True
        self._wake.set()
        if self.child is not None and self.is_running:
            child = self.child
            child.signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(self._stop_timeout_s, child.signal, signal.SIGKILL)

    def stop(self, signum: signal.Signals) -> None:
        """No restart from here on; `signum` to the process and its group."""
        self._is_stopping = True
        self._wake.set()
        if self.child is not None and self.is_running:
            self._set("stopping")
            self.child.signal(signum)
            # A process that somebody froze would otherwise hear of it only when the time is up.
            self.child.signal(signal.SIGCONT)

    async def _run_once(self) -> tuple[int, float]:
        """One incarnation: (exit code, seconds it was ready)."""
        self._said = {}
        info = self.info
        info.stage, info.share, info.detail, info.ready_at, info.started_at = "", 0.0, {}, 0.0, time.time()
        self._deadline = time.monotonic() + self._ready_timeout_s
        child = self.child = self._spawn(self)
        info.pid, info.create_time = child.identity.pid, child.identity.create_time
        self._set("starting")
        looked = time.monotonic()
        while not await child.wait(None if info.ready_at else LOOK_S):
            now = time.monotonic()
            if (late := now - looked - LOOK_S) > LOOK_S:  # this loop stood still: what was reported is not read yet
                self._deadline += late
            looked = now
            if not info.ready_at and now > self._deadline:
                limit = f"no progress for {self._ready_timeout_s:g} s"
                self._said = self._said or {
                    "error": limit + (f" at stage {info.stage!r}" if info.stage else ""),
                    "late": True,
                }
                child.signal(signal.SIGKILL)
                self._deadline = float("inf")
        return child.exited.result(), time.time() - info.ready_at if info.ready_at else 0.0

    def on_status(self, child: Child, record: dict[str, Any]) -> None:
        """A report of the running incarnation."""
        if child is not self.child:
            return
        now = time.monotonic()
        if record.get("ready"):
            self.info.detail = record.get("detail") or {}
            self.info.ready_at = time.time()
            self._set("ready")
            if not self.first_ready.done():
                self.first_ready.set_result(None)
        elif "error" in record:
            self._said = record
            self._deadline = min(self._deadline, now + LAST_WORDS_S)
        elif "stage" in record:
            stage, share = str(record["stage"]), float(record.get("share") or 0.0)
            if (stage, share) != (self.info.stage, self.info.share):
                self.info.stage, self.info.share = stage, share
                self._deadline = now + self._ready_timeout_s
                self._changed(self)

    def _after(self, code: int, ready_for_s: float) -> float | None:
        """Records the end; seconds until the next start, None for never."""
        log = Path(self.info.log)
        reason = str(self._said.get("error") or cause_of(code, log))
        self.info.exits = [*self.info.exits, ExitRecord(time.time(), code, reason)][-MAX_EXITS:]
        if self._is_stopping:
            return None
        if not self.first_ready.done() and not self._restart_asked:
            self.first_ready.set_exception(self._start_error(reason))
            if not self._was_ready:
                self._has_failed = True
                self._set("dead")
                return None
        delay = 0.0 if self._restart_asked else self._policy.after_exit(is_clean=code == 0, ready_for_s=ready_for_s)
        self._set("dead" if delay is None else "restarting")
        return delay

    def _start_error(self, reason: str) -> PdctlError:
        message = f"{self.info.name} did not start: {reason} (log: {self.info.log})"
        help = str(self._said.get("help") or f"pdctl logs -n {Path(self.info.log).parents[1].name} {self.info.name}")
        if self._said.get("late"):
            return TimedOut(message, help=help)
        if self._said:
            return StartError(message, code=str(self._said.get("code") or ""), help=help)
        return PdctlError(message, code="E_CRASHED", help=help)

    def _set(self, state: str) -> None:
        self.info.state = state
        self._changed(self)
