# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The weighted sum of `Checksum` on a CUDA device, in one pass over the bytes.

Whoever finishes last writes the sum to the host itself. A copy would wait for the device's copy engine, which is busy
with the chunks that are on their way over NVLink.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.device import wait_for

_WORDS = 4096  # at a time
_ROUNDS = 4  # of one program: each ends with additions to one and the same place, which take their turn
_WARPS = 8


@triton.jit(do_not_specialize=["first", "num_words", "num_programs"])
def _weighted_sum_kernel(
    words_ptr, scratch_ptr, host_ptr, first, num_words, num_programs, WORDS: tl.constexpr, ROUNDS: tl.constexpr
):
    sums = tl.zeros([WORDS], tl.int64)
    for part in range(ROUNDS):
        at = (tl.program_id(0) * ROUNDS + part) * WORDS + tl.arange(0, WORDS)
        words = tl.load(words_ptr + at, mask=at < num_words, other=0)
        # `position_weights`, in 32 bits as far as it goes: products are what costs here.
        index = (first + at).to(tl.uint32)
        mixed = index * 0x9E3779B1
        mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
        mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
        upper = (mixed ^ (mixed >> 16)) >> 1
        lower = ((index * 0x5851F42D + 0x14057B7E) << 1) | 1
        weights = (upper.to(tl.uint64) << 33) | lower.to(tl.uint64)
        sums += words.to(tl.int64) * weights.to(tl.int64, bitcast=True)
    tl.atomic_add(scratch_ptr, tl.sum(sums, 0))  # wraps, as it has to
    if tl.atomic_add(scratch_ptr + 1, 1) == num_programs - 1:
        tl.store(host_ptr, tl.atomic_add(scratch_ptr, 0))


def weighted_sum(pieces: list[tuple[Tensor, int]]) -> Tensor:
    """int64 [1] on the host, modulo 2^64: word i of an int32 piece times the weight of the piece's position + i, all
    added up."""
    pieces = [piece for piece in pieces if piece[0].numel()]
    if not pieces:
        return torch.zeros(1, dtype=torch.int64)
    device = pieces[0][0].device
    host = torch.empty(1, dtype=torch.int64, pin_memory=True)
    scratch = torch.zeros(2, dtype=torch.int64, device=device)  # the sum so far, programs that are done
    programs = [triton.cdiv(words.numel(), _WORDS * _ROUNDS) for words, _ in pieces]
    for (words, position), num in zip(pieces, programs, strict=True):
        _weighted_sum_kernel[(num,)](
            words, scratch, host, position, words.numel(), sum(programs), WORDS=_WORDS, ROUNDS=_ROUNDS, num_warps=_WARPS
        )
    wait_for(device)
    return host
