"""Blocks out of a pool into one piece, and back: what a chunk is at either end.

On a CPU a piece is copied run by run, each a memcpy. On a CUDA device launches and waits are what costs: one kernel
moves all blocks and sums them up on the way. And there a chunk always leaves as one piece: a NIXL write costs about
8 us a piece, whatever its size.
"""

from torch import Tensor

from server.transfer.coverage import adjacent, runs


class Mover:
    """For one pool of uint8 [num_blocks, block_bytes]; belongs to one thread. What it was told to move has been moved
    when it returns."""

    def __init__(self, blocks: Tensor) -> None:
        self.sums = blocks.is_cuda
        self._blocks = blocks
        if self.sums:
            from server.transfer.blocks_cuda import CudaMover

            self._cuda = CudaMover(blocks)

    def gather(self, ids: list[int], target: Tensor) -> int:
        """Blocks `ids`, one after the other, into uint8 [len(ids) * block_bytes]. Their sum of products (`checksum`) if
        it `sums`, else 0."""
        if self.sums:
            return self._cuda.gather(ids, target)
        position = 0
        for first, stop in runs(ids):
            num_bytes = (stop - first) * self._blocks.shape[1]
            target[position : position + num_bytes].copy_(self._blocks[first:stop].view(-1))
            position += num_bytes
        return 0

    def scatter(self, source: Tensor, first: int, positions: list[int], table: list[int]) -> int:
        """Row p - `first` of uint8 [num, block_bytes] into block table[p], for each p of `positions`. The sum of
        products of all rows if it `sums`, else 0."""
        if self.sums:
            targets = [-1] * len(source)
            for p in positions:
                targets[p - first] = table[p]
            return self._cuda.scatter(source, targets)
        for start, stop in adjacent(positions, table):
            target = table[start]
            self._blocks[target : target + stop - start].copy_(source[start - first : stop - first])
        return 0
