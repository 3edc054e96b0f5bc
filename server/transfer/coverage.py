"""Which blocks of a sequence are there: pure bookkeeping over ranges of block positions."""

from server.transfer.base import Range


class Coverage:
    """Of the positions [first, first + num_blocks) of a block table."""

    def __init__(self, first: int, num_blocks: int) -> None:
        self.first = first
        self.num_blocks = num_blocks
        self.num_covered = 0
        self._covered = bytearray(num_blocks)

    @property
    def is_complete(self) -> bool:
        return self.num_covered == self.num_blocks

    @property
    def prefix(self) -> int:
        """Positions from 0 on without a gap; what lies before `first` was there already."""
        gap = self._covered.find(0)
        return self.first + (self.num_blocks if gap < 0 else gap)

    def fits(self, first: int, num_blocks: int) -> bool:
        return num_blocks > 0 and self.first <= first and first + num_blocks <= self.first + self.num_blocks

    def lacking(self, first: int, num_blocks: int) -> list[int]:
        """Positions of [first, first + num_blocks) that are not covered yet."""
        return [p for p in range(first, first + num_blocks) if not self._covered[p - self.first]]

    def cover(self, positions: list[int]) -> None:
        """`positions` as `lacking` gave them."""
        for position in positions:
            self._covered[position - self.first] = 1
        self.num_covered += len(positions)

    def missing(self) -> tuple[Range, ...]:
        ranges: list[Range] = []
        start = self._covered.find(0)
        while start >= 0:
            stop = self._covered.find(1, start)
            stop = self.num_blocks if stop < 0 else stop
            ranges.append((self.first + start, self.first + stop))
            start = self._covered.find(0, stop)
        return tuple(ranges)


def runs(ids: list[int]) -> list[Range]:
    """[7, 8, 9, 3] -> [(7, 10), (3, 4)]."""
    found: list[Range] = []
    for block in ids:
        if found and found[-1][1] == block:
            found[-1] = (found[-1][0], block + 1)
        else:
            found.append((block, block + 1))
    return found


def adjacent(positions: list[int], table: list[int]) -> list[Range]:
    """Ranges of positions whose blocks lie side by side in the pool: one copy each."""
    ranges: list[Range] = []
    for p in positions:
        if ranges and ranges[-1][1] == p and table[p] == table[p - 1] + 1:
            ranges[-1] = (ranges[-1][0], p + 1)
        else:
            ranges.append((p, p + 1))
    return ranges


def union(ranges: list[Range]) -> list[Range]:
    """Sorted, without overlaps."""
    merged: list[Range] = []
    for first, stop in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((first, stop))
    return merged
