"""What a server says about itself while a load runs: each pool's busy share, queues and blocks, from /metrics.

Other servers have other names for these: then there is nothing, and the report says so by leaving it out.
"""

import asyncio
import re
import time
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

INTERVAL_S = 0.5
_LINE = re.compile(
    r"^pdctl_worker_(busy_share|waiting|running|blocks_used|blocks_granted|blocks_total)\{([^}]*)\} (\S+)"
)
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Point = dict[tuple[str, str], float]  # (role, gauge): sum over the role's workers


@dataclass(slots=True)
class Gauges:
    points: list[tuple[float, Point]] = field(default_factory=list)
    workers: dict[str, int] = field(default_factory=dict)

    def busy(self) -> dict[str, float]:
        """Mean busy share of each role's workers."""
        seen: dict[str, list[float]] = defaultdict(list)
        for _, point in self.points:
            for (role, gauge), value in point.items():
                if gauge == "busy_share":
                    seen[role].append(value / max(1, self.workers[role]))
        return {role: fmean(values) for role, values in seen.items()}

    def timeline(self) -> list[dict[str, Any]]:
        """For the report: seconds, then role.gauge."""
        start = self.points[0][0] if self.points else 0.0
        return [
            {"t": round(at - start, 2), **{f"{role}.{gauge}": round(v, 3) for (role, gauge), v in point.items()}}
            for at, point in self.points
        ]


def parse(text: str) -> tuple[Point, dict[str, int]]:
    point: Point = defaultdict(float)
    workers: dict[str, set[str]] = defaultdict(set)
    for line in text.splitlines():
        if (match := _LINE.match(line)) is not None:
            labels = dict(_LABEL.findall(match[2]))
            role = labels.get("role", "")
            point[role, match[1]] += float(match[3])
            workers[role].add(labels.get("worker", ""))
    return dict(point), {role: len(names) for role, names in workers.items()}


async def watch(url: str, key: str, gauges: Gauges) -> None:
    """Until cancelled. A server without /metrics is asked once."""
    while True:
        text = await asyncio.to_thread(_get, url.removesuffix("/v1") + "/metrics", key)
        point, workers = parse(text)
        if not point:
            return
        gauges.points.append((time.perf_counter(), point))
        gauges.workers |= workers
        await asyncio.sleep(INTERVAL_S)


def _get(url: str, key: str) -> str:
    request = Request(url, headers={"Authorization": f"Bearer {key}"})  # noqa: S310  # checked: http or https
    try:
        with urlopen(request, timeout=2) as answer:  # noqa: S310
            return str(answer.read().decode())
    except (URLError, OSError, ValueError):
        return ""
