"""Decode side: from a slot of the landing ring into the blocks of a granted sequence.

Life of a sequence here:

1. `open`: blocks are reserved for it; chunks with its id, peer and generation are wanted.
2. A chunk arrives: verified in its slot, copied into the blocks that still lack it, its slot credited again. Anything
   unknown, old, out of range, double or broken only gets its slot credited, and is counted.
3. Every block covered: `on_complete`. The entry is gone; later chunks are unknown.
4. Token 0 came and nothing new since: `on_missing`, with doubling patience, then `on_failed`.
5. `revoke` ends it at any time, from any thread.

The lock is held over each copy, so when `revoke` returns no copy into that sequence's blocks runs or can start.
Callbacks run on the transfer thread, without the lock.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from server.errors import TransferError
from server.messages import ChunkTag
from server.sequence import SeqId
from server.transfer.base import Arrived, Range
from server.transfer.blocks import Mover
from server.transfer.checksum import Multilinear, checksum_name, make_checksum
from server.transfer.codec import Codec
from server.transfer.coverage import Coverage
from server.transfer.ring import LandingRing
from server.transfer.streams import remote_write_flush

PATIENCE_S = 1.0  # after token 0 with no new chunk; doubles each time
_COUNTERS = (
    "received received_bytes received_kv_bytes decode_s duplicate dropped_unknown dropped_range "
    "checksum_failures codec_failures lost resends failed"
)
MAX_ASKS = 4  # in a row that brought nothing new


@dataclass(frozen=True, slots=True)
class ReceiveStats:
    """`first_chunk` and `kv_ready` are times on the receiver's clock; the rest as in docs/protocol.md, Stages."""

    first_chunk: float
    kv_ready: float
    transfer: float
    kv_bytes: int
    wire_bytes: int
    chunks: int
    resends: int
    overlap: float


@dataclass(slots=True, eq=False)
class _Receive:
    id: SeqId
    peer: str
    generation: int
    table: list[int]
    coverage: Coverage  # verified and copied
    token0_at: float | None = None
    covered_at_token0: int = 0
    news_at: float = 0.0  # the last block covered, or the last time it was asked for
    asks: int = 0  # since the last block covered
    began_at: float | None = None  # its first bytes began to come
    first_chunk: float | None = None
    wire_bytes: int = 0
    chunks: int = 0
    resends: int = 0

    def is_late(self, now: float) -> bool:
        if self.token0_at is None or self.coverage.is_complete:
            return False
        return now - self.news_at >= PATIENCE_S * (1 << self.asks)

    def stats(self, now: float, block_bytes: int) -> ReceiveStats:
        num = self.coverage.num_blocks
        early = num if self.token0_at is None else self.covered_at_token0
        return ReceiveStats(
            first_chunk=now if self.first_chunk is None else self.first_chunk,
            kv_ready=now,
            transfer=0.0 if self.began_at is None else now - self.began_at,
            kv_bytes=num * block_bytes,
            wire_bytes=self.wire_bytes,
            chunks=self.chunks,
            resends=self.resends,
            overlap=early / num if num else 1.0,
        )


class Receiver:
    def __init__(
        self,
        ring: LandingRing,
        blocks: Tensor,
        *,
        checksum: bool,
        codec: Codec | None = None,
        rank: int = 0,
        on_complete: Callable[[SeqId, ReceiveStats], None],
        on_missing: Callable[[SeqId, tuple[Range, ...]], None],
        on_failed: Callable[[SeqId, int], None],
        on_credit: Callable[[str, tuple[int, ...]], None],
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.counters = dict.fromkeys(_COUNTERS.split(), 0.0)
        self._ring = ring
        self._blocks = blocks
        device = ring.data.device
        self._checksum = make_checksum(checksum_name(device), ring.slot_bytes, device) if checksum else None
        self._mover = Mover(blocks)
        self._codec = codec
        self._rank = rank
        self._flush = remote_write_flush(ring.data.device)
        self._on_complete = on_complete
        self._on_missing = on_missing
        self._on_failed = on_failed
        self._on_credit = on_credit
        self._clock = clock
        self._wake = wake
        self._lock = threading.Lock()
        self._receives: dict[SeqId, _Receive] = {}
        self._ended: dict[SeqId, int] = {}  # what was verified of those that ended, until somebody has heard of it
        self._empty: list[_Receive] = []  # opened with nothing to come
        self._scan_at = 0.0

    # Any thread

    @property
    def is_busy(self) -> bool:
        return bool(self._receives)

    def peer_joined(self, peer: str) -> tuple[int, ...]:
        """Its slots, for the first SlotCredit. Raises TransferError when the ring has no share left. Safe anywhere; on
        the transfer thread (`call`) it comes after an earlier `TransferThread.peer_gone` of the same peer."""
        return self._ring.assign(peer)

    def open(self, id: SeqId, peer: str, generation: int, table: list[int], first_block: int, num_blocks: int) -> None:
        """Chunks of `peer` for [first_block, first_block + num_blocks) of `table` are welcome from now on. An id that
        is open already starts anew under this generation. With nothing to come it completes at the next tick."""
        wanted = _Receive(id, peer, generation, list(table), Coverage(first_block, num_blocks))
        assert 0 <= first_block <= first_block + num_blocks <= len(table)
        assert all(0 <= block < len(self._blocks) for block in table)
        with self._lock:
            self._receives[id] = wanted
            self._ended.pop(id, None)
            if not num_blocks:
                self._empty.append(wanted)
        if not num_blocks:
            self._wake()

    def token0(self, id: SeqId) -> None:
        """Token 0 is here, so every block was sent: what has not come is asked for after a while."""
        with self._lock:
            wanted = self._receives.get(id)
            if wanted is not None and wanted.token0_at is None:
                wanted.token0_at = wanted.news_at = self._clock()
                wanted.covered_at_token0 = wanted.coverage.num_covered

    def revoke(self, id: SeqId) -> int:
        """Ends it: no copy into its blocks is running now or will start. The number of leading blocks of its table
        that are verified, resident ones included; also when it has just ended of itself, and `on_complete` or
        `on_failed` is on its way. 0 when it is not open."""
        with self._lock:
            wanted = self._receives.pop(id, None)
            return self._ended.pop(id, 0) if wanted is None else wanted.coverage.prefix

    def heard(self, id: SeqId) -> None:
        """Whoever `on_complete` or `on_failed` was for has it."""
        with self._lock:
            self._ended.pop(id, None)

    # Transfer thread

    def knows(self, peer: str) -> bool:
        return self._ring.has(peer)

    def peer_gone(self, peer: str) -> None:
        """It may write no more and its sequences fail. `endpoint_gone` follows when nothing of it can land."""
        self._ring.release(peer)
        with self._lock:
            ids = [r.id for r in self._receives.values() if r.peer == peer]
        for lost in ids:
            self.fail(lost)

    def endpoint_gone(self, peer: str) -> None:
        self._ring.endpoint_gone(peer)

    def fail(self, id: SeqId) -> None:
        """As `revoke`, and says so by `on_failed`."""
        with self._lock:
            wanted = self._receives.pop(id, None)
            if wanted is not None:
                self._ended[id] = wanted.coverage.prefix
        if wanted is not None:
            self.counters["failed"] += 1
            self._on_failed(id, wanted.coverage.prefix)

    def arrived(self, event: Arrived) -> None:
        """Takes a chunk out of its slot and credits the slot, whatever the chunk is worth."""
        peer, tag = event.peer, event.tag
        if not self._ring.is_held(peer, tag.slot):
            self.counters["duplicate"] += 1  # an arrival told twice, or of a peer that is gone
            return
        try:
            wanted = self._take(event)
        finally:
            if self._ring.credit(peer, tag.slot):
                self._on_credit(peer, (tag.slot,))
        if wanted is not None and wanted.coverage.is_complete:
            self._complete(wanted)

    def tick(self, now: float) -> None:
        """Timers: what is missing is asked for again, then given up. Cheap enough for every turn of the loop."""
        with self._lock:
            empty, self._empty = self._empty, []
            late: list[_Receive] = []
            if now >= self._scan_at:
                self._scan_at = now + PATIENCE_S / 20
                late = [r for r in self._receives.values() if r.is_late(now)]
        for wanted in empty:
            self._complete(wanted)
        for wanted in late:
            self._ask(wanted, wanted.coverage.missing())

    def _take(self, event: Arrived) -> _Receive | None:
        """Verifies outside the lock, copies under it; or both at once, if copying gives the sum. Blocks that nobody has
        covered yet may hold anything."""
        tag = event.tag
        with self._lock:
            wanted = self._find(event.peer, tag)
            if wanted is not None:
                if wanted.began_at is None:
                    wanted.began_at = self._clock() if event.began is None else event.began
                wanted.wire_bytes += tag.num_bytes
                wanted.chunks += 1
        if wanted is None:
            return None
        self._flush()
        sums = self._mover.sums and not tag.codec and isinstance(self._checksum, Multilinear)
        if not sums and not self._is_intact(tag):
            self._corrupt(wanted, tag)
            return None
        source = self._source(wanted, tag)
        if source is None:
            return None
        with self._lock:
            if self._receives.get(tag.id) is not wanted:
                self.counters["dropped_unknown"] += 1  # revoked while it was being verified
                return None
            lacking = wanted.coverage.lacking(tag.first_block, tag.num_blocks)  # what is covered may be in use already
            total = self._mover.scatter(source, tag.first_block, lacking, wanted.table)
            is_intact = not sums or Multilinear.of_total(total, tag.num_bytes) == tag.checksum
            if is_intact:
                self._cover(wanted, tag, lacking)
        if not is_intact:
            self._corrupt(wanted, tag)
            return None
        return wanted

    def _find(self, peer: str, tag: ChunkTag) -> _Receive | None:
        """Whose chunk this is, or None and counted why it is nobody's."""
        wanted = self._receives.get(tag.id)
        if wanted is None or wanted.peer != peer or wanted.generation != tag.generation:
            reason = "dropped_unknown"
        elif tag.num_blocks == 0:
            reason = "lost"  # nothing but the slot came; the timer asks for the blocks
        elif (
            tag.rank != self._rank
            or not wanted.coverage.fits(tag.first_block, tag.num_blocks)
            or not self._is_whole(tag)
        ):
            reason = "dropped_range"
        elif not wanted.coverage.lacking(tag.first_block, tag.num_blocks):
            reason = "duplicate"
        else:
            return wanted
        self.counters[reason] += 1
        return None

    def _is_whole(self, tag: ChunkTag) -> bool:
        whole = tag.num_blocks * self._ring.block_bytes
        return tag.num_bytes < whole if tag.codec else tag.num_bytes == whole

    def _is_intact(self, tag: ChunkTag) -> bool:
        return self._checksum is None or self._checksum([self._ring.data[tag.slot, : tag.num_bytes]]) == tag.checksum

    def _corrupt(self, wanted: _Receive, tag: ChunkTag) -> None:
        self.counters["checksum_failures"] += 1
        self._ask(wanted, ((tag.first_block, tag.first_block + tag.num_blocks),))

    def _source(self, wanted: _Receive, tag: ChunkTag) -> Tensor | None:
        """The chunk's blocks, decoded if need be; None and asked for again when they cannot be."""
        slot = self._ring.data[tag.slot]
        if not tag.codec:
            return slot[: tag.num_bytes].to(self._blocks.device).view(-1, self._ring.block_bytes)
        try:
            if self._codec is None:
                raise TransferError("encoded, though no codec was agreed on")
            plain = self._codec.decode(tag.codec, slot[: tag.num_bytes], tag.num_blocks * self._ring.block_bytes)
        except TransferError:
            self.counters["codec_failures"] += 1
            self._ask(wanted, ((tag.first_block, tag.first_block + tag.num_blocks),))
            return None
        self.counters["decode_s"] = self._codec.seconds
        return plain.to(self._blocks.device).view(-1, self._ring.block_bytes)  # zstd unpacks on the host

    def _cover(self, wanted: _Receive, tag: ChunkTag, lacking: list[int]) -> None:
        """The chunk's bytes are in its blocks: the slot is credited next, and the blocks may be read."""
        wanted.coverage.cover(lacking)
        now = self._clock()
        wanted.first_chunk = now if wanted.first_chunk is None else wanted.first_chunk
        wanted.news_at = now
        wanted.asks = 0
        self.counters["received"] += 1
        self.counters["received_bytes"] += tag.num_bytes
        self.counters["received_kv_bytes"] += tag.num_blocks * self._ring.block_bytes

    def _complete(self, wanted: _Receive) -> None:
        with self._lock:
            if self._receives.get(wanted.id) is not wanted:
                return
            del self._receives[wanted.id]
            self._ended[wanted.id] = wanted.coverage.prefix
        self._on_complete(wanted.id, wanted.stats(self._clock(), self._ring.block_bytes))

    def _ask(self, wanted: _Receive, ranges: tuple[Range, ...]) -> None:
        with self._lock:
            if self._receives.get(wanted.id) is not wanted:
                return
        if wanted.asks >= MAX_ASKS:
            self.fail(wanted.id)
            return
        wanted.asks += 1
        wanted.news_at = self._clock()
        wanted.resends += len(ranges)
        self.counters["resends"] += len(ranges)
        self._on_missing(wanted.id, ranges)
