# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The weighted sum of `Checksum` on a CUDA device: one pass and one launch for all pieces of a chunk."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 4096  # of one program
_WARPS = 8


@triton.jit(do_not_specialize=["num_pieces"])
def _weighted_sum_kernel(pieces_ptr, weights_ptr, total_ptr, num_pieces, WORDS: tl.constexpr):
    """`pieces`: [3, num_pieces] of address, number of words, position of the first word."""
    piece = tl.program_id(1)
    address = tl.load(pieces_ptr + piece)
    num_words = tl.load(pieces_ptr + num_pieces + piece)
    position = tl.load(pieces_ptr + 2 * num_pieces + piece)
    at = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    is_inside = at < num_words
    words = tl.load(address.to(tl.pointer_type(tl.int32)) + at, mask=is_inside, other=0)
    weights = tl.load(weights_ptr + position + at, mask=is_inside, other=0)
    tl.atomic_add(total_ptr, tl.sum(words.to(tl.int64) * weights, 0))  # wraps, as it has to


def weighted_sum(pieces: list[tuple[Tensor, int]], weights: Tensor) -> Tensor:
    """int64 [1], modulo 2^64: word i of an int32 piece times the weight at the piece's position + i, all added up."""
    total = torch.zeros(1, dtype=torch.int64, device=weights.device)
    if not pieces:
        return total
    rows = [[words.data_ptr() for words, _ in pieces], [words.numel() for words, _ in pieces], [at for _, at in pieces]]
    table = torch.tensor(rows, dtype=torch.int64).to(weights.device)
    grid = (triton.cdiv(max(rows[1]), _WORDS), len(pieces))
    _weighted_sum_kernel[grid](table, weights, total, len(pieces), WORDS=_WORDS, num_warps=_WARPS)
    return total
