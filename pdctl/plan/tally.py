"""What a simulation counts, in little memory: three floats a request and one histogram of gaps."""

import math
from array import array
from dataclasses import dataclass
from statistics import fmean

_BUCKETS_PER_E = 32  # buckets 3 % wide
_LOWEST = -14 * _BUCKETS_PER_E  # e^-14 s, below a microsecond


class Gaps:
    """A histogram of inter-token times in buckets 3 % wide."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._last = (0.0, _LOWEST)  # a time and its bucket: those of one step are mostly equal
        self.max = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        last, bucket = self._last
        if seconds != last:
            bucket = int(math.log(seconds) * _BUCKETS_PER_E) if seconds > 1e-6 else _LOWEST
            self._last = seconds, bucket
        self._counts[bucket] = self._counts.get(bucket, 0) + count
        if seconds > self.max:
            self.max = seconds

    def quantile(self, q: float) -> float:
        total, seen = sum(self._counts.values()), 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= q * total:
                return min(self.max, math.exp(bucket / _BUCKETS_PER_E))
        return 0.0


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_s: float = math.inf
    tpot_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Summary:
    """Times in seconds. `attained` is the share of requests that met both objectives."""

    num_requests: int
    seconds: float
    requests_s: float
    output_tok_s: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    tpot_mean: float
    tpot_p99: float
    itl_p50: float
    itl_p99: float
    itl_max: float
    transfer_mean: float
    attained: float
    goodput: float
    utilisation: dict[str, float]
    num_refused: int = 0  # 429
    most_waiting: int = 0  # for a first token, at once: router.queue_high has to be above it


class Tally:
    """Requests that finished, as `pdctl bench` counts them: rates are of all that end between the last end of the
    warm-up, or the first arrival, and the last end of what counts."""

    def __init__(self, slo: Slo | None = None) -> None:
        self.slo = slo or Slo()
        self.ttft, self.tpot, self.e2e, self.transfer = array("d"), array("d"), array("d"), array("f")
        self.gaps = Gaps()
        self.num_tokens = 0
        self.num_attained = 0
        self.num_refused = 0
        self._since = math.inf  # first arrival
        self._warm = -math.inf  # last end of the warm-up
        self._ends = array("d")
        self._until = 0.0

    @property
    def num_missed(self) -> int:
        return len(self.ttft) - self.num_attained + self.num_refused

    def refuse(self) -> None:
        """One that got 429: it has no times, and missed."""
        self.num_refused += 1

    def pass_by(self, last: float, is_warm_up: bool) -> None:
        """One that does not count, but for the rate."""
        self._ends.append(last)
        if is_warm_up:
            self._warm = last

    def add(self, arrival: float, first: float, last: float, num_output: int, transfer_s: float = 0.0) -> None:
        self._since = min(self._since, arrival)
        self._until = last
        self._ends.append(last)
        ttft = first - arrival
        tpot = (last - first) / (num_output - 1) if num_output > 1 else 0.0
        self.ttft.append(ttft)
        self.tpot.append(tpot)
        self.e2e.append(last - arrival)
        self.transfer.append(transfer_s)
        self.num_tokens += num_output
        self.num_attained += ttft <= self.slo.ttft_s and tpot <= self.slo.tpot_s

    def summary(self, utilisation: dict[str, float], most_waiting: int = 0) -> Summary:
        count = len(self.ttft)
        since = self._warm if self._warm > -math.inf else self._since
        seconds = max(1e-9, self._until - since)
        ttft, tpot = sorted(self.ttft), sorted(self.tpot)
        rate = sum(since < end <= self._until for end in self._ends) / seconds
        attained = self.num_attained / max(1, count + self.num_refused)
        return Summary(
            num_requests=count,
            seconds=seconds,
            requests_s=rate,
            output_tok_s=rate * self.num_tokens / max(1, count),
            ttft_mean=fmean(ttft) if ttft else 0.0,
            ttft_p50=_at(ttft, 0.5),
            ttft_p99=_at(ttft, 0.99),
            tpot_mean=fmean(tpot) if tpot else 0.0,
            tpot_p99=_at(tpot, 0.99),
            itl_p50=self.gaps.quantile(0.5),
            itl_p99=self.gaps.quantile(0.99),
            itl_max=self.gaps.max,
            transfer_mean=fmean(self.transfer) if self.transfer else 0.0,
            attained=attained,
            goodput=rate * self.num_attained / max(1, count),
            utilisation=utilisation,
            num_refused=self.num_refused,
            most_waiting=most_waiting,
        )


def _at(ordered: list[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0
