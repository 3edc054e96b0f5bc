"""What each step computes. One scheduler for every role, and no phases: computed tokens chase known ones.

Prefill half of a pd sequence (`needs_grant`)
    1. add           WAITING, holding nothing; grants_wanted() names it once it is near the front of the line
    2. granted       still WAITING; only now may it be admitted, and only with all blocks of its prompt at once
    3. schedule      RUNNING; each Step names the blocks that became ready to push
    4. first token   PUSHING, or FINISHED when the token ends it. Blocks stay: a transfer may still read them
    5. release       blocks are free. Nothing else frees them, not even abort
    While no grant comes, `run_ahead` makes it a sequence like any local one, where there is room; `granted` makes it a
    half again: PUSHING with the outputs it has by then.

Decode half
    1. expect        EXPECTED; call it once the prompt is known and the prefill side has asked, never earlier
    2. grants_possible   RECEIVING; all blocks of the prompt are its own, growth is counted as committed
       (grant_again      the same for a prompt and the outputs that prefill has given beyond the first)
    3. received      in line to run, ahead of local prompts (recompute: the same, with a part left to compute here)
    4. schedule      RUNNING, one token a step; may be preempted (SWAPPED: holds nothing, returns before anybody new)
    5. update, abort FINISHED, blocks free

Preempted sequences let go of their blocks, no more: named by what they hold, blocks stay cached until others need the
room, and what is evicted then goes on in host memory while that is cheaper than computing it again (`HostPool`). Who
returns finds what is left in either place and computes the rest, so swap and recompute are one path.

Why nothing stands still (tests/engine/test_no_deadlock.py): who waits for a grant holds nothing and holds up nobody;
who holds one waits only for blocks of its own side, held by sequences that run to their end; a received sequence needs
nothing but a place to run, or gives way; and the oldest that runs may take the blocks of any younger one.

Not thread safe: Engine.lock guards it. Between schedule() and update() everything may be called, schedule() only while
`may_schedule`; blocks that a step under way still uses are freed by its update(). Before the lock is given back after
schedule() or grants_possible(), carry out what take_copies() gives.
"""

from collections.abc import Callable
from dataclasses import dataclass

from server.engine.admission import Admission
from server.engine.block_pool import BlockPool
from server.engine.block_tables import BlockTables
from server.engine.grant_gate import GrantGate
from server.engine.host_pool import Copy
from server.engine.limits import Limits
from server.engine.roster import Roster
from server.sequence import Batch, SeqId, SeqState, Sequence, Slice, Token

__all__ = ["Counters", "Limits", "Scheduler", "Step"]


@dataclass(slots=True)
class Step:
    """What one update did for one sequence."""

    seq: Sequence
    token: Token | None
    index: int  # of `token` in seq.output
    finished: bool
    ready: range  # of seq.block_table: complete now; a prefill half's leave out resident ones, hold the partial last


@dataclass(slots=True, frozen=True)
class Counters:
    """For load reports. Blocks: used are written ones, granted await their KV, reserved are for growth."""

    num_waiting: int
    num_running: int
    num_expected: int
    num_receiving: int
    num_received: int  # in line to run
    num_pushing: int
    num_swapped: int
    num_paused: int
    blocks_total: int
    blocks_used: int
    blocks_granted: int
    blocks_reserved: int
    blocks_free: int
    grants_open: bool
    preemptions: int
    prefix_hit_tokens: int
    host_blocks_total: int
    host_blocks_used: int
    swapped_out_blocks: int  # copied to the host since the start
    swapped_in_blocks: int


class Scheduler:
    def __init__(self, limits: Limits, pool: BlockPool, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.pool = pool
        self._tables = BlockTables(pool)
        self._roster = Roster()
        self._clock = clock
        self._gate = GrantGate(limits, self._tables, self._roster)
        self._admission = Admission(limits, self._tables, self._roster, self._gate, clock)
        self._under_way: list[Batch] = []  # two at most
        self._to_free: list[Sequence] = []  # once no step under way has them
        self._generation = 0
        self._preemptions = 0

    # Any role

    def add(self, seq: Sequence) -> None:
        """WAITING: to be computed here. Raises CannotFit when that can never be.

        One with outputs was begun elsewhere: it waits as one that gave way does, ahead of all that is new; or it is
        FINISHED, when they are all there are to be."""
        assert seq.id not in self._roster.by_id, "an id is added once"
        seq.finish_reason = self._end_reason(seq) if seq.output else ""
        if seq.finish_reason:
            seq.state = SeqState.FINISHED
            return
        self._tables.check_fits(seq, self.limits.max_len)
        self._roster.move(seq, SeqState.SWAPPED if seq.output else SeqState.WAITING)

    def abort(self, seq_id: SeqId) -> Sequence | None:
        """Ends a sequence in any state; None when there is none. A prefill half keeps its blocks until release().

        Of a RECEIVING one, stop the copies into its blocks first (Receiver.revoke).
        """
        seq = self._roster.by_id.get(seq_id)
        if seq is None or seq.state is SeqState.FINISHED:
            return None
        self._end(seq)
        return seq

    def pause(self, seq_id: SeqId) -> None:
        """Nobody reads its tokens: not computed, it gives way first, and keeps its blocks for `idle_swap_s` at most."""
        seq = self._roster.by_id.get(seq_id)
        if seq is not None and not seq.needs_grant:
            self._roster.paused.setdefault(seq_id, self._clock())

    def resume(self, seq_id: SeqId) -> None:
        """Somebody reads again: it goes on, or gets in line if it has no blocks any more."""
        self._roster.paused.pop(seq_id, None)

    # Prefill half of pd

    def grants_wanted(self) -> list[Sequence]:
        """Whom to ask a grant for now, each once: the next in line, while no more than `ahead` asked ones wait."""
        roster = self._roster
        room = self.limits.ahead - len(roster.asked)
        if room <= 0:
            return []
        wanted = self._admission.in_line(s for s in roster.waiting if s.needs_grant and s.id not in roster.asked)[:room]
        roster.asked.update(seq.id for seq in wanted)
        return wanted

    def granted(self, seq_id: SeqId, generation: int, num_resident_blocks: int) -> bool:
        """False: nobody here waits for it (aborted, said before). One that runs ahead stops doing so: PUSHING, at once
        or, where a step has it, with that step's token."""
        seq = self._roster.by_id.get(seq_id)
        if seq is None or seq.state is SeqState.FINISHED or generation <= seq.generation:
            return False
        seq.generation, seq.num_resident_blocks = generation, num_resident_blocks
        seq.needs_grant = True
        if seq.state is SeqState.WAITING:
            self._roster.asked.add(seq_id)
        elif seq.state is SeqState.RUNNING and seq.output and not seq.num_under_way and seq.num_pending == 1:
            self._roster.move(seq, SeqState.PUSHING)
        return True

    def run_ahead(self, seq_id: SeqId) -> bool:
        """No grant comes: RUNNING as a local sequence does, to its end or until `granted`. One that waits does so only
        where it takes nothing from anybody: nobody with a grant waits or is read, and places and blocks are left. One
        that had stopped for a grant, which was not renewed for all its outputs, simply goes on."""
        seq = self._roster.by_id.get(seq_id)
        if seq is None or not seq.needs_grant:
            return False
        seq.needs_grant = False
        if seq.state is SeqState.PUSHING:
            self._roster.move(seq, SeqState.RUNNING)
        else:
            seq.needs_grant = not (seq.state is SeqState.WAITING and self._admission.admit_ahead(seq))
        return not seq.needs_grant

    def ungrant(self, seq_id: SeqId) -> None:
        """The grant, or the wait for one, is over: the decode worker is gone. One that waits leaves the line, until
        `add` brings it back; of one that has begun everything computed stays, for the next grant."""
        seq = self._roster.by_id.get(seq_id)
        if seq is None or not seq.needs_grant:
            return
        seq.generation = seq.num_resident_blocks = 0
        if seq.state is SeqState.WAITING:
            self._drop(seq)

    def release(self, seq_id: SeqId) -> Sequence | None:
        """Frees a prefill half for good: the other side acknowledged, or nobody will read its blocks any more."""
        seq = self._roster.by_id.get(seq_id)
        if seq is None or not seq.needs_grant:
            return None
        self._drop(seq)
        return seq

    # Decode half of pd

    def expect(self, seq: Sequence) -> None:
        """EXPECTED: wants a grant. Raises CannotFit when it could never have one."""
        self._tables.check_fits(seq, self.limits.max_len)
        assert seq.id not in self._roster.by_id, "an id is expected once"
        self._roster.move(seq, SeqState.EXPECTED)

    def grants_possible(self) -> list[Sequence]:
        """Grants by arrival what the gate lets through. Swapped sequences, and starved older ones, come first."""
        if not self._roster.expected and self._gate.is_open:
            return []  # a shut one opens under its low marks, whoever waits: the router sends nobody to it before
        granted = self._gate.grant(self._admission.may_be_granted(), self._admission.horizon)
        for seq in granted:
            self._generation += 1
            seq.generation = self._generation
            self._roster.move(seq, SeqState.RECEIVING)
        return granted

    def grant_again(self, seq_id: SeqId, output: list[int]) -> bool:
        """Prefill has run ahead of the grant: of a RECEIVING sequence, which stops receiving (Receiver.revoke first),
        these outputs too are to come. True: it has blocks for their KV as well, under a new generation. False: there
        are none, and it is EXPECTED again."""
        seq = self._roster.receiving.get(seq_id)
        if seq is None:
            return False
        seq.output = output
        num_missing = self._tables.blocks_for(seq.num_tokens) - len(seq.block_table)
        if num_missing > self._tables.pool.num_free:
            self._tables.free(seq)
            seq.generation = seq.num_resident_blocks = 0
            self._roster.move(seq, SeqState.EXPECTED)
            return False
        self._tables.grow(seq, num_missing)
        self._generation += 1
        seq.generation = self._generation
        return True

    @property
    def is_dry(self) -> bool:
        """Whether more sequences could be granted than ask."""
        return self._gate.is_low

    def received(self, seq_id: SeqId, token: Token) -> Sequence | None:
        """All KV is here, and the first token: in line to run. None when it is not awaited (late, aborted)."""
        return self.recompute(seq_id, None, token)

    def recompute(self, seq_id: SeqId, num_verified_blocks: int | None, token: Token | None = None) -> Sequence | None:
        """The transfer brings no more: go on from the first verified blocks (None: all of them) by local prefill.

        It keeps its blocks and its place. Pass `token` if the first one is known; else it is sampled here.
        """
        seq = self._roster.receiving.get(seq_id)
        if seq is None:
            return None
        size, num_known = self._tables.pool.block_size, seq.num_tokens
        num_verified = num_known
        if num_verified_blocks is not None:
            num_verified = min(max(num_verified_blocks, seq.num_resident_blocks) * size, num_known)
        seq.num_computed = num_verified if token is not None else min(num_verified, num_known - 1)
        self._tables.wrote(seq, seq.num_resident_blocks * size, seq.num_computed)
        self._roster.arrived(seq)
        if token is not None:
            self._append(seq, token)
        return seq

    # What one step computes

    @property
    def may_schedule(self) -> bool:
        """Whether the next step can be decided now: none is under way; or one is, and nothing of what it brings decides
        about the next. So nobody's token depends on which one came before it (its id is on the device in time), and
        everybody who goes on finds a block without taking another's."""
        if not self._under_way:
            return True
        if len(self._under_way) > 1:
            return False
        roster, is_idle = self._roster, self._admission.is_idle
        decoding = [seq for seq in (*roster.running, *roster.received) if not (seq.needs_grant or is_idle(seq))]
        num_growing = sum(not self._tables.num_slots(seq) for seq in decoding)
        has_place = len(roster.running) < self.limits.max_running
        coming = (*decoding, *(self._admission.candidates() if has_place else ()))
        return num_growing <= self._tables.pool.num_free and all(seq.is_free or seq.needs_grant for seq in coming)

    @property
    def is_next_full(self) -> bool:
        """Whether nobody who comes meanwhile would have a place in the step after the one under way: it reads prompts,
        and so will that one, to the last token that it may."""
        if not all(piece.seq.needs_grant for batch in self._under_way for piece in batch.slices):
            return False
        waiting = sum(seq.num_pending for seq in [*self._roster.running, *self._admission.candidates()])
        return waiting >= self._prompt_room(0)

    def schedule(self) -> Batch:
        """Sequences that decode first, oldest first; then prompts, under way and new in one line."""
        assert len(self._under_way) < 2, "update() first"
        for seq in self._admission.gone_idle():
            self._swap(seq)
        self._start_received()
        slices: list[Slice] = []
        prompts = self._decode(slices)
        if prompts or self._roster.waiting or self._roster.swapped:
            self._prefill(slices, prompts)
        batch = Batch(slices)
        if slices:
            self._under_way.append(batch)
        for piece in slices:
            seq = piece.seq
            seq.num_coming += piece.samples
            seq.num_under_way += piece.num_tokens
        return batch

    def _start_received(self) -> None:
        received = self._roster.received
        while received and len(self._roster.running) < self.limits.max_running:
            if self._admission.has_claim_before(received[0]):
                return
            self._roster.move(received[0], SeqState.RUNNING)

    def _decode(self, slices: list[Slice]) -> list[Sequence]:
        """Adds the sequences with one pending token; returns the others, prompts under way."""
        prompts: list[Sequence] = []
        has_paused, size = bool(self._roster.paused), self._tables.pool.block_size
        for seq in tuple(self._roster.running):
            if seq.state is not SeqState.RUNNING or (has_paused and self._admission.is_idle(seq)):
                continue  # it gave way to an older one; or is paused
            num_pending = seq.num_pending
            if not num_pending or (seq.num_coming and self._is_at_its_end(seq, seq.num_coming)):
                continue  # its last chunk, or its last token, is under way
            if num_pending > 1:
                prompts.append(seq)
            elif len(slices) < self.limits.token_budget:
                start = seq.num_computed + seq.num_under_way
                if start < len(seq.block_table) * size or self._has_room(seq):
                    slices.append(Slice(seq, start, 1))
        return prompts

    def _has_room(self, seq: Sequence) -> bool:
        """A block for the next token. When nobody gives way, it sits this step out and keeps its blocks."""
        while not self._tables.pool.num_free:
            victim = self._victim(seq)
            if victim is None:
                return False
            self._preempt(victim)
        self._tables.grow(seq)
        return True

    def _victim(self, seq: Sequence) -> Sequence | None:
        """A paused one, the last that does not run yet, else the youngest, if that is younger. Never one whose blocks a
        transfer uses."""
        roster = self._roster
        idle = next((each for each in roster.running if self._admission.is_idle(each)), None)
        if idle is not None or roster.received:
            return idle or roster.received[-1]
        youngest = next((each for each in reversed(roster.running) if each is seq or not each.needs_grant), seq)
        return None if youngest is seq else youngest

    def _preempt(self, seq: Sequence) -> None:
        self._swap(seq)
        self._preemptions += 1

    def _swap(self, seq: Sequence) -> None:
        self._tables.free(seq)
        seq.num_computed = 0
        self._roster.move(seq, SeqState.SWAPPED)

    def _prefill(self, slices: list[Slice], prompts: list[Sequence]) -> None:
        """Packs prompts until the step is full. One that is refused stops others that wait, not those running."""
        room, num_prompts, can_admit = self._prompt_room(len(slices)), len(prompts), True
        for seq in self._admission.in_line(prompts + self._admission.candidates()):
            if room <= 0:
                return
            if seq.state is not SeqState.RUNNING:
                can_admit = can_admit and num_prompts < self.limits.max_seqs and self._admission.admit(seq)
                if not can_admit:
                    continue
                num_prompts += 1
            # A first token that came with a failed transfer has no slot yet: it is left for _decode.
            num_tokens = min(room, seq.num_pending, self._tables.num_slots(seq))
            slices.append(Slice(seq, seq.num_scheduled, num_tokens))
            room -= num_tokens

    def _prompt_room(self, num_decoding: int) -> int:
        room = min(self.limits.token_budget - num_decoding, self.limits.chunk_tokens)
        local = self.limits.local_prefill_tokens
        if not num_decoding or local is None:
            return room
        sizes = self.limits.step_sizes
        if sizes and (wanted := num_decoding + local) <= sizes[-1]:  # larger ones are not padded
            local = max((size for size in sizes if num_decoding < size <= wanted), default=wanted) - num_decoding
        return min(room, local)

    # What came of it

    def update(self, batch: Batch, tokens: list[Token | None]) -> list[Step]:
        """Takes the step's tokens, one a slice. Slices of sequences aborted meanwhile are passed over."""
        self._under_way = [each for each in self._under_way if each is not batch]
        for piece in batch.slices:
            seq = piece.seq
            seq.num_coming -= piece.samples
            seq.num_under_way -= piece.num_tokens
        for seq in [seq for seq in self._to_free if not seq.num_under_way]:
            self._to_free.remove(seq)
            self._tables.free(seq)
        pairs = zip(batch.slices, tokens, strict=True)
        return [self._advance(piece, token) for piece, token in pairs if piece.seq.state is SeqState.RUNNING]

    def _advance(self, piece: Slice, token: Token | None) -> Step:
        seq, stop = piece.seq, piece.start + piece.num_tokens
        assert token is not None or not piece.samples, "a slice that reaches the last known token brings the next one"
        self._tables.wrote(seq, piece.start, stop)
        seq.num_computed = stop
        ready = self._ready(piece, stop)
        if token is None or not piece.samples:
            return Step(seq, None, -1, False, ready)
        self._append(seq, token)
        if seq.needs_grant and not seq.finish_reason:
            self._roster.move(seq, SeqState.PUSHING)
        return Step(seq, token, len(seq.output) - 1, bool(seq.finish_reason), ready)

    def _ready(self, piece: Slice, stop: int) -> range:
        seq, size = piece.seq, self._tables.pool.block_size
        if not seq.needs_grant:
            return range(piece.start // size, stop // size)
        first = 0 if piece.start == seq.num_cached else piece.start // size  # prefix hits come with the first chunk
        last = self._tables.blocks_for(stop) if piece.samples else stop // size
        return range(max(first, seq.num_resident_blocks), last)

    def _append(self, seq: Sequence, token: Token) -> None:
        seq.output.append(token.id)
        if reason := self._end_reason(seq):
            seq.finish_reason = reason
            self._end(seq)

    def _end_reason(self, seq: Sequence) -> str:
        params = seq.params
        stops = params.stop_token_ids
        if stops and seq.output[-1] in stops and len(seq.output) > params.min_tokens:
            return "stop"
        return "length" if self._is_at_its_end(seq) else ""

    def _is_at_its_end(self, seq: Sequence, num_more: int = 0) -> bool:
        num_output = len(seq.output) + num_more
        num_tokens = len(seq.prompt) + num_output
        if num_output >= seq.params.max_tokens or num_tokens >= self.limits.max_len:
            return True
        # A prefill half ends by the decode side's pool, which may be larger.
        return num_tokens >= self._tables.capacity and not seq.needs_grant

    def _end(self, seq: Sequence) -> None:
        """Out of the schedule for good."""
        if seq.needs_grant and seq.block_table:
            self._roster.hold(seq)
        else:
            self._drop(seq)

    def _drop(self, seq: Sequence) -> None:
        self._roster.move(seq, SeqState.FINISHED)
        if seq.output and not seq.needs_grant:  # aborted ones too: a stop string found by the router ends one so
            self._gate.lengths.add(len(seq.output))
        if seq.num_under_way:
            self._to_free.append(seq)
        else:
            self._tables.free(seq)

    def take_copies(self) -> list[Copy]:
        """Blocks to copy between device and host, in this order, since the last call."""
        return self.pool.host.take_copies()

    # What others may see

    @property
    def has_work(self) -> bool:
        """Whether schedule() might find something to compute."""
        roster = self._roster
        return bool(roster.waiting or roster.running or roster.received or roster.swapped)

    def get(self, seq_id: SeqId) -> Sequence | None:
        return self._roster.by_id.get(seq_id)

    def counters(self) -> Counters:
        roster, pool = self._roster, self._tables.pool
        granted = sum(len(seq.block_table) - seq.num_resident_blocks for seq in roster.receiving.values())
        return Counters(
            num_waiting=len(roster.waiting),
            num_running=len(roster.running),
            num_expected=len(roster.expected),
            num_receiving=len(roster.receiving),
            num_received=len(roster.received),
            num_pushing=len(roster.held),
            num_swapped=len(roster.swapped),
            num_paused=len(roster.paused),
            blocks_total=pool.num_usable,
            blocks_used=pool.num_used - granted,
            blocks_granted=granted,
            blocks_reserved=self._gate.num_reserved,
            blocks_free=pool.num_free,
            grants_open=self._gate.is_open,
            preemptions=self._preemptions,
            prefix_hit_tokens=self._tables.prefix_hit_tokens,
            host_blocks_total=pool.host.num_blocks,
            host_blocks_used=pool.host.num_used,
            swapped_out_blocks=pool.host.num_out,
            swapped_in_blocks=pool.host.num_in,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless queues, states, block tables and the pool agree. For tests."""
        self._roster.check_integrity()
        seqs = [*self._roster.by_id.values(), *self._to_free]
        self._tables.pool.check_integrity(seq.block_table for seq in seqs)
        for seq in seqs:
            assert seq.num_computed <= len(seq.block_table) * self._tables.pool.block_size
            assert 0 <= seq.num_coming <= len(self._under_way), seq
            assert seq.num_computed < seq.num_tokens or seq.needs_grant or seq.state is SeqState.FINISHED
