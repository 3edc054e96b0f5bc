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

WORDS = 4096  # at a time
ROUNDS = 4  # of one program: each ends with additions to one and the same place, which take their turn
WARPS = 8


@triton.jit
def weights_of(position):
    """`position_weights` of int32 or int64 positions, in 32 bits as far as it goes: products are what costs here."""
    index = position.to(tl.uint32)
    mixed = index * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    upper = (mixed ^ (mixed >> 16)) >> 1
    lower = ((index * 0x5851F42D + 0x14057B7E) << 1) | 1
    return ((upper.to(tl.uint64) << 33) | lower.to(tl.uint64)).to(tl.int64, bitcast=True)


@triton.jit
def add_up(sums, scratch_ptr, host_ptr, num_programs):
    """Each of `num_programs` adds its sums, modulo 2^64. The last one tells the host, and leaves zeros for the next
    time."""
    tl.atomic_add(scratch_ptr, tl.sum(sums, 0))
    if tl.atomic_add(scratch_ptr + 1, 1) == num_programs - 1:
        tl.store(host_ptr, tl.atomic_add(scratch_ptr, 0))
        tl.store(scratch_ptr, 0)
        tl.store(scratch_ptr + 1, 0)


@triton.jit(do_not_specialize=["first", "num_words", "num_programs"])
def _sum_kernel(
    words_ptr, scratch_ptr, host_ptr, first, num_words, num_programs, WORDS: tl.constexpr, ROUNDS: tl.constexpr
):
    sums = tl.zeros([WORDS], tl.int64)
    for part in range(ROUNDS):
        at = (tl.program_id(0) * ROUNDS + part) * WORDS + tl.arange(0, WORDS)
        words = tl.load(words_ptr + at, mask=at < num_words, other=0)
        sums += words.to(tl.int64) * weights_of(first + at)
    add_up(sums, scratch_ptr, host_ptr, num_programs)


class Total:
    """Where the programs of a kernel add up. Belongs to one thread and stream."""

    def __init__(self, device: torch.device) -> None:
        self.scratch = torch.zeros(2, dtype=torch.int64, device=device)  # the sum so far, programs that are done
        self.host = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._device = device

    def read(self) -> int:
        """Waits for the kernel."""
        wait_for(self._device)
        return int(self.host)


class CudaSum:
    """Of pieces of int32 words, each with the position of its first one."""

    def __init__(self, device: torch.device) -> None:
        self._total = Total(device)
        words = torch.zeros(8, dtype=torch.int32, device=device)
        for i in range(2):  # compiled now, for both alignments, and not under the first chunk
            self([(words[i:], i)])

    def __call__(self, pieces: list[tuple[Tensor, int]]) -> int:
        """Of word i of a piece times the weight of the piece's position + i, all added up."""
        pieces = [piece for piece in pieces if piece[0].numel()]
        programs = [triton.cdiv(words.numel(), WORDS * ROUNDS) for words, _ in pieces]
        scratch, host = self._total.scratch, self._total.host
        for (words, position), num in zip(pieces, programs, strict=True):
            _sum_kernel[(num,)](
                words,
                scratch,
                host,
                position,
                words.numel(),
                sum(programs),
                WORDS=WORDS,
                ROUNDS=ROUNDS,
                num_warps=WARPS,
            )
        return self._total.read() if pieces else 0
