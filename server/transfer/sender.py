"""Prefill side: which blocks go to which peer, when, in what pieces.

Life of a sequence here:

1. `open`: a grant is held; nothing is computed yet.
2. `push`: blocks up to a mark are computed. They are cut into transfer chunks as slots and in-flight room allow, in
   turn with the other sequences of that peer, so that a long prompt does not block a short one.
3. `resend`: the other side asks for ranges again; they go before new blocks.
4. `drop`: acknowledged, aborted or failed. No new posts; `on_released` once no post reads its blocks.

Everything here runs on the transfer thread, callbacks too; `chunk_tokens` and `max_inflight` may be set from any
thread. A slot is spent by a post and comes back only by the peer's SlotCredit, never by Sent: only the peer knows when
it has copied the bytes out.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from server.config import STAGING_CHUNKS
from server.device import wait_for
from server.errors import TransferError
from server.messages import ChunkTag
from server.sequence import SeqId
from server.transfer.base import KVTransport, Offer, Range, SendFailed, Sent
from server.transfer.blocks import Mover
from server.transfer.checksum import Checksum, Multilinear, checksum_name, make_checksum
from server.transfer.codec import Codec
from server.transfer.coverage import runs, union

_COUNTERS = "sent sent_bytes sent_kv_bytes encode_s resent send_failed unexpected"


@dataclass(slots=True, eq=False)
class _Push:
    """A sequence: `sent` and `ready` are marks in its table, `again` holds ranges below `sent` wanted again."""

    id: SeqId
    peer: str
    generation: int
    table: list[int]
    first: int
    sent: int
    ready: int
    again: list[Range] = field(default_factory=list)
    num_posts: int = 0
    is_dropped: bool = False
    is_failed: bool = False

    @property
    def has_work(self) -> bool:
        return not (self.is_dropped or self.is_failed) and (bool(self.again) or self.sent < self.ready)

    def cut(self, max_blocks: int) -> tuple[Range, bool]:
        """Takes the next range of at most `max_blocks` off the work; whether it is one sent before."""
        if self.again:
            first, stop = self.again[0]
            if stop - first <= max_blocks:
                self.again.pop(0)
            else:
                self.again[0] = (first + max_blocks, stop)
            return (first, min(stop, first + max_blocks)), True
        first = self.sent
        self.sent = min(self.ready, first + max_blocks)
        return (first, self.sent), False


@dataclass(slots=True)
class Link:
    """What went to one peer and came back verified, and the seconds in which something was on its way there."""

    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Peer:
    slot_blocks: int
    codec: Codec | None
    link: Link
    checksum: Checksum | None
    credits: deque[int] = field(default_factory=deque)
    turn: deque[_Push] = field(default_factory=deque)  # sequences with work, each once
    num_posts: int = 0
    out: dict[int, int] = field(default_factory=dict)  # slots that the peer has not given back yet: bytes in them
    out_since: float = 0.0

    def spend(self, slot: int, num_bytes: int, now: float) -> None:
        if not self.out:
            self.out_since = now
        self.out[slot] = num_bytes

    def take_back(self, slots: Iterable[int], now: float) -> None:
        """Bytes count once the peer has verified and copied them, so that no buffer in between makes a link fast."""
        was_out = bool(self.out)
        self.link.bytes += sum(self.out.pop(slot, 0) for slot in slots)
        if was_out:
            self.link.seconds += now - self.out_since
            self.out_since = now


@dataclass(frozen=True, slots=True)
class _Post:
    push: _Push
    peer: _Peer
    row: int  # of the staging memory; -1: sent from the pool


class Sender:
    def __init__(
        self,
        transport: KVTransport,
        blocks: Tensor,
        block_size: int,
        *,
        chunk_tokens: int,
        max_inflight: int,
        checksum: bool,
        codec: Codec | None = None,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
        on_released: Callable[[SeqId], None],
        on_failed: Callable[[SeqId, str], None],
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self.max_inflight = max_inflight
        self.counters = dict.fromkeys(
            ("sent", "sent_bytes", "sent_kv_bytes", "encode_s", "resent", "send_failed", "unexpected"), 0.0
        )
        self._transport = transport
        self._blocks = blocks
        self._block_size = block_size
        self._has_checksum = checksum
        self._checksums: dict[str, Checksum] = {}  # as large as the largest slot of any peer
        self._on_released = on_released
        self._on_failed = on_failed
        self._peers: dict[str, _Peer] = {}
        self._pushes: dict[SeqId, _Push] = {}
        self._posts: dict[int, _Post] = {}
        self._clock = clock
        self._codec = codec
        self._rank = rank
        self._free_rows: list[int] = []
        self._is_staged = codec is not None or blocks.is_cuda
        self._mover = Mover(blocks)
        transport.register(blocks)
        if self._is_staged:
            row_bytes = max(1, chunk_tokens // block_size) * blocks.shape[1]
            self._staging = torch.zeros(STAGING_CHUNKS, row_bytes, dtype=torch.uint8, device=blocks.device)
            self._free_rows = list(range(STAGING_CHUNKS))
            transport.register(self._staging)

    @property
    def is_busy(self) -> bool:
        return bool(self._posts)

    @property
    def staging_bytes(self) -> int:
        return self._staging.numel() if self._is_staged else 0

    @property
    def num_open(self) -> int:
        return len(self._pushes)

    def knows(self, peer: str) -> bool:
        return peer in self._peers

    def connect_peer(self, peer: str, offer: Offer) -> None:
        """Opens the data path. Raises TransferError."""
        slot_bytes, block_bytes = offer.get("kv_slot_bytes"), self._blocks.shape[1]
        if not isinstance(slot_bytes, int) or slot_bytes < block_bytes:
            raise TransferError(f"peer {peer} has ring slots of {slot_bytes} bytes, a block has {block_bytes}")
        if (rank := offer.get("kv_rank", 0)) != self._rank:
            raise TransferError(f"peer {peer} offers the address of rank {rank}; this is rank {self._rank}")
        checksum = self._checksum_of(offer, slot_bytes) if self._has_checksum else None
        self._transport.connect(peer, offer)
        codec = self._codec if self._codec is not None and offer.get("kv_codec") == self._codec.name else None
        slot_blocks = slot_bytes // block_bytes
        if self._is_staged:
            slot_blocks = min(slot_blocks, self._staging.shape[1] // block_bytes)
        self._peers[peer] = _Peer(slot_blocks, codec, Link(), checksum)

    def _checksum_of(self, offer: Offer, slot_bytes: int) -> Checksum:
        device = self._blocks.device
        name = str(offer.get("kv_checksum", checksum_name(device)))
        known = self._checksums.get(name)
        if known is None or known.max_bytes < slot_bytes:
            known = self._checksums[name] = make_checksum(name, slot_bytes, device)
        return known

    def peer_gone(self, peer: str, reason: str = "") -> None:
        """Its sequences fail; each still waits for its `drop`, and for what is in flight to end."""
        if self._peers.pop(peer, None) is None:
            return
        for push in [p for p in self._pushes.values() if p.peer == peer]:
            self.fail(push.id, reason or "peer gone")

    def credit(self, peer: str, slots: Iterable[int]) -> None:
        """These slots may be written. One that is here already is not here twice."""
        if (known := self._peers.get(peer)) is not None:
            slots = tuple(slots)
            known.take_back(slots, self._clock())
            known.credits += [slot for slot in slots if slot not in known.credits]
            self.pump()

    def link(self, peer: str) -> tuple[Link, str] | None:
        """What it has carried so far, and the codec of the pair. From any thread."""
        known = self._peers.get(peer)
        return None if known is None else (known.link, known.codec.name if known.codec is not None else "none")

    def open(self, id: SeqId, peer: str, generation: int, table: list[int], num_tokens: int, first_block: int) -> None:
        """Blocks [first_block, ceil(num_tokens / block_size)) of `table` will be pushed to `peer`. For an id that is
        open already this is a new grant: what the old one had in flight is still waited for before `on_released`. What
        cannot be done comes as `on_failed`."""
        num_blocks = -(-num_tokens // self._block_size)
        push = _Push(id, peer, generation, table[:num_blocks], first_block, first_block, first_block)
        old = self._pushes.get(id)
        if old is not None:
            self._leave(old)
            old.is_dropped = True
            push.num_posts = old.num_posts
            for handle, post in self._posts.items():
                if post.push is old:
                    self._posts[handle] = replace(post, push=push)
        self._pushes[id] = push
        if peer not in self._peers:
            self.fail(id, f"no path to peer {peer}")
        elif not 0 <= first_block <= num_blocks <= len(table):
            self.fail(id, f"blocks [{first_block}, {num_blocks}) of a table of {len(table)}")
        elif table and not 0 <= min(table) <= max(table) < len(self._blocks):
            self.fail(id, f"block {max(table)} or {min(table)} of {len(self._blocks)}")  # a slice would be cut short

    def push(self, id: SeqId, stop_block: int) -> None:
        """The KV of blocks [.., stop_block) is computed and stays as it is; the last, partial one counts as a block."""
        push = self._pushes.get(id)
        if push is None or push.is_dropped:
            self.counters["unexpected"] += 1
            return
        push.ready = max(push.ready, min(stop_block, len(push.table)))
        self._enter(push)
        self.pump()

    def resend(self, id: SeqId, ranges: Iterable[Range]) -> None:
        """The peer lacks these. What was not sent yet is on its way anyhow and is left out."""
        push = self._pushes.get(id)
        if push is None or push.is_dropped:
            self.counters["unexpected"] += 1
            return
        clipped = ((max(first, push.first), min(stop, push.sent)) for first, stop in ranges)
        push.again = union([*push.again, *(r for r in clipped if r[0] < r[1])])
        self._enter(push)
        self.pump()

    def drop(self, id: SeqId) -> None:
        """Nobody wants it any more, or everything arrived. No new posts; `on_released` when the last has ended."""
        push = self._pushes.get(id)
        if push is None or push.is_dropped:
            return
        push.is_dropped = True
        self._leave(push)
        self._release_if_idle(push)

    def fail(self, id: SeqId, reason: str) -> None:
        """Ends its posts and says so, once. It stays until `drop`."""
        push = self._pushes.get(id)
        if push is None or push.is_failed or push.is_dropped:
            return
        push.is_failed = True
        self._leave(push)
        self.counters["send_failed"] += 1
        self._on_failed(id, reason)

    def ended(self, event: Sent | SendFailed) -> None:
        """A post is terminal."""
        post = self._posts.pop(event.handle)
        push, peer = post.push, post.peer
        if post.row >= 0:
            self._free_rows.append(post.row)
        push.num_posts -= 1
        peer.num_posts -= 1
        try:
            if (
                isinstance(event, SendFailed) and self._peers.get(push.peer) is peer
            ):  # not for an earlier grant elsewhere
                self.fail(push.id, event.reason)
        finally:
            self._release_if_idle(push)  # whatever a callback does

    def pump(self) -> None:
        """Posts what credit and in-flight room allow, one chunk a sequence in turn."""
        for name, peer in list(self._peers.items()):
            while peer.turn and peer.credits and peer.num_posts < self.max_inflight and self._has_room(peer):
                push = peer.turn.popleft()
                try:
                    self._post(name, peer, push)
                except Exception as e:  # one sequence's trouble stays its own
                    self.fail(push.id, f"{type(e).__name__}: {e}")
                if push.has_work:
                    peer.turn.append(push)

    def _post(self, name: str, peer: _Peer, push: _Push) -> None:
        max_blocks = max(1, min(self.chunk_tokens // self._block_size, peer.slot_blocks))
        (first, stop), is_again = push.cut(max_blocks)
        kv_bytes = (stop - first) * self._blocks.shape[1]
        pieces, row, code, checksum = self._prepared(peer, push.table[first:stop])
        num_bytes = kv_bytes if row < 0 else pieces[0].numel()
        slot = peer.credits.popleft()
        tag = ChunkTag(push.id, push.generation, slot, first, stop - first, num_bytes, checksum, code, self._rank)
        handle = self._transport.post(name, tag, pieces)
        self._posts[handle] = _Post(push, peer, row)
        peer.spend(slot, num_bytes, self._clock())
        push.num_posts += 1
        peer.num_posts += 1
        self.counters["resent" if is_again else "sent"] += 1
        self.counters["sent_bytes"] += num_bytes
        self.counters["sent_kv_bytes"] += kv_bytes

    def _sum(self, peer: _Peer, pieces: list[Tensor]) -> int:
        """After it the pieces are there for a transport to read, which looks past every stream."""
        if peer.checksum is not None:
            return peer.checksum(pieces)
        wait_for(self._blocks.device)
        return 0

    def _has_room(self, peer: _Peer) -> bool:
        return bool(self._free_rows) or (peer.codec is None and not self._blocks.is_cuda)

    def _prepared(self, peer: _Peer, ids: list[int]) -> tuple[list[Tensor], int, int, int]:
        """(pieces, staging row, codec, checksum): in the pool where the pair has no codec, or the chunk would not
        shrink, and pieces are cheap."""
        kv_bytes, code = len(ids) * self._blocks.shape[1], 0
        num_bytes = kv_bytes
        if peer.codec is not None:
            code, num_bytes = peer.codec.encode(self._blocks, ids, self._staging[self._free_rows[-1]])
            self.counters["encode_s"] = peer.codec.seconds
        if not code and not self._blocks.is_cuda:
            pieces = self._pieces(ids)
            return pieces, -1, 0, self._sum(peer, pieces)
        piece = self._staging[self._free_rows[-1], :num_bytes]
        if code:
            checksum = self._sum(peer, [piece])
        else:
            checksum = self._gather(peer, ids, piece)
        return [piece], self._free_rows.pop(), code, checksum

    def _gather(self, peer: _Peer, ids: list[int], piece: Tensor) -> int:
        total = self._mover.gather(ids, piece)
        if self._mover.sums and isinstance(peer.checksum, Multilinear):
            return peer.checksum.of_total(total, piece.numel())
        return self._sum(peer, [piece])

    def _pieces(self, ids: list[int]) -> list[Tensor]:
        """Runs of adjacent block ids, each one contiguous piece of the pool."""
        return [self._blocks[first:stop].view(-1) for first, stop in runs(ids)]

    def _enter(self, push: _Push) -> None:
        peer = self._peers.get(push.peer)
        if peer is not None and push.has_work and push not in peer.turn:
            peer.turn.append(push)

    def _leave(self, push: _Push) -> None:
        peer = self._peers.get(push.peer)
        if peer is not None and push in peer.turn:
            peer.turn.remove(push)

    def _release_if_idle(self, push: _Push) -> None:
        if push.is_dropped and not push.num_posts and self._pushes.get(push.id) is push:
            del self._pushes[push.id]
            self._on_released(push.id)
