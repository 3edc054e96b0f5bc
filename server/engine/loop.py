"""The engine's thread: steps while there is work, sleeps while there is none, and never dies of one step."""

import logging
import threading
from collections.abc import Callable

from server.engine.engine import Engine, StepResult

IDLE_S = 0.5  # a missed wake-up costs no more than this
JOIN_S = 10.0

logger = logging.getLogger(__name__)


class EngineThread:
    """`on_step(result)` runs on this thread, right after each step."""

    def __init__(self, engine: Engine, on_step: Callable[[StepResult], None]) -> None:
        self._engine = engine
        self._on_step = on_step
        self._work = threading.Event()
        self._stopping = threading.Event()
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There may be something to compute. From any thread."""
        self._work.set()

    def stop(self) -> None:
        """Lets the running step end, and the one launched behind it."""
        self._stopping.set()
        self._work.set()
        self._thread.join(timeout=JOIN_S)

    @property
    def busy_s(self) -> float:
        """Seconds spent in steps so far, the one under way among them: one that lasts long must not show as idle."""
        return self._busy_s + self._engine.step_age_s

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._work.clear()  # before the look, so that what arrives after it is not slept over
            try:
                result = self._engine.step()
                if result is not None:
                    self._busy_s += result.seconds
                    self._on_step(result)
            except Exception:
                # The engine fails the sequences of a batch by itself; this is the scheduler, and a bug. Going on in a
                # tight loop would hide it and burn the core.
                logger.exception("engine step")
                self._stopping.wait(1.0)
                continue
            if result is None:
                self._work.wait(IDLE_S)
        self._engine.settle()  # the next role of this process has the same pool
