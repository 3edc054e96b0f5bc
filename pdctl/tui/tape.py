"""Moments to go back to: the last ten minutes of a live stack, or the whole of a recorded file."""

from collections import deque

import msgspec

from pdctl.samples import Samples
from pdctl.snapshot import Snapshot

KEPT = 600
LINES = 100  # of the log in each moment; the newest has them all
MAX_BEFORE = 240


class Tape:
    """`hold` freezes it, so that a moment keeps its place while new ones come in."""

    def __init__(self, samples: Samples | None = None) -> None:
        self._samples = samples
        self._live: deque[Snapshot] = deque(maxlen=KEPT)
        self._held: list[Snapshot] | None = None
        self.current: Snapshot | None = None
        self.position = 0

    def add(self, snapshot: Snapshot) -> None:
        if self._samples is None:
            self._live.append(msgspec.structs.replace(snapshot, logs=snapshot.logs[-LINES:]))
        if self._held is None:
            self.current = snapshot

    @property
    def count(self) -> int:
        return len(self._samples.times) if self._samples else len(self._held or self._live)

    @property
    def back(self) -> int:
        """How many moments before the newest."""
        return max(0, self.count - 1 - self.position)

    def hold(self, position: int | None = None) -> None:
        self._held = list(self._live)
        self.position = self.count - 1 if position is None else position

    def release(self) -> None:
        self._held = None

    def seek(self, back: int) -> Snapshot | None:
        """The moment `back` before the newest, as near as there is one."""
        if not self.count:
            return None
        self.position = min(max(0, self.count - 1 - back), self.count - 1)
        self.current = self._at(self.position)
        return self.current

    def before(self, seconds: float) -> list[Snapshot]:
        """Up to the current moment, thinned out: enough to draw a chart of that time."""
        if self.current is None:
            return []
        first = self.position
        while first > 0 and self.current.at - self._time(first - 1) <= seconds:
            first -= 1
        step = max(1, (self.position - first) // MAX_BEFORE)
        return [self._at(index) for index in range(first, self.position + 1, step)]

    def _at(self, index: int) -> Snapshot:
        if self._samples is not None:
            return self._samples.read(index)
        return (self._held or list(self._live))[index]

    def _time(self, index: int) -> float:
        return self._samples.times[index] if self._samples is not None else self._at(index).at
