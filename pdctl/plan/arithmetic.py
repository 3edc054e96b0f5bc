"""Rates, before any queue: what each kind of worker can serve, and which ratio wastes neither.

The check that everything else must agree with. P = 40,000 prompt tokens/s, D = 8,000 output tokens/s, prompt 2,000,
output 800: a prefill worker serves 40,000 / 2,000 = 20 requests/s, a decode worker 8,000 / 800 = 10. Two decode workers
keep up with one prefill worker: **1 : 2**. (P / D = 5 compares tokens with tokens; but a request has 2.5 times as many
prompt tokens as output tokens, and what has to match is requests.)
"""

from dataclasses import dataclass
from fractions import Fraction

from pdctl.plan.stages import Stages


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests/s that one device serves, in each role, with no time lost to waiting."""

    prefill: float
    decode: float

    @property
    def colocated(self) -> float:
        """One device doing both, one after the other: the times of a request add up."""
        return 1 / (1 / self.prefill + 1 / self.decode)

    def split(self, num_prefill: int, num_decode: int) -> float:
        return min(num_prefill * self.prefill, num_decode * self.decode)

    def per_device(self, num_prefill: int, num_decode: int) -> float:
        return self.split(num_prefill, num_decode) / (num_prefill + num_decode)


@dataclass(frozen=True, slots=True)
class Ratio:
    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


def rates_from_tokens(prompt: int, output: int, prefill_tok_s: float, decode_tok_s: float) -> Rates:
    return Rates(prefill_tok_s / prompt, decode_tok_s / output)


def rates(stages: Stages, prompt: int, output: int) -> Rates:
    """From a stage model: decode at the full batch, at the context halfway through an answer."""
    step = stages.decode.decode_s(stages.max_batch, prompt + output / 2)
    return Rates(1 / stages.prefill.prefill_s(prompt, stages.chunk_tokens), stages.max_batch / (step * output))


def best_ratio(rates: Rates, max_devices: int = 16) -> Ratio:
    """The most requests/s for each device; of equals the smallest."""
    pairs = [(p, n - p) for n in range(2, max_devices + 1) for p in range(1, n)]
    # Rounded so that 1:2 and 2:4, equal but for the last bit, count as equal: the smaller one comes first.
    return Ratio(*max(pairs, key=lambda pair: (round(rates.per_device(*pair), 9), -sum(pair))))


def exact_ratio(rates: Rates) -> Fraction:
    """Decode workers to one prefill worker."""
    return Fraction(rates.prefill / rates.decode).limit_denominator(64)
