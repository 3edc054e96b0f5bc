"""When a process that ended is started again. Pure: no clock of its own, no process."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True)
class RestartPolicy:
    """Doubles the wait from `low_s` to `high_s`; gives up after `max_restarts` in a row.

    A row ends when the process was ready for longer than `high_s`: what works that long is not in a crash loop.
    """

    restart: Literal["no", "on-failure", "always"]
    max_restarts: int
    low_s: float
    high_s: float
    in_a_row: int = field(default=0, init=False)

    def after_exit(self, *, is_clean: bool, ready_for_s: float) -> float | None:
        """Seconds to wait before the next start; None: leave it dead."""
        if self.restart == "no" or (self.restart == "on-failure" and is_clean):
            return None
        if ready_for_s > self.high_s:
            self.in_a_row = 0
        if self.in_a_row >= self.max_restarts:
            return None
        delay = min(self.high_s, self.low_s * 2.0**self.in_a_row)
        self.in_a_row += 1
        return delay

    def reset(self) -> None:
        """Somebody asked for a restart: what was before does not count."""
        self.in_a_row = 0
