# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Paged attention of decode rows, in Triton: one query token a row over its blocks.

A program takes one row and one KV head, and of its context a share (split) where that fills the device or keeps a long
context from being the last to end. Everything it needs lies in the step's buffer on the device, so a step needs no
planning on the host. Shares are joined by a second kernel; a row with one share is done after the first.

Imported on CUDA only.
"""

import torch
import triton
import triton.language as tl

NO_ROW = -1  # in place of where a row's blocks begin: nothing is read or written for it

_TILE = 64  # tokens
_LOG2E = 1.4426950408889634


def most_shares(rows: int) -> tuple[int, int]:
    """(most shares of a row, least tokens of a share): many where rows are few, else only for long contexts."""
    if rows <= 8:
        return 32, _TILE
    return (8, 256) if rows <= 32 else (4, 4096)


@triton.jit
def _range(length, split, window: tl.constexpr, splits: tl.constexpr, least: tl.constexpr, tile: tl.constexpr):
    """(first token seen, start and stop of this share, number of shares)"""
    low = length * 0
    if window > 0:
        low = tl.maximum(length - window, 0)
    base = low // tile * tile
    shares = tl.minimum(tl.maximum((length - base) // least, 1), splits)
    share = tl.cdiv(tl.cdiv(length - base, shares), tile) * tile
    start = base + split * share
    return low, start, tl.minimum(start + share, length), tl.cdiv(length - base, share)


@triton.jit
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, part_ptr, weight_ptr, positions_ptr, starts_ptr, blocks_ptr, scale,
    num_kv_heads, stride_block, stride_head,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(positions_ptr + row) + 1
    begin = tl.load(starts_ptr + row)
    low, start, stop, used = _range(length, split, WINDOW, SPLITS, LEAST, TILE)
    if (begin >= 0) & (start < stop):
        table = blocks_ptr + begin
        group, dim, tile = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, TILE)
        heads = row * num_kv_heads * GROUP + head * GROUP + group
        mask = group[:, None] < GROUP
        q = tl.load(q_ptr + heads[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
        top = tl.full((ROWS,), -1e30, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        sums = tl.zeros((ROWS, DIM), tl.float32)
        for first in range(start, stop, TILE):
            at = first + tile
            inside = (at >= low) & (at < stop)
            block = tl.load(table + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            place = block * stride_block + head * stride_head + (at % BLOCK_SIZE) * DIM
            k = tl.load(k_ptr + place[None, :] + dim[:, None], mask=inside[None, :], other=0.0)
            scores = tl.where(inside[None, :], tl.dot(q, k) * scale, -1e30)
            new_top = tl.maximum(top, tl.max(scores, 1))
            probs = tl.exp2(scores - new_top[:, None])
            decay = tl.exp2(top - new_top)
            total = total * decay + tl.sum(probs, 1)
            v = tl.load(v_ptr + place[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
            sums = tl.dot(probs.to(v.dtype), v, sums * decay[:, None])
            top = new_top
        result = sums / total[:, None]
        if used == 1:
            tl.store(out_ptr + heads[:, None] * DIM + dim[None, :], result.to(q.dtype), mask=mask)
        else:
            at = heads * SPLITS + split
            tl.store(part_ptr + at[:, None] * DIM + dim[None, :], result, mask=mask)
            tl.store(weight_ptr + at, top + tl.log2(total), mask=group < GROUP)


@triton.jit
def _join_kernel(
    part_ptr, weight_ptr, out_ptr, positions_ptr, starts_ptr, num_heads,
    DIM: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(positions_ptr + row) + 1
    begin = tl.load(starts_ptr + row)
    _, _, _, used = _range(length, 0, WINDOW, SPLITS, LEAST, TILE)
    if (begin >= 0) & (used > 1):
        split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM)
        at = (row * num_heads + head) * SPLITS + split
        weight = tl.load(weight_ptr + at, mask=split < used, other=-1e30)
        weight = tl.exp2(weight - tl.max(weight, 0))
        part = tl.load(part_ptr + at[:, None] * DIM + dim[None, :], mask=(split < used)[:, None], other=0.0)
        result = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
        tl.store(out_ptr + (row * num_heads + head) * DIM + dim, result.to(out_ptr.dtype.element_ty))


def attend_decode(
    query: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    starts: torch.Tensor,
    blocks: torch.Tensor,
    scaling: float,
    window: int | None,
    out: torch.Tensor,
    shares: tuple[int, int] | None = None,
) -> None:
    """`query` and `out` are [rows, heads, head_dim], contiguous; row i is the token at `positions[i]` of a sequence
    whose blocks begin at `blocks[starts[i]]`. `kv` are the views of `KVCachePool.layer`. `shares` as `most_shares`
    gives them, where `rows` does not say how many rows there are."""
    k, v = kv
    rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = k.shape[1], k.shape[2]
    group = num_heads // num_kv_heads
    splits, least = shares or most_shares(rows)
    part = torch.empty(rows * num_heads * splits * head_dim, dtype=torch.float32, device=query.device)
    weight = torch.empty(rows * num_heads * splits, dtype=torch.float32, device=query.device)
    _attend_kernel[(rows, num_kv_heads, splits)](
        query, k, v, out, part, weight, positions, starts, blocks, scaling * _LOG2E,
        num_kv_heads, k.stride(0), k.stride(1),
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), DIM=head_dim, BLOCK_SIZE=block_size, TILE=_TILE,
        WINDOW=window or 0, SPLITS=splits, LEAST=least, num_warps=2, num_stages=3,
    )  # fmt: skip
    _join_kernel[(rows, num_heads)](
        part, weight, out, positions, starts, num_heads,
        DIM=head_dim, TILE=_TILE, WINDOW=window or 0, SPLITS=splits, LEAST=least, num_warps=1,
    )  # fmt: skip
