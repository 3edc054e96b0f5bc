"""The writing end of a NIXL path: posts gathered into writes, writes watched until they are terminal."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor

from server.errors import TransferError
from server.messages import ChunkTag
from server.transfer.base import Event, Offer, Sent
from server.transfer.lifeline import COMING, ENDED, TAKEN, Line
from server.transfer.nixl_agent import Agent, Piece, WriteState, memory_kind, piece

# Of one write: enough to make its cost (about 10 us, or 40 with many pieces) small, little enough that the other end
# verifies one while the next is under way.
_WRITE_BYTES = {"DRAM": 4 * 2**20, "VRAM": 32 * 2**20}
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Target:
    """Where a peer's ring is, as its offer says."""

    peer: str
    line_address: tuple[str, int]
    key: str
    metadata: bytes
    address: int
    slot_bytes: int
    num_slots: int
    memory: str
    device: int
    host_id: str

    @classmethod
    def of(cls, peer: str, offer: Offer) -> "Target":
        """Raises TransferError."""
        try:
            return cls(
                peer,
                (_text(offer, "kv_host"), _number(offer, "kv_port")),
                _text(offer, "kv_key"),
                bytes.fromhex(_text(offer, "kv_agent")),
                _number(offer, "kv_address"),
                _number(offer, "kv_slot_bytes"),
                _number(offer, "kv_num_slots"),
                _text(offer, "kv_memory"),
                _number(offer, "kv_device"),
                _text(offer, "kv_host_id"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TransferError(f"peer {peer} offers no nixl address: {sorted(offer)}") from error

    def path(self, host_id: str) -> str:
        """UCX does not tell what it chose; this is what it could choose from."""
        where = "this host" if host_id == self.host_id else "the network"
        return f"ucx on {where}, to {self.memory}"


@dataclass(slots=True, eq=False)
class Write:
    handle: Any
    posts: list[int]
    since: float


@dataclass(slots=True, eq=False)
class _Post:
    handle: int
    tag: ChunkTag
    pieces: list[Tensor]
    since: float


class Outgoing:
    def __init__(self, agent: Agent, target: Target, remote: str, line: Line, token: bytes, path: str) -> None:
        self.peer = target.peer
        self.line = line
        self.path = path
        self.is_ended = False
        self.writes: deque[Write] = deque()
        self._agent = agent
        self._target = target
        self._remote = remote
        self._token = token
        self._is_admitted = False
        self._waiting: deque[_Post] = deque()
        self._num_waiting_bytes = 0
        self._num_posted = self._num_taken = 0

    @property
    def is_moving(self) -> bool:
        """Until the other end has the notes, too: they leave only while this one polls."""
        return bool(self.writes) or self._num_posted > self._num_taken

    @property
    def waits_since(self) -> float | None:
        """When the oldest thing that is not terminal was posted."""
        if self.writes:
            return self.writes[0].since
        return self._waiting[0].since if self._waiting else None

    def queue(self, handle: int, tag: ChunkTag, pieces: list[Tensor], now: float) -> None:
        self._waiting.append(_Post(handle, tag, pieces, now))
        self._num_waiting_bytes += tag.num_bytes

    def serve_line(self, is_writable: bool) -> None:
        """Raises TransferError when the line has ended."""
        if is_writable and not self.line.is_connected:
            self.line.finish_connect()
        elif is_writable:
            self.line.tell(b"")
        if not self.line.is_connected:
            return
        num_taken = self.line.hear().count(TAKEN)
        if num_taken and not self._is_admitted:
            self._is_admitted = True
            num_taken -= 1
        self._num_taken += num_taken

    def flush(self, now: float, *, only_full: bool) -> int:
        """Posts what waits; the number of writes. Raises TransferError: the path has failed."""
        num_writes = 0
        while self._is_admitted and self._waiting:
            limit = _WRITE_BYTES[memory_kind(self._waiting[0].pieces[0])] if self._waiting[0].pieces else 0
            if only_full and self._num_waiting_bytes < limit:
                break
            self._write(self._gather(limit), now)
            num_writes += 1
        return num_writes

    def advance(self, done: list[Event]) -> None:
        """Adds what has become terminal. Raises TransferError: the path has failed; what was added before counts."""
        if not self.writes:
            self._agent.notes()  # for its progress: notes of what is done still have to leave
        for write in list(self.writes):
            state = self._agent.state(write.handle)
            if state is WriteState.UNDER_WAY:
                break  # they end in order, near enough
            if state is WriteState.FAILED:
                raise TransferError("NIXL: the write failed")
            self.writes.popleft()
            self._agent.release(write.handle)
            done += [Sent(handle) for handle in write.posts]

    def end(self) -> list[int]:
        """Posts that did not make it."""
        self.is_ended = True
        failed = [handle for write in self.writes for handle in write.posts]
        failed += [post.handle for post in self._waiting]
        self._waiting.clear()
        self.line.tell(ENDED)
        self.advance_ended()
        return failed

    def advance_ended(self) -> None:
        """Forgets writes that are terminal, whichever way."""
        for write in list(self.writes):
            if self._agent.state(write.handle) is not WriteState.UNDER_WAY:
                self.writes.remove(write)
                self._agent.release(write.handle)

    def close(self) -> None:
        """Nothing is under way: says so by ending the line, after UCX has let go of the peer."""
        try:
            self._agent.remove_remote(self._remote)
        finally:
            self.line.close()

    def _gather(self, limit: int) -> list[_Post]:
        posts = [self._waiting.popleft()]
        num_bytes = posts[0].tag.num_bytes
        while self._waiting and num_bytes + self._waiting[0].tag.num_bytes <= limit:
            posts.append(self._waiting.popleft())
            num_bytes += posts[-1].tag.num_bytes
        self._num_waiting_bytes -= num_bytes
        return posts

    def _write(self, posts: list[_Post], now: float) -> None:
        source: list[Piece] = []
        target: list[Piece] = []
        for post in posts:
            at = self._target.address + post.tag.slot * self._target.slot_bytes
            if not 0 <= post.tag.slot < self._target.num_slots or post.tag.num_bytes > self._target.slot_bytes:
                raise TransferError(f"{post.tag.num_bytes} bytes do not fit slot {post.tag.slot} of {self.peer}")
            for part in map(piece, post.pieces):
                source.append(part)
                target.append((at, part[1], self._target.device))
                at += part[1]
        note = _encode((self._token, [post.tag for post in posts]))
        kind = memory_kind(posts[0].pieces[0])
        write = Write(None, [post.handle for post in posts], min(post.since for post in posts))
        self.line.tell(COMING)
        try:
            write.handle = self._agent.write(self._remote, source, kind, target, self._target.memory, note)
        except TransferError:
            self._waiting.extendleft(reversed(posts))  # so that `end` reports them
            raise
        self._num_posted += 1
        self.writes.append(write)


def _text(offer: Offer, key: str) -> str:
    value = offer[key]
    if not isinstance(value, str):
        raise TypeError(key)
    return value


def _number(offer: Offer, key: str) -> int:
    value = offer[key]
    if not isinstance(value, int):
        raise TypeError(key)
    return value
