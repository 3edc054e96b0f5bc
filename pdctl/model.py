"""The model as a stage of its own: `server.model_store` in a subprocess turns its name into a folder.

A subprocess, because a first start may download and convert for minutes: it can be stopped, logged and shown, and the
supervisor never loads torch.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pdctl.child import Child, cause_of, start
from pdctl.logs import last_line
from pdctl.process import RUN_ID, STACK_DIR
from server.errors import ModelError

TIMEOUT_S = 3600.0


class Resolver:
    """`start` once, then wait for `folder`."""

    def __init__(self, path: str, log: Path, answer: Path) -> None:
        self._path = path
        self._log = log
        self._answer = answer
        self._child: Child | None = None

    def start(self, run_id: str, stack_dir: Path, cpus: tuple[int, ...]) -> Child:
        argv = [sys.executable, "-P", "-m", "server.model_store", self._path]
        self._child = start(
            lambda _: argv,
            env={**os.environ, RUN_ID: run_id, STACK_DIR: str(stack_dir)},
            log=self._log,
            answer=self._answer,
            cpus=cpus,
            run_id=run_id,
            on_status=lambda *_: None,
        )
        return self._child

    async def folder(self, on_change: Callable[[str, str], None]) -> str:
        """Raises ModelError with what the resolver said last."""
        child = self._child
        assert child is not None
        deadline, said = time.monotonic() + TIMEOUT_S, "resolving"
        on_change("starting", said)
        while not await child.wait(0.5):
            if time.monotonic() > deadline:
                child.signal(signal.SIGKILL)
            if (line := last_line(self._log)) and line != said:
                said = line
                on_change("starting", said)
        code, folder = child.exited.result(), last_line(self._answer)
        if code != 0 or not folder:
            cause = last_line(self._log).removeprefix("error: ") or cause_of(code, self._log)
            raise ModelError(f"{cause} (log: {self._log})", help=f"pdctl logs -n {self._log.parents[1].name} model")
        on_change("ready", folder)
        return folder
