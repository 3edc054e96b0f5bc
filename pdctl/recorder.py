"""The supervisor's memory: once a second what supervisor and router say, for two hours, in history.db.

A thread, for SQLite and HTTP block; it must never hold up the loop that watches processes, nor end it.
"""

import logging
import sqlite3
import threading

import msgspec

from pdctl.rundir import StackDir
from pdctl.samples import Writer
from pdctl.snapshot import LogTail, Reader
from server.errors import PdctlError

EVERY_S = 1.0
# Of the log: what a replayed moment shows beside its figures.
NUM_LINES = 40
NUM_REQUESTS = 20
logger = logging.getLogger("pdctl.supervisor")


class Recorder:
    """`start` it once the control socket is there; `stop` waits no longer than a reading takes."""

    def __init__(self, stack_dir: StackDir, every_s: float = EVERY_S) -> None:
        self._dir = stack_dir
        self._every_s = every_s
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 0.5) -> None:
        """A reading that hangs is left behind: the thread is a daemon."""
        self._ends.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            writer = Writer(self._dir.history)
        except (OSError, sqlite3.Error) as error:
            logger.warning("no history is kept: %s", error)
            return
        reader, tail = Reader(self._dir), LogTail(self._dir, NUM_LINES)
        last_problem = ""
        while not self._ends.wait(self._every_s):
            try:
                self._sample(writer, reader, tail)
                last_problem = ""
            except PdctlError:
                continue  # starting or stopping: there is nothing to remember yet, or any more
            except (OSError, sqlite3.Error, msgspec.MsgspecError) as error:
                if str(error) != last_problem:
                    logger.warning("a sample was not kept: %s", error)
                last_problem = str(error)
        writer.close()
        tail.close()

    def _sample(self, writer: Writer, reader: Reader, tail: LogTail) -> None:
        snapshot = reader.read()
        writer.add(msgspec.structs.replace(snapshot, logs=tail.read(), requests=snapshot.requests[:NUM_REQUESTS]))
