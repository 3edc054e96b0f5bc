"""The written end of NIXL paths: lifelines admitted, notes turned into arrivals, and when nothing can land any more."""

import secrets
import selectors
import socket
from collections import deque
from collections.abc import Callable

import msgspec

from server.errors import TransferError
from server.messages import ChunkTag
from server.transfer.base import Arrived, EndpointGone, Event, PeerGone
from server.transfer.lifeline import COMING, ENDED, HELLO_BYTES, TAKEN, Line, LineEnded, read_hello
from server.transfer.nixl_agent import Agent
from server.transfer.ring import LandingRing

_HELLO_TIMEOUT_S = 5.0
_MAX_STRANGERS = 64
# A dead writer's last bytes can lie in this end's socket buffers and land when UCX reads them, here, while it polls.
# After so many polls they are read.
_LAST_POLLS = 300
_decode = msgspec.msgpack.Decoder(tuple[bytes, list[ChunkTag]]).decode


class _Path:
    def __init__(self, line: Line) -> None:
        self.line = line
        self.hello = b""
        self.peer = ""  # known once admitted
        self.token = b""
        self.num_coming = 0  # announced and not here yet; below 0: a note was quicker than its announcement
        self.began: deque[float] = deque()  # when each of them was announced
        self.is_ended = False
        self.is_line_open = True  # what is under way ends only while this end polls as well
        self.polls_left = 0  # once its line has ended


class Incoming:
    def __init__(
        self,
        agent: Agent,
        ring: LandingRing,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        events: list[Event],
        counters: dict[str, float],
        clock: Callable[[], float],
    ) -> None:
        self.key = secrets.token_hex(16)
        self.port: int = listener.getsockname()[1]
        self._agent = agent
        self._ring = ring
        self._listener = listener
        self._selector = selector
        self._events = events
        self._counters = counters
        self._clock = clock
        self._strangers: set[_Path] = set()
        self._paths: dict[str, _Path] = {}  # by peer
        self._leaving: list[_Path] = []  # ended, but something may still land
        selector.register(listener, selectors.EVENT_READ)

    @property
    def is_moving(self) -> bool:
        return any(p.num_coming > 0 for p in self._paths.values()) or any(
            p.is_line_open or p.polls_left for p in self._leaving
        )

    def serve(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif isinstance(key.data, _Path):
            try:
                self._hear(key.data)
            except LineEnded as ended:
                self._line_ended(key.data, ended)
            except TransferError as error:
                self._refuse(key.data, error.message)

    def advance(self) -> bool:
        """Takes notes, while any can come. Whether something happened."""
        if not self.is_moving:
            return False
        notes = self._agent.notes()
        for _, note in notes:
            self._take(note)
        gone = [path for path in self._leaving if path.polls_left == 1]
        for path in self._leaving:
            path.polls_left = max(0, path.polls_left - 1)
        for path in gone:
            self._leaving.remove(path)
            if not any(other.peer == path.peer for other in self._leaving):
                self._events.append(EndpointGone(path.peer))
        return bool(notes or gone)

    def expire(self, now: float) -> None:
        for path in [p for p in self._strangers if now - p.line.since > _HELLO_TIMEOUT_S]:
            self._refuse(path, "refused: no preface")

    def disconnect(self, peer: str) -> bool:
        """Whether there was a path. The peer is told, and ends its line once nothing is under way."""
        path = self._paths.get(peer)
        if path is not None:
            self._end(path, "disconnected")
        return path is not None

    def has_path(self, peer: str) -> bool:
        return peer in self._paths

    def may_land(self, peer: str) -> bool:
        return any(path.peer == peer for path in self._leaving)

    def close(self) -> None:
        for path in [*self._strangers, *self._paths.values(), *self._leaving]:
            path.line.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # gone again
        if len(self._strangers) >= _MAX_STRANGERS:
            self._counters["refused"] += 1
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        path = _Path(Line(sock, self._clock()))
        self._strangers.add(path)
        self._selector.register(sock, selectors.EVENT_READ, path)

    def _hear(self, path: _Path) -> None:
        if path in self._strangers:
            path.hello += path.line.hear(HELLO_BYTES - len(path.hello))
            if len(path.hello) == HELLO_BYTES:
                self._admit(path)
            return
        heard = path.line.hear()
        for _ in range(heard.count(COMING)):
            path.num_coming += 1
            if path.num_coming > 0:
                path.began.append(self._clock())
        if ENDED in heard and not path.is_ended:
            self._end(path, "peer gave the path up")

    def _admit(self, path: _Path) -> None:
        peer, path.token = read_hello(path.hello, self.key)
        if peer in self._paths:
            raise TransferError("refused: that peer has a path already")
        path.peer = peer
        self._strangers.discard(path)
        self._paths[peer] = path
        path.line.tell(TAKEN)

    def _take(self, note: bytes) -> None:
        try:
            token, tags = _decode(note)
        except msgspec.MsgspecError:
            self._counters["refused"] += 1
            return
        path = next((p for p in self._paths.values() if secrets.compare_digest(p.token, token)), None)
        if path is None:
            self._counters["late"] += 1  # of a path that has ended: its slots wait for the end of its line
            return
        path.num_coming -= 1
        began = path.began.popleft() if path.began else None
        for tag in tags:
            if not 0 <= tag.num_bytes <= self._ring.slot_bytes or not self._ring.landed(path.peer, tag.slot):
                self._refuse(path, f"refused: slot {tag.slot} is not credited to it for {tag.num_bytes} bytes")
                return
            self._events.append(Arrived(path.peer, tag, began))
        path.line.tell(TAKEN)

    def _refuse(self, path: _Path, reason: str) -> None:
        self._counters["refused"] += 1
        if path in self._strangers:
            self._strangers.discard(path)
            self._drop_line(path)
        else:
            self._end(path, reason)

    def _end(self, path: _Path, reason: str) -> None:
        """No arrival of it counts any more; what is under way may still land."""
        path.is_ended = True
        path.num_coming = 0
        del self._paths[path.peer]
        self._leaving.append(path)
        path.line.no_more()
        self._events.append(PeerGone(path.peer, reason, is_quiet=False))

    def _line_ended(self, path: _Path, ended: LineEnded) -> None:
        self._drop_line(path)
        if path in self._strangers:
            self._strangers.discard(path)
            return
        if not path.is_ended:
            self._end(path, ended.message)
        if ended.is_proof:
            path.polls_left = _LAST_POLLS  # without proof its slots stay out of use: nobody knows what it still writes

    def _drop_line(self, path: _Path) -> None:
        path.is_line_open = False
        self._selector.unregister(path.line.sock)
        path.line.close()
