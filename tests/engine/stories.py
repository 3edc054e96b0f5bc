"""What scheduler stories are told with: a clock that is set by hand, short sequences, one checked step."""

from server.engine.block_pool import BlockPool
from server.engine.host_pool import Copy, HostPool
from server.engine.scheduler import Limits, Scheduler, Step
from server.sequence import Batch, SamplingParams, SeqId, Sequence, Token


class Story:
    """A scheduler over blocks of four tokens. Prompts differ from their first token unless `prompt` is given."""

    def __init__(self, num_blocks: int = 65, prefix_cache: bool = True, host_blocks: int = 0, **limits: float) -> None:
        self.now = 0.0
        self.limits = Limits(token_budget=64, chunk_tokens=16)
        for name, value in limits.items():
            setattr(self.limits, name, value)
        self.pool = BlockPool(num_blocks, 4, prefix_cache, HostPool(host_blocks))
        self.copies: list[Copy] = []  # of the last schedule()
        self.scheduler = Scheduler(self.limits, self.pool, lambda: self.now)
        self._num_seqs = 0

    def seq(
        self, length: int = 8, *, prompt: list[int] | None = None, max_tokens: int = 100, **fields: object
    ) -> Sequence:
        self._num_seqs += 1
        tokens = prompt or [1000 + self._num_seqs] * length
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(0,))
        seq = Sequence(SeqId("story", self._num_seqs, 0), tokens, params, self.now)
        for name, value in fields.items():
            setattr(seq, name, value)
        return seq

    def add(self, *seqs: Sequence) -> None:
        for seq in seqs:
            self.scheduler.add(seq)

    def schedule(self) -> Batch:
        batch = self.scheduler.schedule()
        self.copies = self.scheduler.take_copies()
        self.scheduler.check_integrity()
        return batch

    def update(self, batch: Batch, token: int = 7) -> list[Step]:
        tokens = [Token(token) if piece.samples else None for piece in batch.slices]
        steps = self.scheduler.update(batch, tokens)
        self.scheduler.check_integrity()
        return steps

    def step(self, token: int = 7) -> list[Step]:
        return self.update(self.schedule(), token)

    def computed(self) -> list[tuple[Sequence, int]]:
        """One step; who computed how many tokens."""
        batch = self.schedule()
        self.update(batch)
        return [(piece.seq, piece.num_tokens) for piece in batch.slices]

    def grant(self, generation: int, *seqs: Sequence) -> None:
        for seq in seqs:
            assert self.scheduler.granted(seq.id, generation, 0)
            self.scheduler.check_integrity()

    def receive(self, *seqs: Sequence) -> None:
        """D: expects, grants and receives each, until all are in line to run."""
        for seq in seqs:
            self.scheduler.expect(seq)
            assert self.scheduler.grants_possible() == [seq]
            assert self.scheduler.received(seq.id, Token(7)) is seq
            self.scheduler.check_integrity()
