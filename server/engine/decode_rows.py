"""Attention of decode rows, one token each, in plain torch, by groups of rows of like length that are padded to one.

`InPlaceRows` reads K and V where they lie, once: the scores of a group are a sparse matrix, [rows * heads, slots of the
pool], whose pattern is the block tables. Its two products are operators that torch has for CPUs, in float32 alone.
`GatheredRows` runs anywhere: KV is gathered into scratch memory, then two batched matmuls with the queries of one KV
head as rows, [rows, kv_heads, heads of it, head_dim], and scores in float32 between them.
"""

import warnings
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F  # noqa: N812

from server.engine.attention import BatchMeta
from server.engine.pool_view import PoolView, Scratch

_GATHER_BYTES = 8 * 2**20  # of K, and again of V, for one group of rows
_PADDING = 1.5  # a group pads its rows to at most this many times their own length


class _Group:
    """Rows [start, stop), padded to `width` slots."""

    def __init__(self, start: int, stop: int, pieces: torch.Tensor, bias: torch.Tensor) -> None:
        self.start = start
        self.stop = stop
        self.pieces = pieces  # [rows * kv_heads * blocks]
        self.bias = bias  # float32 [rows, 1, width]: 0, or -inf where a row has nothing to see
        self.scores: torch.Tensor | None = None  # in place: CSR, [rows * heads, slots]


class DecodeRows(ABC):
    def __init__(self, view: PoolView, scratch: Scratch, group_bytes: int | None) -> None:
        """A group has one row, or no more than `group_bytes` of K."""
        self._view = view
        self._scratch = scratch
        self._group_bytes = group_bytes
        self._groups: list[_Group] = []

    def plan(self, meta: BatchMeta) -> None:
        """Prepares a step's leading `meta.num_decode` rows, the longest first; `run` is then called once a layer."""
        self._groups = [self._group(meta, a, b) for a, b in self._split(meta.context_lens[: meta.num_decode])]

    def run(self, query: torch.Tensor, layer: int, scaling: float, out: torch.Tensor) -> None:
        """`query` is [heads, tokens, head_dim] and `out` [tokens, heads, head_dim], of the packed batch; only decode
        rows are read and written. Their own K and V are in the pool."""
        for group in self._groups:
            a, b = group.start, group.stop
            self._attend(query[:, a:b].transpose(0, 1), group, layer, scaling, out[a:b])

    @abstractmethod
    def _attend(self, query: torch.Tensor, group: _Group, layer: int, scaling: float, out: torch.Tensor) -> None:
        """`query` is [rows, heads, head_dim], strided; `out` the same, contiguous."""

    def _split(self, lens: list[int]) -> list[tuple[int, int]]:
        spec = self._view.spec
        token_bytes = spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
        seen = [spec.block_size * (last - first) for first, last in (self._view.span(n, n - 1) for n in lens)]
        groups: list[tuple[int, int]] = []
        start = 0
        for i in range(1, len(lens) + 1):
            if (
                i == len(lens)
                or seen[start] > _PADDING * seen[i] + 4 * spec.block_size
                or (self._group_bytes and (i + 1 - start) * seen[start] * token_bytes > self._group_bytes)
            ):
                groups.append((start, i))
                start = i
        return groups

    def _group(self, meta: BatchMeta, start: int, stop: int) -> _Group:
        view, block_size = self._view, self._view.spec.block_size
        lens = meta.context_lens[start:stop]
        spans = [view.span(n, n - 1) for n in lens]
        width = max(last - first for first, last in spans)
        tables = [
            meta.block_tables[start + i][first:last] + [0] * (width - last + first)
            for i, (first, last) in enumerate(spans)
        ]
        pieces = view.piece_index(torch.tensor(tables, device=view.device)).reshape(-1)
        firsts = torch.tensor([first for first, _ in spans], device=view.device).unsqueeze(1) * block_size
        position = firsts + torch.arange(width * block_size, device=view.device)
        last_seen = torch.tensor(lens, device=view.device).unsqueeze(1) - 1
        return _Group(start, stop, pieces, view.bias(last_seen, position).unsqueeze(1))


class InPlaceRows(DecodeRows):
    def __init__(self, view: PoolView, scratch: Scratch) -> None:
        super().__init__(view, scratch, None)
        self._index_dtype = torch.int32 if view.num_slots < 2**31 else torch.int64
        with warnings.catch_warnings():  # torch says once that sparse tensors are beta
            warnings.simplefilter("ignore")
            torch.sparse_csr_tensor([0, 1], [0], [0.0], (1, 1), check_invariants=True)

    def _attend(self, query: torch.Tensor, group: _Group, layer: int, scaling: float, out: torch.Tensor) -> None:
        rows, heads, head_dim = query.shape
        if group.scores is None:
            group.scores = self._scores(group, heads)
        scores, view = group.scores, self._view
        values = scores.values()
        by_row = values.view(rows, heads, -1)
        by_row.copy_(group.bias)
        q = query.reshape(-1, head_dim)
        torch.sparse.sampled_addmm(scores, q, view.keys[layer].t(), alpha=scaling, out=scores)
        torch.softmax(by_row, -1, out=by_row)
        slots, starts = scores.col_indices(), scores.crow_indices()[:-1]
        attended = F.embedding_bag(slots, view.values[layer], starts, mode="sum", per_sample_weights=values)
        out.copy_(attended.view(out.shape))

    def _scores(self, group: _Group, heads: int) -> torch.Tensor:
        """The pattern, and room for values: 4 + 4 bytes for each query head and slot."""
        rows, _, width = group.bias.shape
        block_size, kv_heads = self._view.spec.block_size, self._view.spec.num_kv_heads
        slots = group.pieces.to(self._index_dtype).unsqueeze(1) * block_size
        slots = (slots + torch.arange(block_size, dtype=self._index_dtype)).view(rows, kv_heads, 1, width)
        slots = slots.expand(-1, -1, heads // kv_heads, -1).reshape(-1)
        starts = torch.arange(0, len(slots) + 1, width, dtype=self._index_dtype)
        shape = (rows * heads, self._view.num_slots)
        return torch.sparse_csr_tensor(starts, slots, torch.empty(len(slots)), shape, check_invariants=False)


class GatheredRows(DecodeRows):
    def __init__(self, view: PoolView, scratch: Scratch) -> None:
        super().__init__(view, scratch, _GATHER_BYTES)

    def _attend(self, query: torch.Tensor, group: _Group, layer: int, scaling: float, out: torch.Tensor) -> None:
        scratch, dtype = self._scratch, self._view.spec.dtype
        rows, _, head_dim = query.shape
        batch = rows * self._view.spec.num_kv_heads
        k, v = self._view.gather(group.pieces, layer, batch, scratch)
        q = query.reshape(batch, -1, head_dim)
        shape = (*q.shape[:2], k.shape[1])
        raw = torch.bmm(q, k.transpose(1, 2), out=scratch.get("raw", dtype, *shape))
        scores = scratch.get("scores", torch.float32, *shape)
        by_row = (rows, -1, k.shape[1])
        torch.add(group.bias, raw.view(by_row), alpha=scaling, out=scores.view(by_row))
        probs = torch.softmax(scores, -1, out=scores)
        if dtype != torch.float32:
            probs = scratch.get("raw", dtype, *shape).copy_(scores)
        torch.bmm(probs, v, out=out.view(batch, -1, head_dim))


def decode_rows(view: PoolView, scratch: Scratch) -> DecodeRows:
    """The fastest way for this pool."""
    if view.device.type == "cpu" and view.spec.dtype == torch.float32:
        return InPlaceRows(view, scratch)
    return GatheredRows(view, scratch)
