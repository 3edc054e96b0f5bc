"""From samples to a result: one cell is one mode under one load, all its rounds together."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from pdctl.bench.driver import Run
from pdctl.bench.gauges import Gauges
from pdctl.bench.loads import Loop, Shape
from pdctl.bench.sample import Sample
from pdctl.bench.stats import cdf, quantile, spread

STAGES = (
    "queue_ms",
    "grant_wait_ms",
    "prefill_start_ms",
    "prefill_end_ms",
    "first_token_ms",
    "kv_ready_ms",
    "second_token_ms",
)
TRANSFER_ADVICE = 1 / 3


@dataclass(frozen=True, slots=True)
class Key:
    """What two modes are compared at."""

    shape: Shape
    loop: Loop

    def __str__(self) -> str:
        return f"{self.shape} {self.loop}"


@dataclass(slots=True)
class Cell:
    mode: str
    key: Key
    runs: list[Run] = field(default_factory=list)
    gauges: list[Gauges] = field(default_factory=list)
    is_fitted: bool = False

    @property
    def good(self) -> list[list[Sample]]:
        """By round."""
        return [[s for s in run.samples if s.is_good] for run in self.runs]

    @property
    def flat(self) -> list[Sample]:
        return [s for samples in self.good for s in samples]

    def ttfts(self) -> list[list[float]]:
        return [[s.ttft for s in samples] for samples in self.good]

    def tpots(self) -> list[list[float]]:
        return [[t for s in samples if (t := s.tpot) is not None] for samples in self.good]

    def gaps(self) -> list[list[float]]:
        """Without the hand-over gap, which is reported as second_token."""
        return [[g for s in samples for g in s.gaps[1:]] for samples in self.good]

    def seconds_tokens(self) -> list[list[float]]:
        return [[s.gaps[0] for s in samples if s.gaps] for samples in self.good]

    def errors(self) -> list[str]:
        return [s.error or "no token" for run in self.runs for s in run.samples if not s.is_good]

    def attained(self, ttft_s: float, tpot_s: float) -> float:
        """Share of all requests, failed ones included."""
        count = sum(len(run.samples) for run in self.runs)
        return sum(s.ttft <= ttft_s and (s.tpot or 0.0) <= tpot_s for s in self.flat) / max(1, count)

    def rate(self) -> float:
        return sum(run.num_done for run in self.runs) / max(1e-9, sum(run.seconds for run in self.runs))


def to_json(cell: Cell, ttft_s: float, tpot_s: float) -> dict[str, Any]:
    flat, rate = cell.flat, cell.rate()
    key, attained = cell.key, cell.attained(ttft_s, tpot_s)
    errors = cell.errors()
    prompt = fmean(s.prompt_tokens for s in flat) if flat else 0.0
    output = fmean(s.output_tokens for s in flat) if flat else 0.0
    ttft = spread(cell.ttfts())
    return {
        "mode": cell.mode,
        "prompt": key.shape.prompt,
        "mix": key.shape.mix,
        "output": key.shape.output,
        "shared": key.shape.shared,
        "turns": key.shape.turns,
        "concurrency": key.loop.concurrency,
        "rate": key.loop.rate,
        "burst": key.loop.burst,
        "trace": key.loop.trace.name if key.loop.trace else None,
        "rounds": len(cell.runs),
        "requests": len(flat),
        "dropped": sum(run.dropped for run in cell.runs),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "prompt_tokens": round(prompt, 2),
        "output_tokens": round(output, 2),
        "ttft_ms": ttft.to_json(),
        "ttft_by_round_ms": [round(1e3 * fmean(r), 2) for r in cell.ttfts() if r],
        "tpot_ms": spread(cell.tpots()).to_json(),
        "itl_ms": spread(cell.gaps()).to_json(),
        "second_token_ms": spread(cell.seconds_tokens()).to_json(),
        "requests_s": round(rate, 4),
        "output_tok_s": round(rate * output, 2),
        "attained": round(attained, 4),
        "goodput": round(rate * attained, 4),
        "sent_late_ms": round(1e3 * quantile([lag for run in cell.runs for lag in run.lags], 0.99), 3),
        "utilisation": _utilisation(cell.gauges),
        "paths": paths(flat),
        "transfer": transfer(flat, ttft.mean),
        "stages_ms": _stages(flat),
        "ttft_cdf": cdf([1e3 * t for r in cell.ttfts() for t in r]),
        "itl_cdf": cdf([1e3 * g for r in cell.gaps() for g in r]),
        "timeline": cell.gauges[-1].timeline() if cell.gauges else [],
        "fitted": cell.is_fitted,
    }


def transfer(samples: Sequence[Sample], ttft_ms: float) -> dict[str, Any] | None:
    """KV transfer apart: from the first chunk to the last (`mean_ms`, mostly behind prefill), and what of it was left
    when the prompt had been read (`exposed_ms`), which is what somebody waits for; its share is against TTFT."""
    crossed = [s.record for s in samples if s.record.get("transfer_ms") is not None]
    if not crossed:
        return None
    times = [float(r["transfer_ms"]) for r in crossed]
    left = [
        max(0.0, r["kv_ready_ms"] - r["prefill_end_ms"])
        for r in crossed
        if r.get("kv_ready_ms") is not None and r.get("prefill_end_ms") is not None
    ]
    return {
        "requests": len(crossed),
        "mean_ms": round(fmean(times), 3),
        "p99_ms": round(quantile(times, 0.99), 3),
        "exposed_ms": round(fmean(left), 3) if left else None,
        "kv_bytes": round(fmean(r.get("kv_bytes") or 0 for r in crossed)),
        "share_of_ttft": round(fmean(left) / ttft_ms, 4) if ttft_ms and left else 0.0,
    }


def paths(samples: Sequence[Sample]) -> dict[str, float]:
    """Share of the requests on each path, where the server tells: pd, resident, or the role of the worker that did it
    all."""
    seen = Counter(_path(s.record) for s in samples if s.record.get("path"))
    return {path: round(count / seen.total(), 4) for path, count in seen.most_common()}


def _path(record: dict[str, Any]) -> str:
    path, worker = str(record["path"]), str(record.get("decode") or "")
    return path if path != "colocated" else worker.rpartition("-")[0] or path


def _stages(samples: Sequence[Sample]) -> dict[str, float]:
    """Median moment of each stage, ms from arrival."""
    out = {}
    for name in STAGES:
        seen = [float(s.record[name]) for s in samples if s.record.get(name) is not None]
        if seen:
            out[name] = round(median(seen), 3)
    return out


def _utilisation(gauges: Sequence[Gauges]) -> dict[str, float]:
    roles = {role for g in gauges for role in g.busy()}
    return {role: round(fmean(g.busy()[role] for g in gauges if role in g.busy()), 3) for role in sorted(roles)}
