"""How fast the torch engine is on one CPU core, next to transformers' own forward in the same run.

    taskset -c 0 python bench/cpu_engine.py [--model FOLDER] [--dtype auto]

Prefill in tokens/s by chunk, decode in ms a step by batch and context. Only the ratio is worth quoting from a shared
machine. transformers runs with its default attention and a DynamicCache.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from server.engine.model_runner import ModelRunner
from server.sequence import Batch, SamplingParams, SeqId, Sequence, Slice

PREFILL = [(64, 0), (128, 0), (256, 0), (512, 0), (1024, 0), (128, 896), (256, 768), (256, 2816)]  # (chunk, context)
DECODE = [(1, 128), (1, 1024), (8, 128), (8, 1024), (8, 3072), (32, 256), (32, 1024)]  # (batch, context)


def median_s(function: Callable[[], Any], repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def sequences(count: int, length: int, block_size: int, vocab_size: int) -> list[Sequence]:
    blocks = -(-(length + 1) // block_size)
    made = []
    for i in range(count):
        prompt = torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(i)).tolist()
        table = list(range(1 + i * blocks, 1 + (i + 1) * blocks))
        params = SamplingParams(max_tokens=8, temperature=0.0)
        made.append(Sequence(SeqId("bench", i, 0), prompt, params, block_table=table))
    return made


def ours(runner: ModelRunner, count: int, context: int, num_new: int) -> Callable[[], Any]:
    """A step of `num_new` tokens for each of `count` sequences after `context`; the KV before it is whatever is there,
    which costs the same."""
    made = sequences(count, context + num_new, runner.spec.block_size, runner.vocab_size)
    batch = Batch([Slice(s, context, num_new) for s in made])
    return lambda: runner.execute(batch)


def theirs(model: Any, vocab_size: int, count: int, context: int, num_new: int) -> Callable[[], Any]:
    ids = torch.randint(0, vocab_size, (count, context + num_new))
    cache = model(ids[:, :context], use_cache=True, logits_to_keep=1).cache if context else None

    def step() -> None:
        model(ids[:, context:], cache=cache, use_cache=True, logits_to_keep=1)
        if cache is not None:
            cache.crop(-num_new)

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(Path.home() / ".cache/pdctl/smollm2-135m-1"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    runner = ModelRunner(args.model, dtype=args.dtype, threads=1, kv_bytes=3 * 2**30)
    runner.load()
    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=runner.dtype).eval()
    print(f"{args.model} {runner.dtype}, 1 thread; logit differences at start: {runner.logit_differences}")
    rows = [("prefill", 1, context, chunk) for chunk, context in PREFILL]
    rows += [("decode", count, context, 1) for count, context in DECODE]
    print(f"{'':8} {'batch':>5} {'context':>7} {'new':>5} {'ours ms':>9} {'theirs ms':>9} {'ratio':>6} {'tokens/s':>9}")
    with torch.inference_mode():
        for kind, count, context, num_new in rows:
            mine = median_s(ours(runner, count, context, num_new), args.repeats)
            other = median_s(theirs(reference, runner.vocab_size, count, context, num_new), args.repeats)
            print(
                f"{kind:8} {count:5} {context:7} {num_new:5} {mine * 1e3:9.1f} {other * 1e3:9.1f} "
                f"{other / mine:6.2f} {count * num_new / mine:9.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
