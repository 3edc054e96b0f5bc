"""Loads to simulate: when requests come and how long they are. A closed loop's come when an earlier one ends."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from random import Random

from pdctl.bench.loads import drawn


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    prompt: int
    output: int
    prefix: tuple[tuple[int, int], ...] = ()  # (name, tokens) of its leading parts: equal names, equal tokens
    then: tuple[int, ...] = ()  # closed loops: what its user adds in each further turn of a conversation


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and output tokens; `spread` is the coefficient of variation of both (gamma distributed). `shared` is the
    share of the prompt that all have in common, `turns` those of a conversation."""

    prompt: int
    output: int
    spread: float = 0.0
    shared: float = 0.0
    turns: int = 1
    mix: tuple[int, ...] = ()  # of prompts, as `bench.loads.Shape` has it

    @property
    def has_prefixes(self) -> bool:
        return self.shared > 0 or self.turns > 1

    def arrivals(self, moments: Iterable[float], random: Random) -> Iterator[Arrival]:
        prefix = ((1, round(self.prompt * self.shared)),) if self.shared else ()
        prompts = drawn(self.prompt, self.mix, random)
        for at, prompt in zip(moments, prompts, strict=False):
            output = self.output
            if self.spread:
                prompt, output = self._one(random, self.prompt), self._one(random, self.output)
            yield Arrival(at, prompt, output, prefix, (self.prompt,) * (self.turns - 1))

    def _one(self, random: Random, mean: int) -> int:
        shape = self.spread**-2
        return max(1, round(random.gammavariate(shape, mean / shape)))


def poisson(rate: float, count: int, lengths: Lengths, seed: int = 1, burst: float = 1.0) -> Iterator[Arrival]:
    """`burst` is the coefficient of variation of the gaps between arrivals: 1 is Poisson, above it comes in bursts."""
    random = Random(seed)
    shape = burst**-2

    def moments() -> Iterator[float]:
        at = 0.0
        for _ in range(count):
            at += random.gammavariate(shape, 1 / (rate * shape)) if burst != 1.0 else random.expovariate(rate)
            yield at

    return lengths.arrivals(moments(), random)


def closed(count: int, lengths: Lengths, seed: int = 1) -> Iterator[Arrival]:
    """For Cluster.run(concurrency=n): `at` is not looked at."""
    return lengths.arrivals(repeat(0.0, count), Random(seed))


def scaled(trace: list[Arrival], rate: float) -> list[Arrival]:
    """The same requests, faster or slower, so that `rate` of them come a second on average."""
    span = trace[-1].at - trace[0].at
    factor = (len(trace) - 1) / (rate * span) if span else 0.0
    return [replace(a, at=(a.at - trace[0].at) * factor) for a in trace]
