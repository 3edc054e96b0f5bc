"""What a step costs: decode by batch and context, prefill by length. Measures, or draws what was measured.

    python bench/curves.py --json docs/curves-cpu.json --svg docs/curves-cpu.svg        [--model FOLDER] [--threads 1]
    python bench/curves.py --json docs/curves-h200.json --svg docs/curves-h200.svg --device cuda
    python bench/curves.py --json docs/curves-cpu.json --svg docs/curves-cpu.svg --draw-only

Whole `ModelRunner.execute` calls, medians over `--repeats`. A prompt is read in chunks of 256 tokens on a CPU.
Drawing needs matplotlib: the extra `plot`. On a CPU bind it: `taskset -c 0`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.cpu_engine import median_s, ours
from pdctl.bench.session import cpu_name
from server.engine.model_runner import ModelRunner

CONTEXTS = {"cpu": [128, 512, 1024, 2048, 4096], "cuda": [144, 1024, 4096, 8192]}
BATCHES = {"cpu": [1, 2, 4, 8, 16, 32], "cuda": [1, 2, 4, 8, 16, 32, 64]}
LENGTHS = {"cpu": [16, 64, 128, 256, 512, 1024, 2048], "cuda": [16, 128, 512, 1024, 2048, 4096, 8192]}
CHUNK = {"cpu": 256, "cuda": 8192}  # tokens of one forward, as a worker reads a prompt
KV_BYTES = {"cpu": 3 * 2**30, "cuda": 80 * 2**30}
MAX_LEN = {"cpu": 0, "cuda": 16384}
MODEL = {"cpu": str(Path.home() / ".cache/pdctl/smollm2-135m-1"), "cuda": "dummy:bench/configs/llama-3.1-8b"}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = args.device
    model = args.model or MODEL[device]
    kv_bytes, max_len = KV_BYTES[device], MAX_LEN[device]
    runner = ModelRunner(
        model, dtype=args.dtype, device=device, threads=args.threads, kv_bytes=kv_bytes, max_len=max_len
    )
    runner.load()
    if device == "cuda":
        runner.pool.data.normal_()  # on zeros some products run faster than in service
    decode = [
        {"batch": batch, "context": context, "ms": 1e3 * median_s(ours(runner, batch, context, 1), args.repeats)}
        for context in CONTEXTS[device]
        for batch in BATCHES[device]
        if context < runner.max_len and batch * runner.spec.num_blocks_for(context + 1) < runner.pool.num_blocks
    ]
    prefill = [
        {"length": length, "ms": 1e3 * sum(chunks(runner, length, CHUNK[device], args.repeats))}
        for length in LENGTHS[device]
        if length < runner.max_len
    ]
    return {
        "version": 1,
        "model": Path(model).name,
        "dtype": str(runner.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{args.threads} thread, {cpu_name()}",
        "torch": torch.__version__,
        "repeats": args.repeats,
        "chunk_tokens": CHUNK[device],
        "decode": decode,
        "prefill": prefill,
    }


def chunks(runner: ModelRunner, length: int, chunk: int, repeats: int) -> list[float]:
    """Seconds of each forward that a prompt of `length` takes."""
    starts = range(0, length, chunk)
    return [median_s(ours(runner, 1, start, min(chunk, length - start)), repeats) for start in starts]


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pdctl"  # the same result gives the same file
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    _lines(left, result["decode"], "batch", "context", "decode step by batch")
    _lines(middle, result["decode"], "context", "batch", "decode step by context")
    rows = result["prefill"]
    right.plot([row["length"] for row in rows], [row["ms"] for row in rows], marker="o")
    right.set(title="prefill by length", xlabel="prompt tokens")
    for axes in (left, middle, right):
        axes.set(ylabel="ms", ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.suptitle(f"{result['model']}, {result['dtype']}, {result['device']}", fontsize=10)
    figure.savefig(path, metadata={"Date": None})


def _lines(axes: Any, rows: list[dict[str, Any]], along: str, by: str, title: str) -> None:
    for value in sorted({row[by] for row in rows}):
        mine = [row for row in rows if row[by] == value]
        axes.plot([row[along] for row in mine], [row["ms"] for row in mine], marker="o", label=f"{by} {value}")
    axes.set(title=title, xlabel=along)
    axes.legend(fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--draw-only", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.draw_only:
        result = json.loads(args.json.read_text())
    else:
        with torch.inference_mode():
            result = measure(args)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.svg:
        draw(result, args.svg)


if __name__ == "__main__":
    main()
