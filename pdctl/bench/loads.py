"""What is sent, and when. Equal seeds give equal loads, so every mode of a round gets the same one.

Prompts are random token ids: the length is exact whatever the tokenizer, and nothing is in a prefix cache by chance.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random

from pdctl.bench.traces import MOONCAKE_BLOCK, Recorded

VOCAB = 30_000  # ids below that are plain text in every vocabulary that is in use


@dataclass(slots=True)
class Item:
    """One request. `at` is its moment in an open loop; `then` are the later turns of a conversation."""

    prompt: list[int]
    output: int
    at: float = 0.0
    then: list[list[int]] = field(default_factory=list)  # what the user adds in each further turn


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens. `shared` is the share of the prompt that all requests of a load have in common. Of a `mix`
    every run of so many requests has each of its lengths once, in an order of its own; `prompt` is their mean."""

    prompt: int
    output: int
    shared: float = 0.0
    turns: int = 1
    vocab: int = VOCAB
    mix: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        return max((self.prompt, *self.mix))

    def __str__(self) -> str:
        return f"{name_of(self.prompt, self.mix)}/{self.output}"


@dataclass(frozen=True, slots=True)
class Loop:
    """Closed with `concurrency`, or open at `rate` (burst: coefficient of variation of the gaps, 1 = Poisson)."""

    concurrency: int = 0
    rate: float = 0.0
    burst: float = 1.0
    trace: Path | None = None

    @property
    def is_open(self) -> bool:
        return not self.concurrency

    @property
    def first_wave(self) -> int:
        """Requests of a closed loop that are not counted: all users start at once, which no later ones do. One alone
        has nobody to start with."""
        return self.concurrency if self.concurrency > 1 else 0

    def __str__(self) -> str:
        if self.concurrency:
            return f"c={self.concurrency}"
        kind = f" {self.trace.name}" if self.trace else (f" cv {self.burst:g}" if self.burst != 1 else "")
        return f"{self.rate:g}/s{kind}" if self.rate else kind.strip()


def ids(random: Random, count: int, vocab: int = VOCAB) -> list[int]:
    """Special tokens stand first in a vocabulary: they are left out."""
    return random.choices(range(min(1000, vocab // 4), vocab), k=count)


def name_of(prompt: int, mix: Sequence[int]) -> str:
    """Of a load's prompts: 512, or 128x4+1024 for a mix."""
    counts = Counter(mix)
    return "+".join(f"{n}x{count}" if count > 1 else str(n) for n, count in counts.items()) or str(prompt)


def drawn(prompt: int, mix: Sequence[int], random: Random) -> Iterator[int]:
    """Lengths of prompts, without end."""
    while True:
        yield from random.sample(mix, len(mix)) if mix else (prompt,)


def items(shape: Shape, loop: Loop, count: int, seed: int) -> list[Item]:
    return list(islice(endless(shape, loop, seed), count))


def endless(shape: Shape, loop: Loop, seed: int) -> Iterator[Item]:
    random = Random(seed)
    common = ids(random, round(shape.prompt * shape.shared), shape.vocab)
    lengths = drawn(shape.prompt, shape.mix, random)
    at = 0.0
    for length in lengths:
        prompt = common + ids(random, max(1, length - len(common)), shape.vocab)
        then = [ids(random, shape.prompt, shape.vocab) for _ in range(shape.turns - 1)]
        if loop.rate:
            at += _gap(random, loop)
        yield Item(prompt[:length], shape.output, at, then)


def _gap(random: Random, loop: Loop) -> float:
    form = loop.burst**-2
    return random.gammavariate(form, 1 / (loop.rate * form))


def from_trace(trace: Sequence[Recorded], rate: float, max_len: int, seed: int, vocab: int = VOCAB) -> list[Item]:
    """The recorded lengths and gaps; with a rate, faster or slower. What exceeds `max_len` is cut, prompt first."""
    random, out = Random(seed), []
    span = trace[-1].at
    factor = (len(trace) - 1) / (rate * span) if rate and span else 1.0
    for r in trace:
        output = min(r.output, max_len // 2) if max_len else r.output
        length = min(r.prompt, max_len - output) if max_len else r.prompt
        out.append(Item(_with_prefix(random, r, length, seed, vocab), output, r.at * factor))
    return out


def _with_prefix(random: Random, recorded: Recorded, length: int, seed: int, vocab: int) -> list[int]:
    """Blocks of one name hold the same tokens: a prefix cache finds what it found when this was recorded."""
    tokens: list[int] = []
    for name in recorded.prefix:
        if len(tokens) >= length:
            break
        tokens += ids(Random(seed * 1_000_003 + name), MOONCAKE_BLOCK, vocab)
    return (tokens + ids(random, max(0, length - len(tokens)), vocab))[:length]
