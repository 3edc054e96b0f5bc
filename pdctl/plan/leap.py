"""The real Scheduler, with one thing more: many steps at once while nothing but decoding can happen.

Between two events a worker that only decodes does the same step again and again. `num_steady` says for how many steps
that holds, `leap` does them: every sequence ends when step by step it would have (tests/plan/test_leap.py compares).
"""

from server.engine.scheduler import Scheduler
from server.sequence import Sequence


class LeapingScheduler(Scheduler):
    """For simulation: tokens are all 0, and sequences end by length."""

    def num_steady(self) -> int:
        """Steps from now that compute one token for everyone who runs, of which only the last may be somebody's last.
        0 when that is not so. Who is in line to run does so from now on, as schedule() would have it."""
        self._start_received()
        roster, running = self._roster, self._roster.running
        if not running or roster.waiting or roster.received or roster.swapped or self._under_way:
            return 0
        if len(running) > self.limits.token_budget:
            return 0
        steps = 1 << 30
        for seq in running:
            num_output = len(seq.output)
            # One token pending and no output: the last of a prompt, whose first token is still to be seen.
            if not num_output or len(seq.prompt) + num_output - seq.num_computed != 1:
                return 0
            steps = min(steps, seq.params.max_tokens - num_output)
        # Each takes at most one block more than its whole ones: enough of them, or no leap at all.
        size = self._tables.pool.block_size
        if self._tables.pool.num_free < len(running) * (steps // size + 1):
            return 0
        return steps

    def grow(self) -> None:
        """The blocks that a steady step writes to, as schedule() takes them."""
        for seq in self._roster.running:
            if not self._tables.num_slots(seq):
                self._tables.grow(seq)

    @property
    def is_open(self) -> bool:
        """Whether it grants: no high mark was passed."""
        return self._gate.is_open

    @property
    def running(self) -> list[Sequence]:
        return self._roster.running

    def leap(self, num_steps: int) -> list[Sequence]:
        """`num_steps` of the steady ones. Whom they ended."""
        tables, size = self._tables, self.pool.block_size
        tokens, ended = [0] * num_steps, []
        for seq in self._roster.running:
            seq.output += tokens
            seq.num_computed = stop = seq.num_computed + num_steps
            missing = -(-stop // size) - len(seq.block_table)
            if missing > 0:
                tables.grow(seq, missing)
            tables.wrote(seq, stop - num_steps, stop)
            if len(seq.output) >= seq.params.max_tokens:
                ended.append(seq)
        for seq in ended:
            seq.finish_reason = "length"
            self._end(seq)
        return ended
