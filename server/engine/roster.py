"""Who is where: every sequence of a scheduler by id, and the queue that its state names. Moves no state by itself."""

from bisect import insort
from itertools import pairwise
from operator import attrgetter

from server.sequence import SeqId, SeqState, Sequence

_arrival = attrgetter("arrival")


class Roster:
    def __init__(self) -> None:
        self.by_id: dict[SeqId, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []  # oldest first
        self.expected: list[Sequence] = []  # oldest first
        self.receiving: dict[SeqId, Sequence] = {}
        self.received: list[Sequence] = []  # RECEIVING still, but in line to run; first come first
        self.held: dict[SeqId, Sequence] = {}  # prefill halves out of the schedule, with blocks until released
        self.swapped: list[Sequence] = []
        self.asked: set[SeqId] = set()  # WAITING, grant asked for or held
        self.paused: dict[SeqId, float] = {}  # since when nobody reads the tokens of these, whatever their state

    def move(self, seq: Sequence, state: SeqState) -> None:
        """Takes a sequence from its queue to that of `state`. FINISHED with blocks to keep: use `hold`."""
        if seq.id in self.by_id:
            self._leave(seq)
        self.by_id[seq.id] = seq
        seq.state = state
        match state:
            case SeqState.WAITING:
                self.waiting.append(seq)
            case SeqState.RUNNING:
                insort(self.running, seq, key=_arrival)
            case SeqState.EXPECTED:
                insort(self.expected, seq, key=_arrival)
            case SeqState.RECEIVING:
                self.receiving[seq.id] = seq
            case SeqState.PUSHING:
                self.held[seq.id] = seq
            case SeqState.SWAPPED:
                self.swapped.append(seq)
            case SeqState.FINISHED:
                del self.by_id[seq.id]
                self.paused.pop(seq.id, None)

    def hold(self, seq: Sequence) -> None:
        """FINISHED, but known and with its blocks."""
        self._leave(seq)
        seq.state = SeqState.FINISHED
        self.held[seq.id] = seq

    def arrived(self, seq: Sequence) -> None:
        """RECEIVING and in line to run."""
        self.received.append(self.receiving.pop(seq.id))

    def _leave(self, seq: Sequence) -> None:
        match seq.state:
            case SeqState.WAITING:
                self.waiting.remove(seq)
                self.asked.discard(seq.id)
            case SeqState.RUNNING:
                self.running.remove(seq)
            case SeqState.SWAPPED:
                self.swapped.remove(seq)
            case SeqState.EXPECTED:
                self.expected.remove(seq)
            case SeqState.RECEIVING:
                if self.receiving.pop(seq.id, None) is None:
                    self.received.remove(seq)
            case SeqState.PUSHING | SeqState.FINISHED:
                del self.held[seq.id]

    def check_integrity(self) -> None:
        """Raises AssertionError when a sequence is not in exactly the queue that its state names."""
        queues = {
            SeqState.WAITING: self.waiting,
            SeqState.RUNNING: self.running,
            SeqState.SWAPPED: self.swapped,
            SeqState.EXPECTED: self.expected,
            SeqState.RECEIVING: [*self.receiving.values(), *self.received],
            SeqState.PUSHING: [s for s in self.held.values() if s.state is SeqState.PUSHING],
            SeqState.FINISHED: [s for s in self.held.values() if s.state is not SeqState.PUSHING],
        }
        for state, queue in queues.items():
            assert all(seq.state is state for seq in queue), state
            assert all(self.by_id.get(seq.id) is seq for seq in queue), state
        assert sum(map(len, queues.values())) == len(self.by_id), "a sequence is in no queue, or in two"
        waiting = {seq.id for seq in self.waiting}
        assert self.asked <= waiting, "a note about a sequence that does not wait"
        assert self.paused.keys() <= self.by_id.keys(), "a note about a sequence that is gone"
        waits = (*self.waiting, *self.expected, *self.swapped)
        assert not any(seq.block_table or seq.num_computed for seq in waits), "who waits holds nothing"
        assert all(seq.needs_grant and seq.block_table for seq in self.held.values())
        for queue in (self.running, self.expected):
            assert all(a.arrival <= b.arrival for a, b in pairwise(queue)), "not oldest first"
