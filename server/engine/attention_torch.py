"""Paged attention in plain torch, made for a CPU core.

Decode rows are `decode_rows`'s. KV of a prompt is gathered from its blocks into reused scratch memory and goes through
torch's flash attention, in tiles of queries: it computes what a mask hides, so that a tile ends the keys at its own
last query.
"""

import torch
import torch.nn.functional as F  # noqa: N812

from server.engine.attention import BatchMeta
from server.engine.decode_rows import decode_rows
from server.engine.kv_cache import KVCachePool
from server.engine.pool_view import PoolView, Scratch

_TILE = 128  # queries of a prompt


class _Tile:
    """Query tokens [start, stop) of the packed batch, which see the gathered slots [low, high)."""

    def __init__(self, start: int, stop: int, low: int, high: int, bias: torch.Tensor) -> None:
        self.start = start
        self.stop = stop
        self.low = low
        self.high = high
        self.bias = bias  # [queries, high - low]


class _Prompt:
    """One sequence with several query tokens: what to gather, and its tiles."""

    def __init__(self, index: torch.Tensor, tiles: list[_Tile]) -> None:
        self.index = index
        self.tiles = tiles


class TorchAttention:
    """An AttentionBackend for any device torch has; fast on CPUs."""

    def __init__(self, pool: KVCachePool) -> None:
        self.spec = pool.spec
        self._view = PoolView(pool)
        self._scratch = Scratch(self._view.device)
        self._decode = decode_rows(self._view, self._scratch)
        self._prompts: list[_Prompt] = []
        self._slots_by_head = self._slots_by_token = torch.empty(0, dtype=torch.long)

    # -- plan ---------------------------------------------------------------------------------------------------------

    def plan(self, meta: BatchMeta) -> None:
        by_head = self._view.slot_index(torch.tensor(meta.slot_mapping, device=self._view.device))
        self._slots_by_head = by_head.reshape(-1)
        self._slots_by_token = by_head.t().reshape(-1)
        self._decode.plan(meta)
        self._prompts = [self._prompt(meta, row) for row in range(meta.num_decode, len(meta.context_lens))]

    def _prompt(self, meta: BatchMeta, row: int) -> _Prompt:
        view, device = self._view, self._view.device
        begin, end, context = meta.query_starts[row], meta.query_starts[row + 1], meta.context_lens[row]
        past = context - (end - begin)
        first, last = view.span(context, past)
        index = view.piece_index(torch.tensor(meta.block_tables[row][first:last], device=device)).reshape(-1)
        origin = first * self.spec.block_size  # position of the first gathered slot
        tiles = []
        for start in range(begin, end, _TILE):
            stop = min(start + _TILE, end)
            position = past + start - begin
            query = torch.arange(position, position + stop - start, device=device).unsqueeze(1)
            low = view.span(context, position)[0] * self.spec.block_size - origin
            high = past + stop - begin - origin
            bias = view.bias(query, origin + torch.arange(low, high, device=device))
            tiles.append(_Tile(start, stop, low, high, bias))
        return _Prompt(index, tiles)

    # -- run ----------------------------------------------------------------------------------------------------------

    def run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scaling: float
    ) -> torch.Tensor:
        self._write(key[0], value[0], layer)
        _, num_heads, num_tokens, head_dim = query.shape
        out = self._scratch.get("out", self.spec.dtype, num_tokens, num_heads, head_dim)
        self._decode.run(query[0], layer, scaling, out)
        for prompt in self._prompts:
            self._run_prompt(query[0], prompt, layer, scaling, out)
        return out.unsqueeze(0)

    def _write(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> None:
        """[kv_heads, tokens, head_dim]. K comes out of the rotation by head, V out of its projection by token: each
        is taken in the order it lies in."""
        self._view.keys[layer].index_copy_(0, self._slots_by_head, key.reshape(-1, self.spec.head_dim))
        by_token = value.transpose(0, 1).reshape(-1, self.spec.head_dim)
        self._view.values[layer].index_copy_(0, self._slots_by_token, by_token)

    def _run_prompt(self, query: torch.Tensor, prompt: _Prompt, layer: int, scaling: float, out: torch.Tensor) -> None:
        """`query` is [heads, tokens, head_dim], all of the packed batch."""
        gathered = self._view.gather(prompt.index, layer, self.spec.num_kv_heads, self._scratch)
        k, v = (kv.unsqueeze(0) for kv in gathered)
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
