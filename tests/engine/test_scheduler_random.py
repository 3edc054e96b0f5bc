"""Ten thousand random operations a seed on one scheduler that plays every role at once; all is checked after each."""

from itertools import accumulate
from random import Random

import pytest

from server.engine.block_pool import BlockPool
from server.engine.host_pool import HostPool
from server.engine.scheduler import Limits, Scheduler
from server.errors import CannotFit
from server.sequence import Batch, SamplingParams, SeqId, SeqState, Sequence, Token

EOS = 0
OPERATIONS = 10_000


class Chaos:
    """Does random things to a scheduler, and keeps its own idea of who is where."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.limits = Limits(
            token_budget=64, chunk_tokens=24, max_seqs=3, max_running=6, ahead=3, local_prefill_tokens=8
        )
        self.limits.idle_swap_s, self.limits.ahead_share = 5.0, 1.0
        self.limits.queue_low, self.limits.queue_high = 1, 3
        self.pool = BlockPool(25, 4, host=HostPool(10))
        self.pool.is_watched = True
        self.told: set[bytes] = set()  # what a router believes can be hit
        self.scheduler = Scheduler(self.limits, self.pool, lambda: self.now)
        self.alive: list[Sequence] = []
        self.halves: set[SeqId] = set()  # of prefill
        self.under_way: list[Batch] = []  # the one that ends next first
        self.tables: dict[tuple[int, int], list[int]] = {}  # by batch and sequence: the blocks that a step writes into
        self.kv: dict[tuple[int, int], int] = {}  # (block, offset): what is written there stands for its whole prefix
        self.host: dict[int, list[int | None]] = {}  # what each host block holds
        self.num_added = 0
        self.num_ended = 0
        self.num_refused = 0
        self.num_ahead = self.num_cut = self.num_launched_ahead = 0

    def new(self, needs_grant: bool = False) -> Sequence:
        self.num_added += 1
        stem = [self.random.randrange(1, 4)] * self.random.randrange(0, 40)  # few stems, so that prefixes are hit
        prompt = stem + [self.random.randrange(1, 50) for _ in range(self.random.randrange(1, 64))]
        # Who has min_tokens needs each token before the next: nothing is launched ahead with such a one.
        least = 2 if self.random.random() < 0.1 else 0
        params = SamplingParams(max_tokens=self.random.randrange(1, 40), stop_token_ids=(EOS,), min_tokens=least)
        salt = self.random.choice(["", "", "", "tenant"])
        return Sequence(SeqId("r", self.num_added, 0), prompt, params, self.now, salt, needs_grant)

    def submit(self, seq: Sequence, expected: bool = False) -> None:
        try:
            (self.scheduler.expect if expected else self.scheduler.add)(seq)
            if seq.state is not SeqState.FINISHED:
                self.alive.append(seq)
                self.halves |= {seq.id} if seq.needs_grant else set()
        except CannotFit:
            self.num_refused += 1
            assert seq.num_tokens + 1 > 24 * 4

    def pick(self, *states: SeqState) -> Sequence | None:
        found = [seq for seq in self.alive if seq.state in states]
        return self.random.choice(found) if found else None

    def token(self) -> Token:
        return Token(self.random.randrange(0, 30))

    def operate(self) -> None:
        operations = [self.admit, self.abort, self.release, self.read, self.step, self.step, self.step]
        operations += [self.step, self.grants, self.grants, self.give, self.receive, self.receive]
        self.random.choice([*operations, self.run_ahead, self.grant_again])()
        self.now += self.random.random()

    def admit(self) -> None:
        if len(self.alive) < 30:
            kind = self.random.randrange(3)
            seq = self.new(needs_grant=kind == 1)
            if kind == 0 and self.random.random() < 0.2:  # begun elsewhere
                seq.output = [self.token().id for _ in range(self.random.randrange(1, 8))]
            self.submit(seq, expected=kind == 2)

    def run_ahead(self) -> None:
        seq = self.random.choice([self.pick(SeqState.WAITING), self.pick(SeqState.PUSHING)])
        if seq and self.scheduler.run_ahead(seq.id):
            self.num_ahead += 1
        self.copy()

    def grant_again(self) -> None:
        seq = self.pick(SeqState.RECEIVING)
        if seq is not None and not seq.num_computed:
            output = seq.output + [self.token().id + 1 for _ in range(self.random.randrange(1, 8))]
            self.num_cut += self.scheduler.grant_again(seq.id, output)
            self.copy()

    def abort(self) -> None:
        seq = self.pick(*SeqState)
        if seq and self.random.random() < 0.3:
            blocks = list(seq.block_table)
            self.scheduler.abort(seq.id)
            assert not seq.needs_grant or seq.block_table == blocks, "abort never frees a prefill half's blocks"

    def release(self) -> None:
        seq = self.pick(SeqState.PUSHING, SeqState.FINISHED)
        if seq is None and self.random.random() < 0.1:
            seq = self.pick(*SeqState)
        if seq:
            self.scheduler.release(seq.id)

    def read(self) -> None:
        """A client stops reading, or goes on; swapping pays, or does not."""
        seq = self.pick(*SeqState)
        if seq:
            self.random.choice([self.scheduler.pause, self.scheduler.resume])(seq.id)
        self.pool.host.is_worthwhile = self.random.random() < 0.9

    def copy(self) -> None:
        """What the engine does before it lets anybody use the blocks that were given out."""
        for block, host_block, is_out in self.scheduler.take_copies():
            if is_out:
                self.host[host_block] = [self.kv.get((block, offset)) for offset in range(4)]
                assert None not in self.host[host_block], "an unwritten block was named"
            else:
                self.kv |= {(block, n): kv for n, kv in enumerate(self.host[host_block]) if kv is not None}

    def grants(self) -> None:
        granted = self.scheduler.grants_possible()
        self.copy()
        for seq in granted:
            assert seq.state is SeqState.RECEIVING and len(seq.block_table) * 4 >= len(seq.prompt)

    def give(self) -> None:
        self.scheduler.grants_wanted()
        seq = self.pick(*SeqState)
        if seq and seq.id in self.halves:
            self.scheduler.granted(seq.id, self.random.randrange(1, 4), 0)

    def receive(self) -> None:
        seq = self.pick(SeqState.RECEIVING)
        if seq is None or seq.num_computed:  # in line to run already
            return
        resident = seq.num_resident_blocks
        if self.random.random() < 0.7:
            self.kv |= self.slots(seq, resident * 4, seq.num_tokens)
            self.scheduler.received(seq.id, self.token())
        else:
            verified = self.random.randrange(resident, len(seq.block_table) + 1)
            self.kv |= self.slots(seq, resident * 4, min(verified * 4, seq.num_tokens))
            self.scheduler.recompute(seq.id, verified, self.random.choice([None, self.token()]))

    def slots(self, seq: Sequence, start: int, stop: int) -> dict[tuple[int, int], int]:
        """What the KV of tokens [start, stop) is, by slot."""
        prefixes = accumulate(seq.tokens(0, stop), lambda before, token: hash((before, token)), initial=hash(seq.salt))
        return {(seq.block_table[n // 4], n % 4): kv for n, kv in enumerate(list(prefixes)[1:]) if n >= start}

    def step(self) -> None:
        if self.scheduler.may_schedule and self.random.random() < 0.7:
            batch = self.scheduler.schedule()
            self.num_launched_ahead += bool(batch.slices and self.under_way)
            self.copy()
            self.check_batch(batch)
            self.under_way += [batch] if batch.slices else []
        elif self.under_way:
            self.finish_step()

    def check_batch(self, batch: Batch) -> None:
        assert batch.num_tokens <= self.limits.token_budget
        assert len({id(piece.seq) for piece in batch.slices}) == len(batch.slices)
        for piece in batch.slices:
            assert piece.num_tokens > 0
            before = [other for each in self.under_way for other in each.slices if other.seq is piece.seq]
            assert piece.start == piece.seq.num_computed + sum(other.num_tokens for other in before)
            assert piece.start + piece.num_tokens <= len(piece.seq.block_table) * 4
            written = self.slots(piece.seq, 0, piece.seq.num_computed)
            assert all(self.kv.get(slot) == kv for slot, kv in written.items()), "KV that is not this prefix's"
            self.check_written_alone(piece.seq.block_table[piece.start // 4 :], piece.seq)
            self.tables[id(batch), id(piece.seq)] = list(piece.seq.block_table)

    def check_written_alone(self, blocks: list[int], writer: Sequence) -> None:
        for seq in self.alive:
            assert seq is writer or not set(blocks) & set(seq.block_table), "two sequences write one block"

    def finish_step(self) -> None:
        batch = self.under_way.pop(0)
        for piece in batch.slices:  # a step writes whatever became of its sequences meanwhile
            table = self.tables.pop((id(batch), id(piece.seq)))
            assert piece.seq.block_table[: len(table)] == table, "blocks were taken from a step under way"
            self.kv |= self.slots(piece.seq, piece.start, piece.start + piece.num_tokens)
        lengths = {seq.id: len(seq.output) for seq in self.alive}
        tokens = [self.token() if piece.samples else None for piece in batch.slices]
        for step in self.scheduler.update(batch, tokens):
            if step.token is not None:
                assert step.index == lengths[step.seq.id], "an index is sampled twice or left out"
                assert step.seq.output[step.index] == step.token.id

    def check(self) -> None:
        self.scheduler.check_integrity()
        for digest, is_here in self.pool.take_changes().items():
            (self.told.add if is_here else self.told.discard)(digest)
        assert self.told == set(self.pool.digests), "what can be hit is not what was told"
        gone = [seq for seq in self.alive if seq.state is SeqState.FINISHED and self.scheduler.get(seq.id) is None]
        self.num_ended += len(gone)
        in_use = {id(piece.seq) for batch in self.under_way for piece in batch.slices}
        assert all(not seq.block_table for seq in gone if id(seq) not in in_use)
        self.alive = [seq for seq in self.alive if seq not in gone]

    def drain(self) -> None:
        for seq in self.alive:
            self.scheduler.abort(seq.id)
            self.scheduler.release(seq.id)
        while self.under_way:
            self.finish_step()
        self.check()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ten_thousand_random_operations(seed: int) -> None:
    chaos = Chaos(seed)
    for _ in range(OPERATIONS):
        chaos.operate()
        chaos.check()
    counters = chaos.scheduler.counters()
    assert chaos.num_ended > 250 and chaos.num_refused and counters.preemptions and counters.prefix_hit_tokens
    assert min(chaos.num_ahead, chaos.num_cut) >= 5 and chaos.num_launched_ahead > 50
    assert counters.swapped_out_blocks > 300 and counters.swapped_in_blocks > 30
    chaos.drain()
    assert not chaos.alive and chaos.pool.num_used == 0
