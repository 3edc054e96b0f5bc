"""Who is next, and may it come in: the order of the line, and what a sequence that waits must find to be admitted."""

from collections.abc import Callable, Iterable

from server.engine.block_tables import BlockTables
from server.engine.grant_gate import GrantGate
from server.engine.limits import Limits
from server.engine.roster import Roster
from server.sequence import SeqState, Sequence


class Admission:
    def __init__(
        self, limits: Limits, tables: BlockTables, roster: Roster, gate: GrantGate, clock: Callable[[], float]
    ) -> None:
        self._gate = gate
        self._limits = limits
        self._tables = tables
        self._roster = roster
        self._clock = clock
        self._starved: Sequence | None = None  # aged, and there were no blocks for it; until it no longer waits

    @property
    def horizon(self) -> float:
        """Who arrived by then is aged: nobody may overtake it."""
        return self._clock() - self._limits.age_limit_s

    def in_line(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        """Swapped ones, then aged ones, both by arrival; then whoever has the least left to compute."""
        horizon = self.horizon

        def place(seq: Sequence) -> tuple[int, float]:
            if seq.state is SeqState.SWAPPED:
                return 0, seq.arrival
            return (1, seq.arrival) if seq.arrival <= horizon else (2, seq.num_pending)

        return sorted(seqs, key=place)

    def candidates(self) -> list[Sequence]:
        """Who would return, and WAITING ones that do not wait for a grant. Without one a sequence is passed by, aged or
        not: were it to hold up those behind it, whose blocks the granting side has reserved, both sides could wait for
        each other for ever."""
        return self.returning() + [seq for seq in self._roster.waiting if seq.generation or not seq.needs_grant]

    def is_idle(self, seq: Sequence) -> bool:
        """Its client does not read: it is not computed until it does. One that was granted since ends with its next
        token, and decode is told; its blocks are a step's or a transfer's, and nobody's to take."""
        paused = self._roster.paused
        return bool(paused) and seq.id in paused and not seq.needs_grant and self._limits.idle_swap_s > 0

    def returning(self) -> list[Sequence]:
        """SWAPPED, with tokens that the client has seen and waits to go on."""
        return [seq for seq in self._roster.swapped if not self.is_idle(seq)]

    def gone_idle(self) -> list[Sequence]:
        """RUNNING, and idle for longer than is allowed."""
        if not self._roster.paused:
            return []
        since, horizon = self._roster.paused, self._clock() - self._limits.idle_swap_s
        running = (seq for seq in self._roster.running if not seq.num_under_way)
        return [seq for seq in running if self.is_idle(seq) and since[seq.id] <= horizon]

    def admit(self, seq: Sequence) -> bool:
        """WAITING or SWAPPED -> RUNNING with blocks for all known tokens, cached ones first. False: not now."""
        was_swapped = seq.state is SeqState.SWAPPED
        if len(self._roster.running) >= self._limits.max_running or not (was_swapped or self._may_pass_expected(seq)):
            return False
        need = self._tables.need(seq)
        if need.num_taken + self._spare(seq) > self._tables.pool.num_free:
            self._starved = seq if seq.arrival <= self.horizon else None
            return False
        seq.num_computed = self._tables.take(seq, need)
        if not was_swapped:
            seq.num_cached = seq.num_computed
        self._roster.move(seq, SeqState.RUNNING)
        return True

    def has_claim_before(self, later: Sequence) -> bool:
        """Whether the next place is of one that came before `later`, is aged and could have its blocks now. Those that
        were granted are started at once, and would have every place for as long as there are any."""
        older = [s for s in self.candidates() if s.arrival < later.arrival and s.arrival <= self.horizon]
        if not older:
            return False
        first = self.in_line(older)[0]
        is_next = first.state is SeqState.SWAPPED or self._may_pass_expected(first)
        return is_next and self._tables.need(first).num_taken + self._spare(first) <= self._tables.pool.num_free

    def admit_ahead(self, seq: Sequence) -> bool:
        """As `admit`, of a prefill half that has no grant and is to run as a local one: it leaves to those with grants
        their turn, and a share of everything."""
        roster, pool, share = self._roster, self._tables.pool, self._limits.ahead_share
        if any(each.needs_grant and each.generation for each in (*roster.waiting, *roster.running)):
            return False
        num_used = pool.num_used + self._tables.blocks_for(seq.num_tokens) + self._gate.num_spare(seq)
        has_place = len(roster.running) < max(1, share * self._limits.max_running)
        return has_place and num_used <= share * pool.num_usable and self.admit(seq)

    def _spare(self, seq: Sequence) -> int:
        """Blocks to leave to others: who decodes will want one soon, or admitting costs a preemption; and a grant is a
        promise of all that its sequence will grow by."""
        if seq.needs_grant:
            return 0
        num_running = len(self._roster.running)
        return max(num_running, self._gate.num_spare(seq)) if self._limits.reserves_growth else num_running

    def _may_pass_expected(self, seq: Sequence) -> bool:
        """An aged sequence that waits to be granted is not overtaken by local prompts."""
        if seq.needs_grant or not self._roster.expected:
            return True
        oldest = self._roster.expected[0].arrival
        return oldest >= seq.arrival or oldest > self.horizon

    def may_be_granted(self) -> list[Sequence]:
        """EXPECTED ones by arrival, without those that would take blocks from a swapped or a starved local one."""
        if self.returning():
            return []
        starved = self._starved
        if starved is None or starved.state is not SeqState.WAITING:
            return list(self._roster.expected)
        return [seq for seq in self._roster.expected if seq.arrival <= starved.arrival]
