"""Blocks out of a pool into one piece, and back: what a chunk is at either end.

On a CPU a piece is copied run by run, each a memcpy. On a CUDA device launches are what costs, so all blocks move in
one; and there a chunk always leaves as one piece: a NIXL write costs about 8 us a piece, whatever its size.
"""

import torch
from torch import Tensor

from server.device import on_device
from server.transfer.coverage import adjacent, runs


def gather(blocks: Tensor, ids: list[int], target: Tensor) -> None:
    """Blocks `ids` of uint8 [num_blocks, block_bytes], one after the other, into uint8 [len(ids) * block_bytes]."""
    if blocks.is_cuda:
        rows = _wide(target.view(len(ids), -1))
        torch.index_select(_wide(blocks), 0, on_device(ids, torch.long, blocks.device), out=rows)
        return
    position = 0
    for first, stop in runs(ids):
        num_bytes = (stop - first) * blocks.shape[1]
        target[position : position + num_bytes].copy_(blocks[first:stop].view(-1))
        position += num_bytes


def scatter(source: Tensor, first: int, positions: list[int], table: list[int], blocks: Tensor) -> None:
    """Row p - `first` of uint8 [num, block_bytes] into block table[p], for each p of `positions`."""
    if blocks.is_cuda:
        rows = _wide(source)[: len(positions)]
        if positions[-1] - first >= len(positions):  # not the leading rows
            rows = _wide(source)[on_device([p - first for p in positions], torch.long, blocks.device)]
        ids = on_device([table[p] for p in positions], torch.long, blocks.device)
        _wide(blocks).index_copy_(0, ids, rows)
        return
    for start, stop in adjacent(positions, table):
        target = table[start]
        blocks[target : target + stop - start].copy_(source[start - first : stop - first])


def _wide(rows: Tensor) -> Tensor:
    """The same bytes in the widest words that fit: the device's kernels work word by word."""
    return rows.view(torch.int64 if rows.shape[1] % 8 == 0 else torch.int32)
