"""Which layout serves the most at the objectives: the highest rate at which nine of ten requests meet them.

By bisection; the rates without queues bound it from above. Every probe is a simulation with a fixed seed: two layouts
see the same arrivals. A probe ends as soon as too many requests have missed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pdctl.plan.arithmetic import Rates, Ratio, best_ratio, rates
from pdctl.plan.loads import Arrival, Lengths, poisson, scaled
from pdctl.plan.sim import Cluster, Layout, Sizes
from pdctl.plan.stages import Stages
from pdctl.plan.tally import Slo, Summary

ATTAINED = 0.9
WARM_UP = 0.15


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the stack: lengths, or a trace whose rate is scaled; and the rate to carry, if any."""

    lengths: Lengths
    rate: float = 0.0
    trace: tuple[Arrival, ...] = ()
    burst: float = 1.0

    @property
    def has_prefixes(self) -> bool:
        return self.lengths.has_prefixes or any(a.prefix for a in self.trace)

    def arrivals(self, rate: float, count: int) -> list[Arrival]:
        if self.trace:
            return scaled(list(self.trace[:count]), rate)
        return list(poisson(rate, count, self.lengths, burst=self.burst))


@dataclass(frozen=True, slots=True)
class Found:
    """`rate`: requests/s with nine of ten in the objectives; `summary`: there, or at the rate asked for."""

    layout: Layout
    rate: float
    summary: Summary

    @property
    def per_device(self) -> float:
        return self.rate / self.layout.num_devices


class Search:
    def __init__(
        self, stages: Stages, load: Load, slo: Slo, sizes: Sizes, *, count: int = 400, precision: float = 0.04
    ) -> None:
        self.stages, self.load, self.slo, self.sizes = stages, load, slo, sizes
        self.rates: Rates = rates(stages, load.lengths.prompt, load.lengths.output)
        self._count, self._precision = count, precision

    def probe(self, layout: Layout, rate: float, *, stops: bool = True) -> Summary:
        skip = int(self._count * WARM_UP)
        cluster = Cluster(layout, self.stages, self.sizes, self.slo, skip)
        limit = int((self._count - skip) * (1 - ATTAINED)) + 1 if stops else 1 << 60
        return cluster.run(self.load.arrivals(rate, self._count), max_missed=limit)

    def ceiling(self, layout: Layout) -> float:
        if layout.colocated:
            return layout.colocated * self.rates.colocated
        if layout.threshold:  # some of the prompts are read by decode workers, so the sum of all devices bounds it
            return layout.num_devices * self.rates.colocated
        return self.rates.split(layout.prefill, layout.decode)

    def goodput(self, layout: Layout) -> Found:
        """Bisection between nothing and a little over the ceiling."""
        low, high = 0.0, self.ceiling(layout) * 1.15
        best: Summary | None = None
        while high - low > self._precision * high:
            rate = (low + high) / 2
            summary = self.probe(layout, rate)
            if summary.attained >= ATTAINED and self._keeps_up(summary, rate):
                low, best = rate, summary
            else:
                high = rate
            if high < 1e-3:
                break
        return Found(layout, low, best or self.probe(layout, max(low, self.ceiling(layout) * 0.02)))

    def _keeps_up(self, summary: Summary, rate: float) -> bool:
        """Without objectives a growing queue would attain everything: what leaves must be what comes."""
        return not math.isinf(self.slo.ttft_s) or summary.requests_s > 0.93 * rate

    def compare(
        self, num_devices: int, thresholds: tuple[int, ...] = (), tell: Callable[[str], None] = lambda text: None
    ) -> list[Found]:
        """All ratios of so many devices, colocated, and hybrids of the best ratio; best first."""
        found = []
        for layout in [Layout(colocated=num_devices), *self._splits(num_devices)]:
            tell(str(layout))
            found.append(self.goodput(layout))
        splits = [f for f in found if not f.layout.colocated]
        if splits:
            best = max(splits, key=lambda f: f.rate).layout
            for threshold in thresholds:
                tell(str(replace(best, threshold=threshold)))
                found.append(self.goodput(replace(best, threshold=threshold)))
        return sorted(found, key=lambda f: -f.rate)

    def _splits(self, num_devices: int) -> list[Layout]:
        """Ratios near the balanced one; with many devices the rest is hopeless and costs minutes."""
        balanced = num_devices * self.rates.decode / (self.rates.prefill + self.rates.decode)
        near = sorted(range(1, num_devices), key=lambda p: abs(p - balanced))[:7]
        return [Layout(prefill=p, decode=num_devices - p) for p in sorted(near)]

    def ratio(self) -> Ratio:
        return best_ratio(self.rates)
