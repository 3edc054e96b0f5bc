"""Which sequences a worker knows, who asked for each, and which ids it must not know again.

Control messages race: an Abort can outrun its Prefill, a GrantRequest its Decode. Aborted and ended ids leave a
tombstone for a while, so that what comes late finds the door closed; what comes early is parked for a moment.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from server.sequence import SeqId, Sequence
from server.wire import Channel

TOMBSTONE_S = 60.0
MAX_TOMBSTONES = 100_000


@dataclass(slots=True, eq=False)
class Entry:
    """One sequence here. `owner` is the router's connection: when it ends, so does the sequence."""

    seq: Sequence
    owner: Channel
    heard: float  # monotonic
    stages: dict[str, float] = field(default_factory=dict)
    is_dropped: bool = False  # nobody wants it; only blocks remain to be given back

    @property
    def id(self) -> SeqId:
        return self.seq.id

    def mark(self, stage: str, now: float) -> None:
        """Notes when `stage` was first reached, in seconds since this worker heard of the sequence."""
        self.stages.setdefault(stage, now - self.heard)


E = TypeVar("E", bound=Entry)


class Ledger(Generic[E]):
    """Entries by id, and tombstones. Touched by the control thread; the engine thread only reads with `get`."""

    def __init__(self) -> None:
        self._entries: dict[SeqId, E] = {}
        self._tombstones: OrderedDict[SeqId, float] = OrderedDict()

    def __iter__(self) -> Iterator[E]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, id: SeqId) -> E | None:
        return self._entries.get(id)

    def add(self, entry: E) -> None:
        self._entries[entry.id] = entry

    def knew(self, id: SeqId) -> bool:
        """Whether `id` is known or was, not long ago."""
        return id in self._entries or id in self._tombstones

    def bury(self, id: SeqId, now: float) -> None:
        """Forgets `id` and keeps it from coming back."""
        self._entries.pop(id, None)
        self._tombstones[id] = now
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def prune(self, now: float) -> None:
        while self._tombstones and next(iter(self._tombstones.values())) < now - TOMBSTONE_S:
            self._tombstones.popitem(last=False)
