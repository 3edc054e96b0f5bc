# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""What `Mover` does on a CUDA device: blocks are moved and summed up in one pass, with one launch and one wait."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.transfer.checksum_cuda import ROUNDS, WARPS, WORDS, Total, add_up, weights_of


@triton.jit(do_not_specialize=["num_programs"])
def _move_kernel(
    piece_ptr, blocks_ptr, ids_ptr, scratch_ptr, host_ptr, block_words, num_programs,
    IS_GATHER: tl.constexpr, WORDS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Row program_id(0) of a piece, from or to block ids[row]; -1: to nowhere."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.load(ids_ptr + row)
    sums = tl.zeros([WORDS], tl.int64)
    for part in range(ROUNDS):
        at = (tl.program_id(1) * ROUNDS + part) * WORDS + tl.arange(0, WORDS)
        is_inside = at < block_words
        in_piece, in_pool = piece_ptr + row * block_words + at, blocks_ptr + block * block_words + at
        if IS_GATHER:
            words = tl.load(in_pool, mask=is_inside, other=0)
            tl.store(in_piece, words, mask=is_inside)
        else:
            words = tl.load(in_piece, mask=is_inside, other=0)
            tl.store(in_pool, words, mask=is_inside & (block >= 0))
        sums += words.to(tl.int64) * weights_of(row * block_words + at)
    add_up(sums, scratch_ptr, host_ptr, num_programs)


class CudaMover:
    """Belongs to one thread and stream. Blocks are whole 32-bit words long, as KV is."""

    def __init__(self, blocks: Tensor) -> None:
        self._blocks = blocks.view(torch.int32)
        self._total = Total(blocks.device)
        row = torch.zeros(1, blocks.shape[1], dtype=torch.uint8, device=blocks.device)
        self.gather([0], row[0])  # compiled now, and not under the first chunk
        self.scatter(row, [-1])

    def gather(self, ids: list[int], target: Tensor) -> int:
        return self._move(target, ids, is_gather=True)

    def scatter(self, source: Tensor, targets: list[int]) -> int:
        """Row i goes to block targets[i]; -1: it is summed up only."""
        return self._move(source, targets, is_gather=False)

    def _move(self, piece: Tensor, ids: list[int], *, is_gather: bool) -> int:
        block_words = self._blocks.shape[1]
        on_host = torch.tensor(ids, dtype=torch.int64, pin_memory=True)  # read from there: a copy would be another wait
        grid = (len(ids), triton.cdiv(block_words, WORDS * ROUNDS))
        _move_kernel[grid](
            piece.view(torch.int32), self._blocks, on_host, self._total.scratch, self._total.host,
            block_words, grid[0] * grid[1], IS_GATHER=is_gather, WORDS=WORDS, ROUNDS=ROUNDS, num_warps=WARPS,
        )  # fmt: skip
        return self._total.read()
