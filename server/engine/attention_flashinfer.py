"""Paged attention on CUDA, on the strided per-layer views of the block-major pool.

FlashInfer takes the prompt rows of a step (fa3 on Hopper), `attention_decode` the decode rows; `plan` is called once a
step, `run` or `attend` once a layer. What they need to know reaches the device in one pinned copy (`StepBuffer`).

Imported on CUDA only.
"""

import itertools
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import flashinfer
import numpy as np
import torch

from server.engine import kernels
from server.engine.attention import BatchMeta
from server.engine.attention_decode import NO_ROW, attend_decode
from server.engine.kv_cache import KVCachePool, KVSpec
from server.errors import ModelError

_WORKSPACE_BYTES = 256 * 2**20
_HEAD_DIMS = (64, 128, 256)
_ALIGN = 64  # tokens


class StepBuffer:
    """What a step needs on the device, as int32 in pinned memory, and one copy of it.

    In this order, `size` numbers each, zeros where a step has fewer: token ids, positions, slots, tokens whose logits
    are wanted, where the blocks of each decode row begin; then the blocks of all rows. So padding is token 0 at
    position 0, written to the null block. In a step that has prompts, too, rows that do not decode begin at NO_ROW.
    """

    _SECTIONS = 5

    def __init__(self, device: torch.device, capacity: int = 1 << 16) -> None:
        self._device = device
        self._reserve(capacity)

    def _reserve(self, capacity: int) -> None:
        self._host = torch.zeros(capacity, dtype=torch.int32, pin_memory=True)
        self.numbers = self._host.numpy()
        self.data = torch.zeros(capacity, dtype=torch.int32, device=self._device)

    @classmethod
    def capacity(cls, size: int, num_blocks: int) -> int:
        return cls._SECTIONS * size + num_blocks

    def holds(self, size: int, num_blocks: int) -> bool:
        return self.capacity(size, num_blocks) <= self.data.numel()

    def inputs(self, size: int) -> "StepInputs":
        """The views that `fill` with this size writes; at the same addresses until a step comes that it does not
        hold."""
        end = self._SECTIONS * size
        token_ids, positions, slots, keep, starts = self.data[:end].view(self._SECTIONS, size)
        return StepInputs(token_ids, positions, slots, keep, starts, self.data[end:])

    def fill(self, meta: BatchMeta, size: int, keep: list[int], blocks: "array[int]") -> None:
        """The copy of the step before must be done (`FlashInferAttention.wait`)."""
        if not self.holds(size, len(blocks)):
            self._reserve(2 * self.capacity(size, len(blocks)))
        starts = [0, *itertools.accumulate(map(len, meta.block_tables[: meta.num_decode]))][:-1]
        for i, values in enumerate((meta.token_ids, meta.positions, meta.slot_mapping, keep, starts)):
            self.numbers[i * size : i * size + len(values)] = array("i", values)
            self.numbers[i * size + len(values) : (i + 1) * size] = 0
        if meta.num_decode < len(meta.context_lens):
            self.numbers[4 * size + meta.num_decode : 5 * size] = NO_ROW
        start = self._SECTIONS * size
        self.numbers[start : start + len(blocks)] = blocks

    def send(self, size: int, num_blocks: int) -> None:
        used = self.capacity(size, num_blocks)
        self.data[:used].copy_(self._host[:used], non_blocking=True)


@dataclass(slots=True)
class StepInputs:
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    keep: torch.Tensor
    starts: torch.Tensor
    blocks: torch.Tensor


def padded(num_tokens: int) -> int:
    """A size whose views keep their 16-byte alignment: Triton compiles a kernel anew for pointers without it."""
    return -(-num_tokens // _ALIGN) * _ALIGN


@dataclass(slots=True)
class Rows:
    """Where the KV of some rows lies, on the host, as FlashInfer wants it."""

    indptr: torch.Tensor
    last_page_len: torch.Tensor

    @classmethod
    def of(cls, context_lens: list[int], block_size: int) -> "Rows":
        lens = np.array(context_lens, dtype=np.int32)
        indptr = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum((lens - 1) // block_size + 1, out=indptr[1:])
        return cls(torch.from_numpy(indptr), torch.from_numpy((lens - 1) % block_size + 1))


def block_list(meta: BatchMeta) -> "array[int]":
    """The block tables of all rows one after another."""
    blocks = array("i")
    for table in meta.block_tables:
        blocks.fromlist(table)
    return blocks


class FlashInferAttention:
    """An AttentionBackend, and what the fused loop calls (`attend`)."""

    def __init__(self, pool: KVCachePool, num_heads: int) -> None:
        spec = pool.spec
        if spec.head_dim not in _HEAD_DIMS:
            raise ModelError(f"FlashInfer has no attention for heads of {spec.head_dim} dimensions, only {_HEAD_DIMS}")
        self.spec: KVSpec = spec
        self.num_heads = num_heads
        self.layers = [pool.layer(i) for i in range(spec.num_layers)]
        self.scaling = spec.head_dim**-0.5
        self._device = pool.data.device
        self.buffer = StepBuffer(self._device)
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        hopper = torch.cuda.get_device_capability(self._device)[0] == 9
        self._prompts = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "HND", backend="fa3" if hopper else "fa2"
        )
        self._planned = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._meta: BatchMeta | None = None
        self._inputs: StepInputs

    # -- plan ---------------------------------------------------------------------------------------------------------

    def plan(self, meta: BatchMeta) -> None:
        """For a step whose inputs nobody has put on the device yet."""
        size, blocks = padded(len(meta.token_ids)), block_list(meta)
        self.wait()
        self.buffer.fill(meta, size, [], blocks)
        self.buffer.send(size, len(blocks))
        self.plan_rows(meta, self.buffer.inputs(size))
        self.mark()

    def wait(self) -> None:
        """Until the pinned memory of the last plan has been read: a step must not be written over the one before."""
        self._planned.synchronize()

    def mark(self) -> None:
        self._planned.record()

    def plan_rows(self, meta: BatchMeta, inputs: StepInputs) -> None:
        """`inputs` hold the step, or will once the stream has come that far."""
        self._meta, self._inputs = meta, inputs
        num_decode = meta.num_decode
        if len(meta.context_lens) == num_decode:
            return
        where = Rows.of(meta.context_lens[num_decode:], self.spec.block_size)
        skipped = sum(map(len, meta.block_tables[:num_decode]))
        starts = torch.tensor(meta.query_starts[num_decode:], dtype=torch.int32) - num_decode
        self._prompts.plan(
            starts, where.indptr, inputs.blocks[skipped : skipped + int(where.indptr[-1])], where.last_page_len,
            self.num_heads, self.spec.num_kv_heads, self.spec.head_dim, self.spec.block_size,
            causal=True, sm_scale=self.scaling, window_left=self._window_left,
            q_data_type=self.spec.dtype, kv_data_type=self.spec.dtype,
        )  # fmt: skip

    @property
    def _window_left(self) -> int:
        """How many tokens before itself one sees; -1 for all."""
        return -1 if self.spec.sliding_window is None else self.spec.sliding_window - 1

    # -- run ----------------------------------------------------------------------------------------------------------

    def attend(self, query: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        """[tokens, heads, head_dim], whose K and V are in the pool. Rows after those of the step give zeros."""
        assert self._meta is not None
        if num_decode := self._meta.num_decode:
            self.decode(query[:num_decode], layer, self._inputs, out[:num_decode])
        self.prompts(query, out)(layer)

    def prompts(self, query: torch.Tensor, out: torch.Tensor) -> Callable[[int], None]:
        """What prompts have of `attend`, a layer at a time, in a step whose layers share `query` and `out`."""
        meta = self._meta
        assert meta is not None
        num_decode, used = meta.num_decode, len(meta.token_ids)
        if used < out.shape[0]:
            out[used:].zero_()  # a NaN there would reach the null block
        if used == num_decode:
            return lambda layer: None
        query, out = query[num_decode:used], out[num_decode:used]
        return lambda layer: self._prompts.run(query, self.layers[layer], out=out)

    def decode(
        self,
        query: torch.Tensor,
        layer: int,
        inputs: StepInputs,
        out: torch.Tensor,
        shares: tuple[int, int] | None = None,
    ) -> None:
        """`attend` for rows of one token."""
        attend_decode(
            query, self.layers[layer], inputs.positions, inputs.starts, inputs.blocks,
            self.scaling, self.spec.sliding_window, out, shares,
        )  # fmt: skip

    def run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scaling: float
    ) -> torch.Tensor:
        if scaling != self.scaling:  # known only now; the same in all layers and steps of a model
            assert self._meta is not None
            self.scaling = scaling
            self.plan_rows(self._meta, self._inputs)
        kernels.write_kv(key[0], value[0], self._inputs.slots[: key.shape[2]], self.layers[layer])
        q = query[0].transpose(0, 1).contiguous()
        out = torch.empty_like(q)
        self.attend(q, layer, out)
        return out.unsqueeze(0)
