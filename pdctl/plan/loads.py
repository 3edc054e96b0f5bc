"""Loads to simulate: when requests come and how long they are. A closed loop's come when an earlier one ends."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random


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

    @property
    def has_prefixes(self) -> bool:
        return self.shared > 0 or self.turns > 1

    def arrival(self, at: float, random: Random) -> Arrival:
        prefix = ((1, round(self.prompt * self.shared)),) if self.shared else ()
        return Arrival(at, *self.draw(random), prefix, (self.prompt,) * (self.turns - 1))

    def draw(self, random: Random) -> tuple[int, int]:
        if not self.spread:
            return self.prompt, self.output
        return self._one(random, self.prompt), self._one(random, self.output)

    def _one(self, random: Random, mean: int) -> int:
        shape = self.spread**-2
        return max(1, round(random.gammavariate(shape, mean / shape)))


def poisson(rate: float, count: int, lengths: Lengths, seed: int = 1, burst: float = 1.0) -> Iterator[Arrival]:
    """`burst` is the coefficient of variation of the gaps between arrivals: 1 is Poisson, above it comes in bursts."""
    random, at = Random(seed), 0.0
    shape = burst**-2
    for _ in range(count):
        at += random.gammavariate(shape, 1 / (rate * shape)) if burst != 1.0 else random.expovariate(rate)
        yield lengths.arrival(at, random)


def closed(count: int, lengths: Lengths, seed: int = 1) -> Iterator[Arrival]:
    """For Cluster.run(concurrency=n): `at` is not looked at."""
    random = Random(seed)
    for _ in range(count):
        yield lengths.arrival(0.0, random)


def scaled(trace: list[Arrival], rate: float) -> list[Arrival]:
    """The same requests, faster or slower, so that `rate` of them come a second on average."""
    span = trace[-1].at - trace[0].at
    factor = (len(trace) - 1) / (rate * span) if span else 0.0
    return [replace(a, at=(a.at - trace[0].at) * factor) for a in trace]
