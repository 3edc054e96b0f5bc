"""Faults on purpose: PDCTL_FAULTS="transfer.lose=0.05,transfer.corrupt=0.01,seed=7".

All of them happen where a chunk arrives, so that they work over every transport, one-sided writes included:

- lose: the sender was told Sent, the bytes mean nothing. What is passed on is the tag with no blocks in it. The slot
  has to come back somehow, and a reliable stream or RDMA queue cannot lose a notification without ending its path, so
  losing the content but not the slot is the honest model. The receiver counts it and its timer asks for the blocks.
- corrupt: one byte in the slot is flipped, after the checksum was made.
- duplicate: the same arrival is told twice; the second must not touch a slot that may be written again by then.
- hold: the arrival is kept until `release`, in order or reversed: delay, reordering, chunks that come after a revoke.
"""

import random
from collections import Counter
from collections.abc import Callable
from enum import Enum

import msgspec
from torch import Tensor

from server.errors import ConfigError
from server.messages import ChunkTag
from server.transfer.base import Arrived, Event, KVTransport, Offer, PeerGone
from server.transfer.ring import LandingRing


class Fault(Enum):
    NONE = "none"
    LOSE = "lose"
    CORRUPT = "corrupt"
    DUPLICATE = "duplicate"
    HOLD = "hold"


_RANDOM = (Fault.LOSE, Fault.CORRUPT, Fault.DUPLICATE)
Decide = Callable[[Arrived], Fault]


class FaultyTransport:
    """Wraps the receiving end of a transport. `decide` says what befalls each arrival, on the transfer thread."""

    def __init__(self, inner: KVTransport, ring: LandingRing, decide: Decide) -> None:
        self.name = inner.name
        self.injected: Counter[Fault] = Counter()
        self._inner = inner
        self._ring = ring
        self._decide = decide
        self._held: list[Event] = []
        self._due: list[Event] = []

    @property
    def counters(self) -> dict[str, float]:
        faults = {f"fault_{fault.value}": float(self.injected[fault]) for fault in Fault if fault is not Fault.NONE}
        return {**self._inner.counters, **faults}

    @property
    def num_held(self) -> int:
        return len(self._held)

    def release(self, *, is_reversed: bool = False) -> None:
        """What was held arrives with the next poll. On the transfer thread."""
        self._due += reversed(self._held) if is_reversed else self._held
        self._held = []

    def poll(self, timeout_s: float) -> list[Event]:
        events = self._inner.poll(0 if self._due else timeout_s)
        due, self._due = self._due, []
        for event in events:
            due += self._inject(event)
        return due

    def _inject(self, event: Event) -> list[Event]:
        if isinstance(event, PeerGone):
            self._held = [e for e in self._held if not (isinstance(e, Arrived) and e.peer == event.peer)]
        if not isinstance(event, Arrived):
            return [event]
        fault = self._decide(event)
        self.injected[fault] += 1
        match fault:
            case Fault.LOSE:
                tag = msgspec.structs.replace(event.tag, num_blocks=0, num_bytes=0)
                return [Arrived(event.peer, tag, event.began)]
            case Fault.CORRUPT:
                self._ring.data[event.tag.slot, event.tag.num_bytes // 3] ^= 0x10
            case Fault.DUPLICATE:
                return [event, event]
            case Fault.HOLD:
                self._held.append(event)
                return []
        return [event]

    def offer(self) -> Offer:
        return self._inner.offer()

    def register(self, memory: Tensor) -> None:
        self._inner.register(memory)

    def connect(self, peer: str, offer: Offer) -> None:
        self._inner.connect(peer, offer)

    def disconnect(self, peer: str) -> None:
        self._inner.disconnect(peer)

    def post(self, peer: str, tag: ChunkTag, pieces: list[Tensor]) -> int:
        return self._inner.post(peer, tag, pieces)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()


def with_faults(transport: KVTransport, ring: LandingRing | None, text: str) -> KVTransport:
    """`transport`, wrapped if `text` (PDCTL_FAULTS) asks for transfer faults and this end receives."""
    rates, seed = _parse(text)
    if not rates or ring is None:
        return transport
    return FaultyTransport(transport, ring, _by_chance(rates, random.Random(seed)))


def _by_chance(rates: dict[Fault, float], chance: random.Random) -> Decide:
    def decide(event: Arrived) -> Fault:
        draw = chance.random()
        for fault, rate in rates.items():
            if draw < rate:
                return fault
            draw -= rate
        return Fault.NONE

    return decide


def _parse(text: str) -> tuple[dict[Fault, float], int]:
    """Rates of the transfer faults; keys of other parts of the server are theirs to read."""
    rates: dict[Fault, float] = {}
    seed = 0
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = item.partition("=")
        try:
            if key == "seed":
                seed = int(value)
            elif key.startswith("transfer."):
                fault = Fault(key.removeprefix("transfer."))
                rates[fault] = float(value)
                if fault not in _RANDOM or not 0 <= rates[fault] <= 1:
                    raise ValueError(item)
        except ValueError as e:
            names = ", ".join(f"transfer.{fault.value}" for fault in _RANDOM)
            raise ConfigError(f"PDCTL_FAULTS: {item!r} is not one of {names} = 0..1, seed = n") from e
    return rates, seed
