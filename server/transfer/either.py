"""Several transports behind one: a decode side takes what each peer has, a prefill side picks the first both have.

1. The offer holds every end's own, its keys under its name, and the list of names, best first.
2. `connect` chooses, and remembers why: nothing falls back in silence.
3. Everything else is passed to the end that has the peer's path.
"""

import selectors
import time

from torch import Tensor

from server.errors import TransferError
from server.messages import ChunkTag
from server.transfer.base import Event, Offer, PeerGone, SendFailed, Sent
from server.transfer.nixl import NixlTransport
from server.transfer.tcp import TcpTransport

_End = NixlTransport | TcpTransport


def choose(ours: list[str], theirs: list[str], absent: dict[str, str] | None = None) -> tuple[str, str]:
    """(transport, why). `absent`: what this side lacks, and why. Raises TransferError."""
    both = [name for name in ours if name in theirs]
    if not both:
        raise TransferError(f"no transport in common: {', '.join(ours)} here, {', '.join(theirs) or 'none'} there")
    reasons = [f"no {name} here: {why}" for name, why in (absent or {}).items()]
    reasons += [f"no {name} there" for name in ours[: ours.index(both[0])]]
    return both[0], "; ".join(reasons) or "both ends have it"


class EitherTransport:
    """`ends`: best first. `absent`: transports that were wanted and are not there, with the reason."""

    def __init__(self, ends: list[_End], absent: dict[str, str]) -> None:
        self.name = " or ".join(end.name for end in ends)
        self.chosen: dict[str, tuple[str, str]] = {}  # by peer: transport and path, why
        self._ends = ends
        self._absent = absent
        self._events: list[Event] = []
        self._handle = 0
        self._is_woken = False
        self._selector = selectors.DefaultSelector()
        for end in ends:
            self._selector.register(end, selectors.EVENT_READ)

    @property
    def counters(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for end in self._ends:
            for key, value in end.counters.items():
                total[key] = total.get(key, 0.0) + value
        return total

    def offer(self) -> Offer:
        merged: Offer = {"kv_transports": [end.name for end in self._ends]}
        for end in self._ends:
            own = end.offer()
            merged |= {f"{end.name}.{key}": value for key, value in own.items()}
            if "kv_slot_bytes" in own:
                merged["kv_slot_bytes"] = own["kv_slot_bytes"]
        return merged

    def register(self, memory: Tensor) -> None:
        for end in self._ends:
            end.register(memory)

    def connect(self, peer: str, offer: Offer) -> None:
        theirs = offer.get("kv_transports")
        name, why = choose([end.name for end in self._ends], theirs if isinstance(theirs, list) else [], self._absent)
        end = next(end for end in self._ends if end.name == name)
        end.connect(peer, {key.removeprefix(f"{name}."): value for key, value in offer.items()})
        self.chosen[peer] = (f"{name} over {end.path(peer)}", why)

    def disconnect(self, peer: str) -> None:
        holders = [end for end in self._ends if end.has_path(peer)]
        for end in holders:
            end.disconnect(peer)
        if not holders:
            is_quiet = not any(end.may_land(peer) for end in self._ends)
            self._events.append(PeerGone(peer, "disconnected", is_quiet))

    def post(self, peer: str, tag: ChunkTag, pieces: list[Tensor]) -> int:
        for number, end in enumerate(self._ends):
            if end.has_path(peer):
                return end.post(peer, tag, pieces) * len(self._ends) + number
        self._handle -= 1  # below zero: no end has given this number
        self._events += [SendFailed(self._handle, "not connected"), PeerGone(peer, "not connected")]
        return self._handle

    def poll(self, timeout_s: float) -> list[Event]:
        deadline = time.monotonic() + timeout_s
        while True:
            for end in self._ends:
                self._poll(end, 0)
            left = deadline - time.monotonic()
            if self._events or left <= 0 or self._is_woken:
                self._is_woken = False
                events, self._events = self._events, []
                return events
            moving = next((end for end in self._ends if end.is_moving), None)
            if moving is not None:
                # It wants to be polled on; what the others have is looked at in between.
                self._poll(moving, min(left, 0.002))
            else:
                self._selector.select(left)

    def _poll(self, end: _End, timeout_s: float) -> None:
        """What one end says is kept, whatever befalls the next."""
        number = self._ends.index(end)
        self._events += [self._renumber(event, number) for event in end.poll(timeout_s)]

    def _renumber(self, event: Event, number: int) -> Event:
        if isinstance(event, Sent):
            return Sent(event.handle * len(self._ends) + number)
        if isinstance(event, SendFailed):
            return SendFailed(event.handle * len(self._ends) + number, event.reason)
        return event

    def wake(self) -> None:
        self._is_woken = True
        self._ends[0].wake()

    def close(self) -> None:
        self._selector.close()
        for end in self._ends:
            end.close()
