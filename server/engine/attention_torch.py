"""Paged attention in plain torch, made for a CPU core.

KV is gathered from its blocks into reused scratch memory. Decode rows go in a few groups of like length, as two batched
matmuls with the queries of one KV head as rows, [rows, kv_heads, group, head_dim], and scores in float32 between them.
Prompt rows go through torch's flash attention, in tiles of queries: it computes what a mask hides, so that a tile ends
the keys at its own last query.
"""

import torch
import torch.nn.functional as F  # noqa: N812

from server.engine.attention import BatchMeta
from server.engine.kv_cache import KVCachePool

_GATHER_BYTES = 8 * 2**20  # of K, and again of V, for one group of decode rows
_TILE = 128  # queries of a prompt
_PADDING = 1.5  # a group pads its rows to at most this many times their own length


class _Scratch:
    """Named buffers that only grow: the kernel would map and zero fresh ones of this size each time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def get(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        need = 1
        for size in shape:
            need *= size
        have = self._buffers.get(name)
        if have is None or have.numel() < need:
            have = torch.empty(need + need // 4, dtype=dtype, device=self._device)
            self._buffers[name] = have
        return have[:need].view(shape)


class _Attend:
    """softmax(scaling * q k^T + bias) v over scratch memory, for [batch, rows, head_dim] queries."""

    def __init__(self, scratch: _Scratch, dtype: torch.dtype) -> None:
        self._scratch = scratch
        self._dtype = dtype

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scaling: float, out: torch.Tensor
    ) -> None:
        """`bias` is float32, [batch', 1, kv] or [1, rows', kv] where batch' divides batch and rows' divides rows."""
        batch, rows, _ = q.shape
        kv = k.shape[1]
        raw = torch.bmm(q, k.transpose(1, 2), out=self._scratch.get("raw", self._dtype, batch, rows, kv))
        scores = self._scratch.get("scores", torch.float32, batch, rows, kv)
        shape = (bias.shape[0], -1, kv) if bias.shape[1] == 1 else (-1, bias.shape[1], kv)
        torch.add(bias, raw.view(shape), alpha=scaling, out=scores.view(shape))
        probs = torch.softmax(scores, -1, out=scores)
        if self._dtype != torch.float32:
            probs = self._scratch.get("raw", self._dtype, batch, rows, kv).copy_(scores)
        torch.bmm(probs, v, out=out)


class _DecodeGroup:
    """Rows [start, stop) of one token each, padded to `width` gathered slots."""

    def __init__(self, start: int, stop: int, index: torch.Tensor, bias: torch.Tensor) -> None:
        self.start = start
        self.stop = stop
        self.index = index  # pieces to gather, [rows * kv_heads * blocks]
        self.bias = bias  # [rows, 1, width]: 0, or -inf where a row has nothing to see


class _PromptTile:
    """Query tokens [start, stop) of the packed batch, which see the gathered slots [low, high)."""

    def __init__(self, start: int, stop: int, low: int, high: int, bias: torch.Tensor) -> None:
        self.start = start
        self.stop = stop
        self.low = low
        self.high = high
        self.bias = bias  # [queries, high - low]


class _Prompt:
    """One sequence with several query tokens: what to gather, and its tiles."""

    def __init__(self, index: torch.Tensor, tiles: list[_PromptTile]) -> None:
        self.index = index
        self.tiles = tiles


class TorchAttention:
    """An AttentionBackend for any device torch has; fast on CPUs."""

    def __init__(self, pool: KVCachePool) -> None:
        self.spec = pool.spec
        spec, data = pool.spec, pool.data
        self._device = data.device
        # One layer's K (or V) of one block and head is one contiguous piece; its rows are token slots. A layer is a
        # shift of the flat view, so that one index serves all layers.
        self._pieces = data.view(-1, spec.block_size * spec.head_dim)
        self._slots = data.view(-1, spec.head_dim)
        self._heads = torch.arange(spec.num_kv_heads, device=self._device)
        self._scratch = _Scratch(self._device)
        self._attend = _Attend(self._scratch, spec.dtype)
        self._groups: list[_DecodeGroup] = []
        self._prompts: list[_Prompt] = []
        self._slots_by_head = self._slots_by_token = torch.empty(0, dtype=torch.long)

    # -- plan ---------------------------------------------------------------------------------------------------------

    def plan(self, meta: BatchMeta) -> None:
        self._plan_slots(meta)
        self._groups = [self._decode_group(meta, a, b) for a, b in self._split(meta.context_lens[: meta.num_decode])]
        self._prompts = [self._prompt(meta, row) for row in range(meta.num_decode, len(meta.context_lens))]

    def _plan_slots(self, meta: BatchMeta) -> None:
        spec = self.spec
        slots = torch.tensor(meta.slot_mapping, device=self._device)
        block, offset = slots // spec.block_size, slots % spec.block_size
        pieces = self._piece_index(block)  # [kv_heads, tokens]
        by_head = pieces * spec.block_size + offset
        self._slots_by_head = by_head.reshape(-1)
        self._slots_by_token = by_head.t().reshape(-1)

    def _piece_index(self, blocks: torch.Tensor) -> torch.Tensor:
        """Pieces of layer 0's K for every KV head: [..., n] -> [..., kv_heads, n]."""
        per_head = 2 * self.spec.num_layers
        return (blocks.unsqueeze(-2) * self.spec.num_kv_heads + self._heads.unsqueeze(-1)) * per_head

    def _span(self, context_len: int, first_query: int) -> tuple[int, int]:
        """Blocks [first, last) of a row that its queries from position `first_query` on can see."""
        window = self.spec.sliding_window
        low = 0 if window is None else max(0, first_query + 1 - window)
        return low // self.spec.block_size, self.spec.num_blocks_for(context_len)

    def _split(self, lens: list[int]) -> list[tuple[int, int]]:
        """Groups of rows, longest first, that pad little and gather no more than _GATHER_BYTES."""
        spec = self.spec
        token_bytes = spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize
        seen = [spec.block_size * (last - first) for first, last in (self._span(n, n - 1) for n in lens)]
        groups: list[tuple[int, int]] = []
        start = 0
        for i in range(1, len(lens) + 1):
            if (
                i == len(lens)
                or seen[start] > _PADDING * seen[i] + 4 * spec.block_size
                or (i + 1 - start) * seen[start] * token_bytes > _GATHER_BYTES
            ):
                groups.append((start, i))
                start = i
        return groups

    def _decode_group(self, meta: BatchMeta, start: int, stop: int) -> _DecodeGroup:
        lens = meta.context_lens[start:stop]
        spans = [self._span(n, n - 1) for n in lens]
        width = max(last - first for first, last in spans)
        tables = [
            meta.block_tables[start + i][first:last] + [0] * (width - last + first)
            for i, (first, last) in enumerate(spans)
        ]
        index = self._piece_index(torch.tensor(tables, device=self._device)).reshape(-1)
        firsts = torch.tensor([first for first, _ in spans], device=self._device).unsqueeze(1) * self.spec.block_size
        position = firsts + torch.arange(width * self.spec.block_size, device=self._device)
        last_seen = torch.tensor(lens, device=self._device).unsqueeze(1) - 1
        return _DecodeGroup(start, stop, index, self._bias(last_seen, position).unsqueeze(1))

    def _bias(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        hidden = key > query
        if self.spec.sliding_window is not None:
            hidden |= key <= query - self.spec.sliding_window
        return torch.zeros(hidden.shape, device=self._device).masked_fill_(hidden, float("-inf"))

    def _prompt(self, meta: BatchMeta, row: int) -> _Prompt:
        begin, end, context = meta.query_starts[row], meta.query_starts[row + 1], meta.context_lens[row]
        past = context - (end - begin)
        first, last = self._span(context, past)
        index = self._piece_index(torch.tensor(meta.block_tables[row][first:last], device=self._device)).reshape(-1)
        origin = first * self.spec.block_size  # position of the first gathered slot
        tiles = []
        for start in range(begin, end, _TILE):
            stop = min(start + _TILE, end)
            position = past + start - begin
            query = torch.arange(position, position + stop - start, device=self._device).unsqueeze(1)
            low = self._span(context, position)[0] * self.spec.block_size - origin
            high = past + stop - begin - origin
            bias = self._bias(query, origin + torch.arange(low, high, device=self._device))
            tiles.append(_PromptTile(start, stop, low, high, bias))
        return _Prompt(index, tiles)

    # -- run ----------------------------------------------------------------------------------------------------------

    def run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scaling: float
    ) -> torch.Tensor:
        self._write(key[0], value[0], layer)
        _, num_heads, num_tokens, head_dim = query.shape
        out = self._scratch.get("out", self.spec.dtype, num_tokens, num_heads, head_dim)
        for group in self._groups:
            self._run_decode(query[0, :, group.start : group.stop], group, layer, scaling, out)
        for prompt in self._prompts:
            self._run_prompt(query[0], prompt, layer, scaling, out)
        return out.unsqueeze(0)

    def _write(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        """[kv_heads, tokens, head_dim]. K comes out of the rotation by head, V out of its projection by token: each
        is taken in the order it lies in."""
        shift = 2 * layer * self.spec.block_size
        self._slots[shift:].index_copy_(0, self._slots_by_head, key.reshape(-1, self.spec.head_dim))
        shift += self.spec.block_size
        by_token = value.transpose(0, 1).reshape(-1, self.spec.head_dim)
        self._slots[shift:].index_copy_(0, self._slots_by_token, by_token)

    def _gather(self, index: torch.Tensor, layer: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, [batch, slots, head_dim], contiguous."""
        spec = self.spec
        shape = (index.numel(), spec.block_size * spec.head_dim)
        k = torch.index_select(self._pieces[2 * layer :], 0, index, out=self._scratch.get("k", spec.dtype, *shape))
        v = torch.index_select(self._pieces[2 * layer + 1 :], 0, index, out=self._scratch.get("v", spec.dtype, *shape))
        return k.view(batch, -1, spec.head_dim), v.view(batch, -1, spec.head_dim)

    def _run_decode(
        self, query: torch.Tensor, group: _DecodeGroup, layer: int, scaling: float, out: torch.Tensor
    ) -> None:
        """`query` is [heads, rows, head_dim]."""
        rows, kv_heads, head_dim = group.stop - group.start, self.spec.num_kv_heads, self.spec.head_dim
        k, v = self._gather(group.index, layer, rows * kv_heads)
        q = query.transpose(0, 1).reshape(rows * kv_heads, -1, head_dim)
        self._attend(q, k, v, group.bias, scaling, out[group.start : group.stop].view(rows * kv_heads, -1, head_dim))

    def _run_prompt(self, query: torch.Tensor, prompt: _Prompt, layer: int, scaling: float, out: torch.Tensor) -> None:
        """`query` is [heads, tokens, head_dim], all of the packed batch."""
        k, v = (kv.unsqueeze(0) for kv in self._gather(prompt.index, layer, self.spec.num_kv_heads))
        for tile in prompt.tiles:
            attended = F.scaled_dot_product_attention(
                query[:, tile.start : tile.stop].unsqueeze(0),
                k[:, :, tile.low : tile.high],
                v[:, :, tile.low : tile.high],
                attn_mask=tile.bias,
                scale=scaling,
                enable_gqa=True,
            )
            out[tile.start : tile.stop].copy_(attended[0].transpose(0, 1))
