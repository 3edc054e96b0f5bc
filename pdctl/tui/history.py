"""The last minutes as points: what sparklines and charts read. Counters become rates between two frames here."""

import math
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from pdctl.tui.frame import Frame

KEPT = 7200
# Frames come once a second, the older ones every five: a shorter gap than this is none.
BRIDGE_S = 6.0


class Point(msgspec.Struct, frozen=True):
    at: float
    req_s: float | None
    prefill_s: float | None
    output_s: float | None
    kv_bytes_s: float | None
    queue: int
    ttft95: float | None
    itl95: float | None
    transfer95: float | None
    kv: dict[str, float]  # by worker
    totals: dict[str, float]


def point(frame: Frame, before: Point | None) -> Point:
    totals = {str(name): float(value) for name, value in (frame.stats.get("totals") or {}).items()}

    def rate(name: str) -> float | None:
        if before is None or name not in totals or name not in before.totals or frame.at <= before.at:
            return None
        # A restarted router counts from 0 again.
        return max(0.0, totals[name] - before.totals[name]) / (frame.at - before.at)

    return Point(
        at=frame.at,
        req_s=rate("requests"),
        prefill_s=rate("prefill_tokens"),
        output_s=rate("output_tokens"),
        kv_bytes_s=rate("kv_bytes"),
        queue=frame.router.queue,
        ttft95=frame.figures("ttft").p95,
        itl95=frame.figures("itl").p95,
        transfer95=frame.figures("transfer").p95,
        kv={worker.name: worker.kv for worker in frame.workers if worker.kv is not None},
        totals=totals,
    )


class History:
    """Points of the last two hours, oldest first."""

    def __init__(self, points: Iterable[Point] = ()) -> None:
        self.points: deque[Point] = deque(points, maxlen=KEPT)
        self.end: float | None = None  # where charts end; None: at the newest point

    def add(self, frame: Frame) -> None:
        before = self.points[-1] if self.points else None
        if before is None or frame.at > before.at:
            self.points.append(point(frame, before))

    @property
    def newest(self) -> float:
        return self.end if self.end is not None else self.points[-1].at if self.points else 0.0

    def last(self, seconds: float, count: int, read: Callable[[Point], float | None]) -> list[float | None]:
        """`count` values over the last `seconds`, each the highest of its share of the time: a spike stays visible."""
        if not self.points or count <= 0:
            return []
        end, step = self.newest, seconds / count
        buckets: list[float | None] = [None] * count
        for item in reversed(self.points):
            age = end - item.at
            if age >= seconds:
                break
            if age < 0:
                continue
            index, value = count - 1 - int(age / step), read(item)
            old = buckets[index]
            if value is not None and (old is None or value > old):
                buckets[index] = value
        return _bridged(buckets, math.ceil(BRIDGE_S / step))


def _bridged(values: list[float | None], most: int) -> list[float | None]:
    """Fills gaps of less than `most` with the value before them."""
    filled = list(values)
    for index in range(1, len(values)):
        if values[index] is None and any(value is not None for value in values[index : index + most]):
            filled[index] = filled[index - 1]
    return filled
