"""The engine's steps on a CUDA device, as ratios to what the device can do. `make bench-engine`.

    python bench/engine.py [--model dummy:bench/configs/llama-3.1-8b] [--json FILE] [--profile] [--rows decode,prefill]

1. Ceilings are measured first: a large bf16 matrix product, a large copy.
2. `wall` is the median of `ModelRunner.execute`, everything included; `device` is what the step's work takes there.
3. The floor of decode is the bytes of weights and KV over the copy's bandwidth, that of prefill its operations over the
   product's rate; a ratio is `device` over the floor.

KV is filled with random numbers: on zeros some products run faster than in service.
"""

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from server.engine.attention import BatchMeta
from server.engine.model_runner import ModelRunner
from server.sequence import Batch, SamplingParams, SeqId, Sequence, Slice

CONFIG = Path(__file__).parent / "configs" / "llama-3.1-8b"
DECODE = [(1, 144), (1, 1024), (8, 1024), (32, 1024), (64, 144), (64, 1024), (64, 4096)]  # (batch, context)
PREFILL = [
    (1, 16),
    (1, 128),
    (1, 512),
    (1, 1024),
    (1, 2048),
    (1, 4096),
    (1, 8192),
    (8, 128),
    (8, 1024),
]  # (rows, tokens)
MIXED = [(32, 1024, 128), (32, 1024, 512)]  # (decode rows, their context, prompt tokens)
SATURATION = [256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192]


@dataclass
class Result:
    row: str
    tokens: int
    wall_ms: float
    device_ms: float
    floor_ms: float

    @property
    def ratio(self) -> float:
        return self.device_ms / self.floor_ms

    def __str__(self) -> str:
        return (
            f"{self.row:34} wall {self.wall_ms:8.2f} ms  device {self.device_ms:8.2f} ms  "
            f"floor {self.floor_ms:7.2f}  x{self.ratio:.2f}  {self.tokens / self.wall_ms * 1e3:9.0f} tokens/s"
        )


def device_ms(function: Callable[[], Any], repeats: int) -> float:
    """Median over `repeats` of the time between two events around it."""
    function()
    pairs = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        function()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairs)


def wall_ms(function: Callable[[], Any], repeats: int) -> float:
    for _ in range(2):
        function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def ceilings() -> tuple[float, float]:
    """(operations a second of a bf16 product, bytes a second of a copy, read and written)"""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = device_ms(lambda: a @ b, 10)
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = device_ms(lambda: target.copy_(source), 10)
    return 2 * 8192**3 / product * 1e3, 2 * 2**32 / copy * 1e3


class Bench:
    def __init__(self, runner: ModelRunner, flops: float, bandwidth: float) -> None:
        self.runner = runner
        self.flops = flops
        self.bandwidth = bandwidth
        weights = runner._weights
        assert weights is not None
        self._forward: Any = runner._forward
        self._matrix = sum(
            linear.weight.numel()
            for layer in weights.layers
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        self._head = weights.head.weight.numel()
        self._width = weights.num_heads * weights.head_dim

    def sequences(self, count: int, length: int, first: int = 0, extra: int = 1) -> list[Sequence]:
        """Of random tokens, with blocks spread over the pool as after hours of service."""
        spec = self.runner.spec
        need = spec.num_blocks_for(length + extra)
        ids = (
            torch.randperm(self.runner.pool.num_blocks - 1, generator=torch.Generator().manual_seed(first))[
                : count * need
            ]
            + 1
        )
        params = SamplingParams(max_tokens=8, temperature=0.0)
        return [
            Sequence(
                SeqId("bench", first + i, 0),
                torch.randint(0, self.runner.vocab_size, (length,)).tolist(),
                params,
                block_table=ids[i * need : (i + 1) * need].tolist(),
            )
            for i in range(count)
        ]

    def decode(self, batch: int, context: int, repeats: int = 30) -> Result:
        seqs = self.sequences(batch, context, extra=repeats + 2)

        def step() -> None:
            slices = [Slice(s, s.num_tokens - 1, 1) for s in seqs]
            for s, token in zip(seqs, self.runner.execute(Batch(slices)), strict=True):
                assert token is not None
                s.output.append(token.id)

        wall = wall_ms(step, repeats)
        size = min(have for have in self._forward._decodes if have >= batch)
        device = device_ms(self._forward._decodes[size]._graph.replay, repeats)
        spec = self.runner.spec
        moved = 2 * (self._matrix + self._head) + batch * context * spec.block_bytes / spec.block_size
        return Result(f"decode batch {batch} ctx {context}", batch, wall, device, moved / self.bandwidth * 1e3)

    def prefill(self, rows: int, length: int, repeats: int = 8) -> Result:
        return self._prompts(f"prefill {rows} x {length}", rows, length, [], repeats)

    def mixed(self, batch: int, context: int, prompt: int, repeats: int = 10) -> Result:
        decodes = [Slice(s, context - 1, 1) for s in self.sequences(batch, context)]
        return self._prompts(f"{batch} at ctx {context} + prefill {prompt}", 1, prompt, decodes, repeats)

    def _prompts(self, name: str, rows: int, length: int, others: list[Slice], repeats: int) -> Result:
        slices = others + [Slice(s, 0, length) for s in self.sequences(rows, length, 100)]
        wall = wall_ms(lambda: self.runner.execute(Batch(slices)), repeats)
        meta = BatchMeta.build(slices, self.runner.spec.block_size)
        keep = [end - 1 for end in meta.query_starts[1:]]
        device = device_ms(lambda: self._forward.logits(meta, keep), repeats)
        tokens = len(meta.token_ids)
        work = 2 * tokens * self._matrix + 2 * len(keep) * self._head
        work += 2 * rows * length**2 * self._width * self.runner.spec.num_layers
        moved = 2 * (self._matrix + self._head)
        return Result(name, tokens, wall, device, 1e3 * max(work / self.flops, moved / self.bandwidth))

    def profile(self, name: str, slices: list[Slice]) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self.runner.execute(Batch(slices))
            torch.cuda.synchronize()
        kernels = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
        total = sum(e.self_device_time_total for e in kernels)
        print(f"-- {name}: kernels {total / 1e3:.2f} ms")
        for event in kernels[:14]:
            print(f"{event.self_device_time_total / 1e3:8.3f} ms {event.count:4} x {event.key[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=f"dummy:{CONFIG}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rows", default="decode,prefill,mixed,saturation")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not torch.cuda.is_available():
        sys.exit("bench/engine.py needs a CUDA device; bench/cpu_engine.py is for a CPU")
    flops, bandwidth = ceilings()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: "
        f"{flops / 1e12:.0f} TFLOP/s, {bandwidth / 1e12:.2f} TB/s"
    )
    started = time.perf_counter()
    runner = ModelRunner(arguments.model, device="cuda", max_len=16384, kv_bytes=60 * 2**30)
    runner.load(lambda stage, share: print(f"{time.perf_counter() - started:6.1f} s {stage}", flush=True))
    print("logit differences", runner.logit_differences)
    with torch.inference_mode():
        runner.pool.data.normal_()
    bench = Bench(runner, flops, bandwidth)
    rows: dict[str, Callable[[], list[Result]]] = {
        "decode": lambda: [bench.decode(*row) for row in DECODE],
        "prefill": lambda: [bench.prefill(*row) for row in PREFILL],
        "mixed": lambda: [bench.mixed(*row) for row in MIXED],
        "saturation": lambda: [bench.prefill(1, length, 5) for length in SATURATION],
    }
    results = []
    with torch.inference_mode():
        for name in arguments.rows.split(","):
            for result in rows[name]():
                print(result, flush=True)
                results.append(asdict(result) | {"ratio": result.ratio})
        if arguments.profile:
            for batch, context in ((1, 1024), (64, 144), (64, 4096)):
                bench.profile(
                    f"decode {batch} x {context}", [Slice(s, context - 1, 1) for s in bench.sequences(batch, context)]
                )
            bench.profile("prefill 4096", [Slice(s, 0, 4096) for s in bench.sequences(1, 4096)])
    print(
        f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, all in {time.perf_counter() - started:.0f} s"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"flops": flops, "bandwidth": bandwidth, "rows": results}, indent=1))


if __name__ == "__main__":
    main()
