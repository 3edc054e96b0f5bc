"""Numbers from samples: percentiles, and how far to trust a mean.

Confidence intervals are percentile bootstraps (Efron, 1979) over requests, resampled within each round so that a drift
between rounds widens nothing; 1,000 resamples with a fixed seed. Rounds too small to show their own spread are taken
together. Every percentile is the nearest rank above.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

RESAMPLES = 1000
SMALL = 5


def quantile(values: Sequence[float], q: float) -> float:
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-q * len(ordered) // 1) - 1))]


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one quantity, in ms. `low` and `high` bound the mean with 95 %."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()}


def spread(rounds: Sequence[Sequence[float]]) -> Spread:
    """Of seconds, by round."""
    values = [v * 1e3 for r in rounds for v in r]
    if not values:
        return Spread(0, 0, 0, 0, 0, 0, 0)
    low, high = interval([[v * 1e3 for v in r] for r in rounds if r])
    p50, p95, p99 = (quantile(values, q) for q in (0.5, 0.95, 0.99))
    return Spread(fmean(values), p50, p95, p99, max(values), low, high)


def interval(rounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % of the mean over all rounds."""
    means = _resampled(rounds)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def change(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """(share by which the mean of `after` is above that of `before`, and its 95 % interval)."""
    a, b = _resampled(before), _resampled(after, seed=2)
    low, high = np.percentile(b / a - 1, [2.5, 97.5])
    flat = [fmean([v for r in rounds for v in r]) for rounds in (before, after)]
    return flat[1] / flat[0] - 1, float(low), float(high)


def _resampled(rounds: Sequence[Sequence[float]], seed: int = 1) -> Any:
    if min(map(len, rounds)) < SMALL:
        rounds = [[v for r in rounds for v in r]]
    random = np.random.default_rng(seed)
    sums, count = np.zeros(RESAMPLES), 0
    for values in rounds:
        drawn = random.choice(np.asarray(values, dtype=float), (RESAMPLES, len(values)))
        sums += drawn.sum(axis=1)
        count += len(values)
    return sums / max(1, count)


def cdf(values: Sequence[float], points: int = 60) -> list[tuple[float, float]]:
    """(value, share of values up to it), at most so many points; the tail keeps its steps."""
    ordered = sorted(values)
    if not ordered:
        return []
    shares = [i / points for i in range(1, points)] + [0.99, 0.995, 0.999, 1.0]
    return [(round(quantile(ordered, s), 3), round(s, 4)) for s in shares]
