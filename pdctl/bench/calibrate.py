"""Stage times for `pdctl plan`, each with its neighbours at work, as they are under load.

    prefill    prompts of several lengths, one a reading worker, answers of one token. With pools: while the decode
               worker writes.
    decode     so many sequences a worker at several contexts; the median gap while all of them decode. With pools:
               while the prefill worker reads.
    transfer   what of it was left when the prompt was read, of the prompts above.

These points are apart from the grid, so that `pdctl plan --check` grades cells that the model was not fitted on.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from statistics import median
from typing import Any

from pdctl.bench.driver import Driver
from pdctl.bench.loads import ids
from pdctl.bench.sample import Sample
from pdctl.bench.target import Target

PROMPTS = (64, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8)
CONTEXTS = (64, 1024)
DECODE_TOKENS = 24
REPEATS = 2


def empty() -> dict[str, Any]:
    return {"prefill": [], "decode": [], "transfer": [], "router_s": 0.0, "chunk_tokens": 256}


async def calibrate(
    driver: Driver, target: Target, out: dict[str, Any], longest: int, vocab: int, tell: Callable[[str], None]
) -> None:
    """Adds one target's points to `out`."""
    random = Random(11)
    if target.sizes:
        out["chunk_tokens"] = target.sizes["chunk_tokens"]
        out["max_batch"] = target.sizes["max_running"]
    overheads: list[float] = []
    async with _neighbour(driver, random, vocab, 32, 512 if target.has_pools else 0):
        for length in (n for n in PROMPTS if n <= longest):
            tell(f"{target.mode.name}: prompts of {length}")
            for _ in range(REPEATS):
                prompts = [ids(random, length, vocab) for _ in range(target.num_readers)]
                samples = await asyncio.gather(*(driver.send(prompt, 2) for prompt in prompts))
                for sample in samples:
                    read_point(sample, target, length, out, overheads)
    async with _neighbour(driver, random, vocab, 512, 1 if target.has_pools else 0):
        for context in (n for n in CONTEXTS if n <= longest):
            for batch in BATCHES:
                tell(f"{target.mode.name}: {batch} sequences a worker at {context} tokens")
                count = batch * target.num_writers
                prompts = [ids(random, context, vocab) for _ in range(count)]
                samples = await asyncio.gather(*(driver.send(prompt, _enough(batch, context)) for prompt in prompts))
                if (gap := together(samples)) is not None:
                    role = "decode" if target.has_pools else "colocated"
                    out["decode"].append([role, batch, context + DECODE_TOKENS / 2, round(gap, 6)])
    out["router_s"] = round(max(0.0, median(overheads)), 6) if overheads else 0.0


def _enough(batch: int, context: int) -> int:
    """Tokens until all of a batch decode: prompts are read one after another, and the first must not have ended."""
    return DECODE_TOKENS + 2 * batch * (1 + context // 256)


def read_point(sample: Sample, target: Target, length: int, out: dict[str, Any], overheads: list[float]) -> None:
    if not sample.is_good:
        return
    r, seconds = sample.record, sample.ttft
    if r.get("prefill_start_ms") is not None and r.get("prefill_end_ms") is not None:
        seconds = (r["prefill_end_ms"] - r["prefill_start_ms"]) / 1e3
        overheads.append(sample.ttft - seconds)
    crossed = r.get("path") == "pd"
    out["prefill"].append(["prefill" if crossed else "colocated", length, round(seconds, 6)])
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


@asynccontextmanager
async def _neighbour(driver: Driver, random: Random, vocab: int, prompt: int, output: int) -> AsyncIterator[None]:
    """Keeps the other pool at work; output 0: nobody."""

    async def again() -> None:
        while output:
            sample = await driver.send(ids(random, prompt, vocab), output)
            if not sample.is_good:
                return

    task = asyncio.create_task(again())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
