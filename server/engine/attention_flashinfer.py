"""Paged attention by FlashInfer, on the strided per-layer views of the block-major pool.

One wrapper takes the decode rows of a step, another its prompt rows (fa3 on Hopper); `plan` is called once a step,
`run` or `attend` once a layer. Index arrays reach the device in one pinned copy (`StepBuffer`).

Imported on CUDA only.
"""

from array import array
from dataclasses import dataclass

import flashinfer
import numpy as np
import torch

from server.engine import kernels
from server.engine.attention import BatchMeta
from server.engine.kv_cache import KVCachePool, KVSpec
from server.errors import ModelError

_WORKSPACE_BYTES = 256 * 2**20
_HEAD_DIMS = (64, 128, 256)
_ALIGN = 64  # tokens


class StepBuffer:
    """What a step needs on the device, as int32 in pinned memory, and one copy of it.

    In this order, `size` numbers each, zeros where a step has fewer: token ids, positions, slots, tokens whose logits
    are wanted; then the blocks of all rows. So padding is token 0 at position 0, written to the null block.
    """

    _SECTIONS = 4

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
        sections = (self.data[i * size : (i + 1) * size] for i in range(self._SECTIONS))
        return StepInputs(*sections, self.data[self._SECTIONS * size :])

    def fill(self, meta: BatchMeta, size: int, keep: list[int], blocks: "array[int]") -> None:
        """The copy of the step before must be done (`FlashInferAttention.wait`)."""
        if not self.holds(size, len(blocks)):
            self._reserve(2 * self.capacity(size, len(blocks)))
        for i, values in enumerate((meta.token_ids, meta.positions, meta.slot_mapping, keep)):
            self.numbers[i * size : i * size + len(values)] = array("i", values)
            self.numbers[i * size + len(values) : (i + 1) * size] = 0
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
    def of(cls, context_lens: list[int], padding: int, block_size: int) -> "Rows":
        """Rows of these lengths, then `padding` rows of one token in one block."""
        lens = np.array(context_lens + [1] * padding, dtype=np.int32)
        indptr = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum((lens - 1) // block_size + 1, out=indptr[1:])
        return cls(torch.from_numpy(indptr), torch.from_numpy((lens - 1) % block_size + 1))


def block_list(meta: BatchMeta, padding: int = 0) -> "array[int]":
    """The block tables of all rows one after another, and the null block for each padding row."""
    blocks = array("i")
    for table in meta.block_tables:
        blocks.fromlist(table)
    blocks.fromlist([0] * padding)
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
        self.workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        hopper = torch.cuda.get_device_capability(self._device)[0] == 9
        self._prompts = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace, "HND", backend="fa3" if hopper else "fa2"
        )
        self._decodes = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.workspace, "HND", use_tensor_cores=True)
        self._planned = torch.cuda.Event()
        self._meta: BatchMeta | None = None
        self._blocks: torch.Tensor
        self._slots: torch.Tensor

    # -- plan ---------------------------------------------------------------------------------------------------------

    def plan(self, meta: BatchMeta) -> None:
        """For a step whose inputs nobody has put on the device yet."""
        tokens, size, blocks = len(meta.token_ids), padded(len(meta.token_ids)), block_list(meta)
        self.wait()
        self.buffer.fill(meta, size, [], blocks)
        self.buffer.send(size, len(blocks))
        inputs = self.buffer.inputs(size)
        self.plan_rows(meta, inputs.blocks, inputs.slots[:tokens])
        self.mark()

    def wait(self) -> None:
        """Until the pinned memory of the last plan has been read: a step must not be written over the one before."""
        self._planned.synchronize()

    def mark(self) -> None:
        self._planned.record()

    def plan_rows(self, meta: BatchMeta, blocks: torch.Tensor, slots: torch.Tensor) -> None:
        """`blocks` (at least those of all rows) and `slots` are on the device."""
        self._meta, self._blocks, self._slots = meta, blocks, slots
        num_decode, block_size = meta.num_decode, self.spec.block_size
        decodes = Rows.of(meta.context_lens[:num_decode], 0, block_size)
        num_decode_blocks = int(decodes.indptr[-1])
        if num_decode:
            self.plan_decode(self._decodes, decodes, blocks[:num_decode_blocks])
        if len(meta.context_lens) > num_decode:
            where = Rows.of(meta.context_lens[num_decode:], 0, block_size)
            prompt_blocks = blocks[num_decode_blocks : num_decode_blocks + int(where.indptr[-1])]
            starts = torch.tensor(meta.query_starts[num_decode:], dtype=torch.int32) - num_decode
            self._prompts.plan(
                starts, where.indptr, prompt_blocks, where.last_page_len,
                self.num_heads, self.spec.num_kv_heads, self.spec.head_dim, self.spec.block_size,
                causal=True, sm_scale=self.scaling, window_left=self._window_left,
                q_data_type=self.spec.dtype, kv_data_type=self.spec.dtype,
            )  # fmt: skip

    def plan_decode(
        self, wrapper: flashinfer.BatchDecodeWithPagedKVCacheWrapper, rows: Rows, blocks: torch.Tensor
    ) -> None:
        wrapper.plan(
            rows.indptr, blocks, rows.last_page_len,
            self.num_heads, self.spec.num_kv_heads, self.spec.head_dim, self.spec.block_size,
            sm_scale=self.scaling, window_left=self._window_left,
            q_data_type=self.spec.dtype, kv_data_type=self.spec.dtype,
        )  # fmt: skip

    @property
    def _window_left(self) -> int:
        """How many tokens before itself one sees; -1 for all."""
        return -1 if self.spec.sliding_window is None else self.spec.sliding_window - 1

    # -- run ----------------------------------------------------------------------------------------------------------

    def attend(self, query: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        """[tokens, heads, head_dim], whose K and V are in the pool. Rows after those of the step give zeros."""
        meta = self._meta
        assert meta is not None
        num_decode, used = meta.num_decode, len(meta.token_ids)
        if num_decode:
            self._decodes.run(query[:num_decode], self.layers[layer], out=out[:num_decode])
        if used > num_decode:
            self._prompts.run(query[num_decode:used], self.layers[layer], out=out[num_decode:used])
        if used < out.shape[0]:
            out[used:].zero_()  # a NaN there would reach the null block

    def run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scaling: float
    ) -> torch.Tensor:
        if scaling != self.scaling:  # known only now; the same in all layers and steps of a model
            assert self._meta is not None
            self.scaling = scaling
            self.plan_rows(self._meta, self._blocks, self._slots)
        kernels.write_kv(key[0], value[0], self._slots, self.layers[layer])
        q = query[0].transpose(0, 1).contiguous()
        out = torch.empty_like(q)
        self.attend(q, layer, out)
        return out.unsqueeze(0)
