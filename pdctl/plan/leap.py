"""The real Scheduler, with one thing more: many steps at once while nothing but decoding can happen.

Between two events a worker that only decodes does the same step again and again. `num_steady` says for how many steps
that holds, `leap` does them: every sequence ends where step by step it would have (tests/plan/test_leap.py compares).
"""

from server.engine.scheduler import Scheduler
from server.sequence import Sequence


class LeapingScheduler(Scheduler):
    """For simulation: tokens are all 0, and sequences end by length."""

    def num_steady(self) -> int:
        """Steps from now that compute one token for everyone who runs, and end nobody. 0 when that is not so."""
        roster = self._roster
        running = roster.running
        if not running or roster.waiting or roster.received or self._under_way:
            return 0
        if len(running) > self.limits.token_budget:
            return 0
        steps = min(seq.params.max_tokens - len(seq.output) for seq in running) - 1
        # One token pending and no output: the last of a prompt, whose first token is still to be seen.
        if steps < 1 or any(seq.num_pending != 1 or not seq.output for seq in running):
            return 0
        # Each takes at most one block more than its whole ones: enough of them, or no leap at all.
        size = self._tables.pool.block_size
        if self._tables.pool.num_free < len(running) * (steps // size + 1):
            return 0
        return steps

    @property
    def is_open(self) -> bool:
        """Whether it grants: no high mark was passed."""
        return self._gate.is_open

    @property
    def running(self) -> list[Sequence]:
        return self._roster.running

    def leap(self, num_steps: int) -> None:
        """`num_steps` of the steady ones."""
        tables, size = self._tables, self._tables.pool.block_size
        tokens = [0] * num_steps
        for seq in self._roster.running:
            seq.output += tokens
            seq.num_computed += num_steps
            missing = -(-seq.num_computed // size) - len(seq.block_table)
            if missing > 0:
                seq.block_table += tables.pool.allocate(missing)
            tables.wrote(seq, seq.num_computed - num_steps, seq.num_computed)
