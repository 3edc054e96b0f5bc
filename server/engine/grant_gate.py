"""When a decode worker promises blocks: watermarks with hysteresis over what it holds, promised and will grow by."""

from collections import deque
from collections.abc import Iterable
from itertools import chain

from server.engine.block_tables import BlockTables
from server.engine.limits import Limits
from server.engine.roster import Roster
from server.sequence import Sequence

_PRIOR_TOKENS = 256  # believed until enough sequences have ended here
_MIN_SAMPLES = 16
_WINDOW = 512


class OutputLengths:
    """The 90th percentile of the outputs that ended lately."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=_WINDOW)
        self._p90: int | None = None

    def add(self, num_tokens: int) -> None:
        self._lengths.append(num_tokens)
        self._p90 = None

    @property
    def p90(self) -> int:
        if self._p90 is None:
            lengths = sorted(self._lengths)
            self._p90 = lengths[len(lengths) * 9 // 10] if len(lengths) >= _MIN_SAMPLES else _PRIOR_TOKENS
        return self._p90


class GrantGate:
    """Open until a pass ends above a low mark and someone had to wait; then shut until both are at their low marks.

    So smaller ones pass a prompt too large for now, until it is aged; and below the low marks nothing shuts. An empty
    pool grants whatever fits it, marks or not.
    """

    def __init__(self, limits: Limits, tables: BlockTables, roster: Roster) -> None:
        self.is_open = True
        self.lengths = OutputLengths()
        self._limits = limits
        self._tables = tables
        self._roster = roster

    @property
    def num_reserved(self) -> int:
        """Blocks that the sequences here are yet to grow by."""
        roster, p90, most = self._roster, self.lengths.p90, self._most_tokens
        size = self._tables.pool.block_size
        everybody = chain(roster.running, roster.receiving.values(), roster.received)
        return sum([_growth(seq, p90, most, size, len(seq.block_table)) for seq in everybody])

    def num_spare(self, seq: Sequence) -> int:
        """Blocks beside those of its known tokens that everybody's growth takes once `seq` runs too. Alone it is given
        what there is."""
        if not (self._roster.running or self._roster.receiving or self._roster.received):
            return 0
        return self.num_reserved + self._growth(seq, self._tables.blocks_for(seq.num_tokens))

    @property
    def is_low(self) -> bool:
        """Under both low marks: more could come than is asked for."""
        return self._is_low(self._tables.pool.num_used + self.num_reserved)

    def grant(self, seqs: Iterable[Sequence], horizon: float) -> list[Sequence]:
        """Gives blocks to those of `seqs` that may have them now. One older than `horizon` is not passed by others."""
        committed = self._tables.pool.num_used + self.num_reserved
        self.is_open = self.is_open or self._is_low(committed)
        granted: list[Sequence] = []
        is_refused = False
        for seq in seqs:
            taken = self._take(seq, committed)
            committed += taken
            if taken:
                granted.append(seq)
                continue
            is_refused = True
            if seq.arrival <= horizon:
                break
        if is_refused and not self._is_low(committed):
            self.is_open = False
        return granted

    def _take(self, seq: Sequence, committed: int) -> int:
        """Blocks committed to `seq` from now on, 0 when it has to wait."""
        is_empty = not self._tables.pool.num_used
        if not (self.is_open or is_empty):
            return 0
        need = self._tables.need(seq)
        total = need.num_taken + self._growth(seq, len(need.hits) + need.num_new)
        if need.num_taken > self._tables.pool.num_free or not (is_empty or self._has_room(committed + total)):
            return 0
        seq.num_resident_blocks = self._tables.take(seq, need) // self._tables.pool.block_size
        return total

    def _growth(self, seq: Sequence, num_blocks: int) -> int:
        return _growth(seq, self.lengths.p90, self._most_tokens, self._tables.pool.block_size, num_blocks)

    @property
    def _most_tokens(self) -> int:
        """Of one sequence."""
        return min(self._limits.max_len, self._tables.capacity)

    def _has_room(self, num_committed: int) -> bool:
        num_queued, limits = len(self._roster.received), self._limits
        return num_committed <= limits.kv_high * self._tables.pool.num_usable and num_queued <= limits.queue_high

    def _is_low(self, num_committed: int) -> bool:
        num_queued, limits = len(self._roster.received), self._limits
        return num_committed <= limits.kv_low * self._tables.pool.num_usable and num_queued <= limits.queue_low


def _growth(seq: Sequence, p90: int, most_tokens: int, block_size: int, num_blocks: int) -> int:
    """Blocks that a sequence with `num_blocks` is yet to take. Called for each that is here at every grant."""
    if seq.needs_grant:
        return 0
    output = max(len(seq.output) + 1, min(seq.params.max_tokens, p90))
    tokens = min(len(seq.prompt) + output, most_tokens)
    return max(0, -(-tokens // block_size) - num_blocks)
