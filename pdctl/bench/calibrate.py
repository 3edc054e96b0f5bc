"""Stage times for `pdctl plan`, each alone and with the other workers at work.

    prefill    prompts of several lengths. The others idle; then read as many prompts, or write where there are pools
    decode     so many sequences a worker at several contexts, the median gap while all of them decode. The others idle
               (one sequence, where there are no pools); then decode as many, or read where there are pools
    transfer   what of it was left when the prompt was read, of the prompts above; and how long a grant took

These points are apart from the grid, so that `pdctl plan --check` grades cells that the model was not fitted on.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from statistics import median
from typing import Any

from pdctl.bench.driver import Driver
from pdctl.bench.loads import ids
from pdctl.bench.sample import Sample
from pdctl.bench.target import Target

PROMPTS = (64, 192, 384, 768, 1536)  # others than a grid's: its cells shall be predictions
BATCHES = (1, 2, 4, 8)
CONTEXTS = (64, 1024)
DECODE_TOKENS = 24
REPEATS = 2


def empty() -> dict[str, Any]:
    return {
        "prefill": [],
        "decode": [],
        "transfer": [],
        "grants": [],
        "router_s": 0.0,
        "router_busy_s": 0.0,
        "chunk_tokens": 256,
    }


class Calibration:
    """Adds one target's points to `out`."""

    def __init__(
        self, driver: Driver, target: Target, out: dict[str, Any], vocab: int, tell: Callable[[str], None]
    ) -> None:
        self._driver, self._target, self._out, self._vocab, self._tell = driver, target, out, vocab, tell
        self._random = Random(11)
        self._overheads: tuple[list[float], list[float]] = (
            [],
            [],
        )  # of the router and the way there: others idle, busy
        if target.sizes:
            out["chunk_tokens"] = target.sizes["chunk_tokens"]
            out["max_batch"] = target.sizes["max_running"]

    async def run(self, longest: int) -> None:
        prompts = [n for n in PROMPTS if n <= longest] or [longest]
        contexts = sorted({min(n, longest) for n in CONTEXTS})
        has_pools = self._target.has_pools
        await self._prompts(prompts, 1, busy=0)
        await self._decoding(contexts, BATCHES if has_pools else (1,), 1, busy=0)
        if has_pools:
            async with self._neighbour(32, 512):
                await self._prompts(prompts, 1, busy=1)
            async with self._neighbour(512, 1):
                await self._decoding(contexts, BATCHES, 1, busy=1)
        elif self._target.num_readers > 1:
            await self._prompts(prompts, self._target.num_readers, busy=1)
            await self._decoding(contexts, BATCHES, self._target.num_writers, busy=1)
        for name, seen in zip(("router_s", "router_busy_s"), self._overheads, strict=True):
            if seen:
                self._out[name] = round(max(0.0, median(seen)), 6)

    async def _prompts(self, lengths: list[int], count: int, busy: int) -> None:
        for length in lengths:
            self._tell(f"{self._target.mode.name}: prompts of {length}, others {'busy' if busy else 'idle'}")
            for _ in range(REPEATS):
                for sample in await self._send(count, length, 2):
                    read_point(sample, self._target, length, self._out, self._overheads[busy], busy)

    async def _decoding(self, contexts: list[int], batches: Sequence[int], workers: int, busy: int) -> None:
        role = "decode" if self._target.has_pools else "colocated"
        workers = self._target.num_writers if self._target.has_pools else workers
        for context in contexts:
            for batch in batches:
                self._tell(f"{self._target.mode.name}: {batch} x {context} tokens, others {'busy' if busy else 'idle'}")
                samples = await self._send(batch * workers, context, _enough(batch, context))
                if (gap := together(samples)) is not None:
                    self._out["decode"].append([role, batch, context + DECODE_TOKENS / 2, round(gap, 6), busy])

    async def _send(self, count: int, length: int, output: int) -> list[Sample]:
        prompts = [ids(self._random, length, self._vocab) for _ in range(count)]
        return list(await asyncio.gather(*(self._driver.send(prompt, output) for prompt in prompts)))

    @asynccontextmanager
    async def _neighbour(self, prompt: int, output: int) -> AsyncIterator[None]:
        """Keeps the other pool at work."""

        async def again() -> None:
            while (await self._driver.send(ids(self._random, prompt, self._vocab), output)).is_good:
                pass

        task = asyncio.create_task(again())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _enough(batch: int, context: int) -> int:
    """Tokens until all of a batch decode: prompts are read one after another, and the first must not have ended."""
    return DECODE_TOKENS + 2 * batch * (1 + context // 256)


def read_point(
    sample: Sample, target: Target, length: int, out: dict[str, Any], overheads: list[float], busy: int = 0
) -> None:
    if not sample.is_good:
        return
    r, seconds = sample.record, sample.ttft
    if r.get("prefill_start_ms") is not None and r.get("prefill_end_ms") is not None:
        seconds = (r["prefill_end_ms"] - r["prefill_start_ms"]) / 1e3
        asked = (r.get("grant_wait_ms") or 0.0) / 1e3
        overheads.append(sample.ttft - seconds - asked)
        if asked and not busy:
            out["grants"].append(round(asked, 6))
    crossed = r.get("path") == "pd"
    out["prefill"].append(["prefill" if crossed else "colocated", length, round(seconds, 6), busy])
    if crossed and r.get("kv_ready_ms") is not None and r.get("prefill_end_ms") is not None:
        # After the last compute chunk only that chunk's KV is left to send.
        last = (length - 1) % int(out["chunk_tokens"]) + 1
        left = max(1e-4, (r["kv_ready_ms"] - r["prefill_end_ms"]) / 1e3)
        out["transfer"].append([last, round((r.get("kv_bytes") or 0) * last / length), round(left, 6)])


def together(samples: list[Sample]) -> float | None:
    """Median gap in the time when all of them decode."""
    good = [s for s in samples if s.is_good and len(s.times) > 2]
    if len(good) < len(samples):
        return None
    begin, end = max(s.times[1] for s in good), min(s.last for s in good)
    gaps = [b - a for s in good for a, b in zip(s.times, s.times[1:], strict=False) if a >= begin and b <= end]
    return median(gaps) if gaps else None
