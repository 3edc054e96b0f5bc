"""Attention over the paged KV cache: how a step is described, and the door from transformers to a backend.

1. `BatchMeta.build` turns the slices of a step into positions, slots, block tables and lengths.
2. `AttentionBackend.plan(meta)` prepares what all layers share, once a step.
3. transformers calls `paged_attention_forward` in every layer; it hands q, k, v to `AttentionBackend.run`, which writes
   K and V into the pool and attends over it. The backend travels as the keyword `paged` through the model's forward,
   so two runners in one process do not know each other.

The packed batch is [1, total tokens]; rows of one token (decode) come first, the longest context first.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from server.device import on_device
from server.engine.kv_cache import KVSpec
from server.errors import ModelError
from server.sequence import Sequence, Slice

IMPLEMENTATION = "pdctl_paged"

# What models pass along that changes nothing here. Everything else must be None, or the model is not ours to run.
_HARMLESS = {"dropout", "position_ids", "position_embeddings", "use_cache", "return_dict", "logits_to_keep"}
_HARMLESS |= {"output_attentions", "output_hidden_states", "output_router_logits", "cache_position"}


@dataclass(slots=True)
class BatchMeta:
    """One step in numbers. Row i is one sequence: its query tokens start at `query_starts[i]`, it knows
    `context_lens[i]` tokens including them, and its KV lies in `block_tables[i]`."""

    token_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    query_starts: list[int]  # one more than rows: the last is the number of tokens
    context_lens: list[int]
    block_tables: list[list[int]]
    num_decode: int  # leading rows of one token
    drawn: torch.Tensor | None = None  # what the step under way draws; token id -1 - i is its i-th

    @classmethod
    def build(cls, slices: Rows[Slice], block_size: int, drawn: "Coming | None" = None) -> "BatchMeta":
        """`slices` in the order of `row_order`."""
        meta = cls([], [], [], [0], [], [], sum(s.num_tokens == 1 for s in slices))
        for s in slices:
            end = s.start + s.num_tokens
            table = s.seq.block_table
            if s.start < s.seq.num_tokens:
                meta.token_ids += s.seq.tokens(s.start, end)
            else:
                assert drawn is not None, "a token that is coming is the last step's"
                meta.token_ids.append(-1 - drawn.rows[s.seq])
                meta.drawn = drawn.ids
            meta.positions += range(s.start, end)
            meta.slot_mapping += [table[p // block_size] * block_size + p % block_size for p in range(s.start, end)]
            meta.query_starts.append(meta.query_starts[-1] + s.num_tokens)
            meta.context_lens.append(end)
            meta.block_tables.append(table[: -(-end // block_size)])
        return meta


@dataclass(slots=True)
class Coming:
    """The tokens that a step draws, before anybody knows them: `ids` on the device, and which is whose."""

    ids: torch.Tensor
    rows: dict[Sequence, int]


def token_ids(meta: BatchMeta, device: torch.device) -> torch.Tensor:
    """[tokens], those that are coming among them."""
    ids = on_device(meta.token_ids, torch.long, device)
    if meta.drawn is None:
        return ids
    return torch.where(ids < 0, meta.drawn[(-1 - ids).clamp(min=0)], ids)


def row_order(slices: Rows[Slice]) -> list[int]:
    """Indices of `slices` as a backend wants them: one-token rows first, and among those the longest context first."""
    return sorted(range(len(slices)), key=lambda i: (slices[i].num_tokens > 1, -slices[i].start))


class AttentionBackend(Protocol):
    """Owns the scratch memory of attention and reads and writes one KVCachePool."""

    spec: KVSpec

    def plan(self, meta: BatchMeta) -> None:
        """Prepares a step; `run` is then called once a layer."""
        ...

    def run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scaling: float
    ) -> torch.Tensor:
        """[1, heads, tokens, head_dim] each -> [1, tokens, heads, head_dim], valid until the next `run`."""
        ...


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    paged: AttentionBackend | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer. Refuses what it would otherwise silently compute wrongly."""
    if paged is None:
        raise ModelError(f"{type(module).__name__} does not pass keywords through to its attention")
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} brings an attention mask of its own")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ModelError(f"{type(module).__name__} is not causal")
    if (sliding_window or None) != paged.spec.sliding_window:
        raise ModelError(
            f"{type(module).__name__} attends over a window of {sliding_window}, "
            f"its config says {paged.spec.sliding_window}"
        )
    if (key.shape[1], key.shape[3], value.shape[3]) != (paged.spec.num_kv_heads, *[paged.spec.head_dim] * 2):
        raise ModelError(
            f"{type(module).__name__} makes keys of {key.shape[1]} x {key.shape[3]} and values of {value.shape[1]} x "
            f"{value.shape[3]}, its config says {paged.spec.num_kv_heads} x {paged.spec.head_dim}"
        )
    for key_word, given in kwargs.items():
        if given is not None and key_word not in _HARMLESS:
            raise ModelError(f"{type(module).__name__} needs the attention feature '{key_word}', which pdctl lacks")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return paged.run(query, key, value, int(module.layer_idx), scaling), None  # type: ignore[arg-type]


AttentionInterface.register(IMPLEMENTATION, paged_attention_forward)
