# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The weighted sum of `Checksum` on a CUDA device, in one pass over the bytes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 4096  # of one program
_WARPS = 8


@triton.jit(do_not_specialize=["num_words"])
def _weighted_sum_kernel(words_ptr, weights_ptr, total_ptr, num_words, WORDS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    is_inside = at < num_words
    words = tl.load(words_ptr + at, mask=is_inside, other=0)
    weights = tl.load(weights_ptr + at, mask=is_inside, other=0)
    tl.atomic_add(total_ptr, tl.sum(words.to(tl.int64) * weights, 0))  # wraps, as it has to


def weighted_sum(pieces: list[tuple[Tensor, int]], weights: Tensor) -> Tensor:
    """int64 [1], modulo 2^64: word i of an int32 piece times the weight at the piece's position + i, all added up."""
    total = torch.zeros(1, dtype=torch.int64, device=weights.device)
    for words, position in pieces:
        grid = (triton.cdiv(words.numel(), _WORDS),)
        if words.numel():
            _weighted_sum_kernel[grid](words, weights[position:], total, words.numel(), WORDS=_WORDS, num_warps=_WARPS)
    return total
