"""The KV cache: what one block holds (KVSpec) and the one tensor of all blocks (KVCachePool).

A block is one contiguous piece over all heads and layers, so that a transfer moves few large pieces; attention reads
strided views of one layer. Models whose layers do not all keep the same K and V are refused here, by name.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from server.engine.host_pool import Copy
from server.errors import ModelError

_MEASURED_BLOCKS = 8
_MEASUREMENTS = 5
LAYOUT_VERSION = 1  # of the order of axes below; peers compare it in their model cards

# Config keys that only models with another kind of per-layer state have.
_FOREIGN_STATE = {
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "mamba_d_state": "recurrent (mamba) layers",
    "ssm_state_size": "recurrent (state space) layers",
    "state_size": "recurrent (state space) layers",
    "lru_width": "recurrent (RG-LRU) layers",
    "conv_L_cache": "convolution layers",
    "linear_num_value_heads": "linear attention layers",
    "rwkv_heads": "recurrent (rwkv) layers",
    "time_decay_extra_dim": "recurrent (rwkv) layers",
    "attention_chunk_size": "chunked_attention layers",
    "cross_attention_layers": "cross attention layers",
    "block_configs": "layers of different shapes",
}
_PER_LAYER_TYPES = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")


@dataclass(frozen=True, slots=True)
class KVSpec:
    """One uniform KV group: what every layer keeps for every token, and how many tokens a block has."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    sliding_window: int | None = None  # a token sees itself and the sliding_window - 1 before it

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_kv_heads, self.num_layers, 2, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * self.dtype.itemsize

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @classmethod
    def from_config(cls, config: Any, dtype: torch.dtype, block_size: int) -> Self:
        """From a transformers config. ModelError names the layer type when there is not one uniform group."""
        text = config.get_text_config(decoder=True)
        name = getattr(text, "model_type", type(text).__name__)
        _refuse_foreign_state(text, name)
        num_heads = _number(text, name, "num_attention_heads")
        num_kv_heads = _number(text, name, "num_key_value_heads", default=num_heads)
        head_dim = _number(text, name, "head_dim", default=_number(text, name, "hidden_size") // num_heads)
        v_head_dim = _number(text, name, "v_head_dim", default=head_dim)
        if v_head_dim != head_dim:
            raise _refused(name, f"keys of {head_dim} and values of {v_head_dim} dimensions")
        return cls(
            num_layers=_number(text, name, "num_hidden_layers"),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            block_size=block_size,
            sliding_window=_uniform_window(text, name),
        )


def _refused(name: str, what: str) -> ModelError:
    return ModelError(
        f"model type '{name}' is not supported: it has {what}, and pdctl needs one uniform KV group",
        help="models of the Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE kind run",
    )


def _refuse_foreign_state(text: Any, name: str) -> None:
    if getattr(text, "is_encoder_decoder", False):
        raise _refused(name, "encoder and cross attention layers")
    for key, what in _FOREIGN_STATE.items():
        if getattr(text, key, None):
            raise _refused(name, what)
    if getattr(text, "num_kv_shared_layers", 0):
        raise _refused(name, f"{text.num_kv_shared_layers} shared-KV layers")
    for kind in sorted(_layer_types(text)):
        if kind not in ("full_attention", "sliding_attention", "attention"):
            raise _refused(name, f"'{kind}' layers")


def _layer_types(text: Any) -> set[str]:
    found: set[str] = set()
    for key in _PER_LAYER_TYPES:
        found |= set(getattr(text, key, None) or ())
    return found


def _uniform_window(text: Any, name: str) -> int | None:
    kinds = _layer_types(text)
    if {"full_attention", "sliding_attention"} <= kinds:
        raise _refused(name, "mixed sliding_attention and full_attention layers")
    if "full_attention" in kinds or not getattr(text, "use_sliding_window", True):
        return None
    window = getattr(text, "sliding_window", None)
    return int(window) if window else None


def _number(text: Any, name: str, key: str, default: int | None = None) -> int:
    value = getattr(text, key, None)
    if value is None:
        value = default
    if isinstance(value, (list, tuple)):  # one number a layer
        if len(set(value)) > 1:
            raise _refused(name, f"layers with different {key}")
        value = value[0]
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"model type '{name}' has no usable {key} in its config (found {value!r})")
    return value


class KVCachePool:
    """All blocks of a worker, zeroed: a NaN in a slot that is masked would still poison a matmul with it.

    Block 0 is the null block, which padding reads.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        # Made as an inference tensor, it could not be written outside of inference mode, as transfers do.
        with torch.inference_mode(False):
            self.data = torch.zeros((num_blocks, *spec.block_shape), dtype=spec.dtype, device=device)
            self.blocks = self.data.view(num_blocks, -1).view(torch.uint8)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(K, V) of one layer, each [num_blocks, num_kv_heads, block_size, head_dim], strided."""
        both = self.data[:, :, index]
        return both[:, :, 0], both[:, :, 1]


class HostBlocks:
    """Host memory beside a pool, pinned where the device is a GPU, and the copies between the two.

    They run on a stream of their own and are over when `copy` returns. A place in the engine's stream would order them
    among its steps only, and a granted block is written next by the transfer thread. They wait for no step either: what
    the one under way uses is never among them, and what earlier ones wrote is there, for a step ends synchronised.
    """

    def __init__(self, pool: KVCachePool, num_blocks: int) -> None:
        is_cuda = pool.data.is_cuda
        if is_cuda:
            torch.cuda.synchronize(pool.data.device)  # the pool is zeroed in another stream
        with torch.inference_mode(False):
            self._host = torch.empty((num_blocks, pool.blocks.shape[1]), dtype=torch.uint8, pin_memory=is_cuda)
        self._device = pool.blocks
        self._stream = torch.cuda.Stream(pool.data.device) if is_cuda else None  # type: ignore[no-untyped-call]
        self.block_s = self._measure()

    @property
    def num_blocks(self) -> int:
        return len(self._host)

    @property
    def num_bytes(self) -> int:
        return self._host.numel()

    def copy(self, copies: Sequence[Copy]) -> None:
        """Carries them out, in order."""
        with torch.cuda.stream(self._stream):  # none: nothing
            for block, host_block, is_out in copies:
                here, there = self._device[block], self._host[host_block]
                (there if is_out else here).copy_(here if is_out else there, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def _measure(self) -> float:
        """Seconds to copy one block, out or in, at best: a busy moment must not make swapping look dear for ever."""
        there = range(min(_MEASURED_BLOCKS, self.num_blocks))
        copies = [Copy(0, host_block, is_out) for host_block in there for is_out in (True, False)]  # the null block
        seconds = []
        for _ in range(_MEASUREMENTS if copies else 0):
            started = time.perf_counter()
            self.copy(copies)
            seconds.append((time.perf_counter() - started) / len(copies))
        return min(seconds, default=0.0)
