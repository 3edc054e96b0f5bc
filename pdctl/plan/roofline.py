"""Estimates where nothing was measured: a device's arithmetic and memory bandwidth, a model's shape.

Prefill is bound by arithmetic (2 operations a parameter a token), decode by reading the weights and the KV cache once a
step (Williams et al., Roofline, CACM 2009). The shares that are reached are those of good kernels, not of data sheets.
Good to a third; a measurement replaces it: `pdctl bench --calibrate`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdctl.exits import UsageError
from pdctl.plan.stages import Stages, StepModel

_COMPUTE_SHARE = 0.55
_MEMORY_SHARE = 0.75
_STEP_OVERHEAD_S = 0.0007  # sampling, scheduling, launch of a captured graph


@dataclass(frozen=True, slots=True)
class Device:
    """Dense bf16 operations/s, memory bytes/s, bytes of memory, and bytes/s to its neighbour."""

    flops: float
    bandwidth: float
    memory: float
    link: float


DEVICES = {
    "h200": Device(989e12, 4.8e12, 141e9, 200e9),
    "h100": Device(989e12, 3.35e12, 80e9, 200e9),
    "a100": Device(312e12, 2.0e12, 80e9, 150e9),
    "l40s": Device(362e12, 0.864e12, 48e9, 20e9),
    "a10": Device(125e12, 0.6e12, 24e9, 12e9),
    "cpu-core": Device(0.35e12, 12e9, 8e9, 2.5e9),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model's config the estimate needs."""

    params: float
    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    dtype_bytes: int = 2

    @property
    def kv_token_bytes(self) -> int:
        return self.layers * self.kv_heads * self.head_dim * 2 * self.dtype_bytes


SHAPES = {
    "llama-3.1-8b": Shape(8.03e9, 32, 8, 128, 4096),
    "llama-3.1-70b": Shape(70.6e9, 80, 8, 128, 8192),
    "qwen3-0.6b": Shape(0.6e9, 28, 8, 128, 1024),
    "qwen3-8b": Shape(8.2e9, 36, 8, 128, 4096),
    "smollm2-135m": Shape(135e6, 30, 3, 64, 576),
}


def shape_of(model: str) -> Shape:
    """A known name, or a folder with a config.json."""
    name = model.rsplit("/", 1)[-1].lower().removesuffix("-instruct")
    if name in SHAPES:
        return SHAPES[name]
    file = Path(model).expanduser() / "config.json"
    if not file.is_file():
        raise UsageError(
            f"the shape of model {model!r} is not known",
            help=f"--model one of {', '.join(SHAPES)} or a folder with config.json; or --stages RESULT.json",
        )
    return _read(json.loads(file.read_text()))


def _read(config: dict[str, Any]) -> Shape:
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    layer = attention + 3 * hidden * config["intermediate_size"]
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return Shape(layers * layer + embeddings, layers, kv_heads, head_dim, hidden)


def estimate(model: str, device: str) -> Stages:
    if device not in DEVICES:
        raise UsageError(f"device {device!r} is not known", help=f"one of {', '.join(DEVICES)}")
    shape, on = shape_of(model), DEVICES[device]
    flops, bandwidth = on.flops * _COMPUTE_SHARE, on.bandwidth * _MEMORY_SHARE
    if shape.params * shape.dtype_bytes > 0.9 * on.memory:
        raise UsageError(f"{model} does not fit into one {device}", help="plan with measured stages: --stages")
    step = StepModel(
        base_s=_STEP_OVERHEAD_S,
        floor_s=shape.params * shape.dtype_bytes / bandwidth,
        prompt_token_s=2 * shape.params / flops,
        prompt_context_s=4 * shape.layers * shape.hidden / flops,
        decode_seq_s=2 * shape.params / flops,
        context_token_s=shape.kv_token_bytes / bandwidth,
    )
    return Stages(
        step,
        step,
        step,
        kv_token_bytes=shape.kv_token_bytes,
        link_bytes_s=on.link,
        link_latency_s=2e-4,
        router_s=5e-4,
        source=f"roofline of {model} on {device}",
        chunk_tokens=1024,
    )
