"""The live knobs: which profile keys may change while a stack runs, in what range, and when a change takes hold.

A knob is a profile key, so a profile with knobs turned is a profile again (`turned`), and every process reads a changed
value where it read the first one. The router's store (`router.knobs`) checks and numbers changes; workers apply what
they are sent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from server.config import Config, Pool

Value = int | float | str  # str: "auto"
Applies = Literal["now", "next step", "next push", "drains"]


@dataclass(frozen=True, slots=True)
class Knob:
    """`low` and `high` are allowed themselves. `step`: only multiples of it."""

    name: str
    boot: Value
    low: float
    high: float
    unit: str
    applies: Applies
    help: str
    has_auto: bool = False
    is_share: bool = False
    step: int = 1

    @property
    def section(self) -> str:
        return self.name.partition(".")[0]


def knobs_of(config: Config, max_len: int) -> dict[str, Knob]:
    """By name, in the order in which people look for them; only those whose pool this stack has."""
    knobs = [_queue(config), *_prefill(config), *_transfer(config), *_decode(config), *_hybrid(config, max_len)]
    return {knob.name: knob for knob in (*knobs, *_colocated(config))}


def turned(config: Config, values: Mapping[str, Value]) -> Config:
    """`config` with these knobs set. Nothing is checked: values come from a store that has."""
    sections: dict[str, dict[str, Value]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    changed = {name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
    return config.model_copy(update=changed)


def profile_value(config: Config, name: str) -> Any:
    """What the profile says for a dotted key; raises AttributeError for a key that no profile has."""
    value: Any = config
    for key in name.split("."):
        value = getattr(value, key)
    return value


def _queue(config: Config) -> Knob:
    help = "sequences that may wait for their first token before clients get 429; n and each prompt of a list count"
    return Knob("router.queue_high", config.router.queue_high, 1, 4096, "sequences", "now", help)


def _steps(config: Config, section: str, pool: Pool) -> list[Knob]:
    size = config.model.block_size
    return [
        Knob(
            f"{section}.token_budget", pool.budget, min(64, pool.budget), pool.budget, "tokens", "next step",
            "tokens of one step",
        ),
        Knob(
            f"{section}.chunk_tokens", pool.chunk_tokens, size, pool.budget, "tokens", "next step",
            "prompt tokens of one forward", has_auto=True,
        ),
    ]  # fmt: skip


def _prefill(config: Config) -> list[Knob]:
    pool = config.prefill
    if not pool.workers:
        return []
    return [
        *_steps(config, "prefill", pool),
        Knob("prefill.max_seqs", pool.max_seqs, 1, pool.max_seqs, "prompts", "next step", "prompts computed at once"),
        Knob(
            "prefill.queue_high", pool.queue_high, 1, 4096, "prompts", "now",
            "prompts without a first token at one worker from which it counts as backlogged",
        ),
    ]  # fmt: skip


def _transfer(config: Config) -> list[Knob]:
    if not config.prefill.workers:
        return []
    # A ring slot is as large as the boot value: a larger chunk could not land.
    size, boot = config.model.block_size, config.transfer.chunk_tokens
    return [
        Knob("transfer.chunk_tokens", boot, size, boot, "tokens", "next push", "tokens of one push", step=size),
        Knob(
            "transfer.max_inflight", config.transfer.max_inflight, 1, 256, "chunks", "now",
            "chunks under way to one peer",
        ),
    ]  # fmt: skip


def _decode(config: Config) -> list[Knob]:
    pool = config.decode
    if not pool.workers:
        return []
    marks = "share of the decode pool's blocks"
    return [
        Knob("decode.kv_low", pool.kv_low, 0.05, 1, "share", "now", f"{marks}; grants go on under it", is_share=True),
        Knob("decode.kv_high", pool.kv_high, 0.05, 1, "share", "now", f"{marks}; no grants over it", is_share=True),
        Knob(
            "decode.queue_low", pool.queue_low, 0, 4096, "sequences", "now",
            "received sequences in line to run, under which grants go on",
        ),
        Knob(
            "decode.queue_high", pool.queue_high, 0, 4096, "sequences", "now",
            "received sequences in line to run, over which no grants are given",
        ),
        Knob("decode.max_running", pool.max_running, 1, pool.max_running, "sequences", "drains", "sequences decoding"),
        Knob(
            "decode.prefill_tokens", pool.prefill_tokens, 0, 2048, "tokens", "next step",
            "prompt tokens of a step in which others decode, one block at least; auto: by slo.tpot_p95", has_auto=True,
        ),
        Knob(
            "decode.idle_swap_s", pool.idle_swap_s, 0, 86400, "seconds", "now",
            "after which a sequence whose client does not read gives its blocks away; 0: it runs on, unread",
        ),
    ]  # fmt: skip


def _hybrid(config: Config, max_len: int) -> list[Knob]:
    if not config.prefill.workers:
        return []
    help = "shorter uncached prompts stay on one worker; 0: every prompt crosses; auto: measured"
    threshold = config.hybrid.threshold_tokens
    return [Knob("hybrid.threshold_tokens", threshold, 0, max_len, "tokens", "now", help, has_auto=True)]


def _colocated(config: Config) -> list[Knob]:
    pool = config.colocated
    if not pool.workers:
        return []
    high = pool.max_running
    running = Knob("colocated.max_running", high, 1, high, "sequences", "drains", "sequences running")
    return [*_steps(config, "colocated", pool), running]
