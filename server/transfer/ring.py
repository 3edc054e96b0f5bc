"""The landing ring: the only memory that a peer may write, and who may write which slot of it when.

Life of a slot:

1. FREE: nobody's.
2. CREDITED: its peer may write it at any moment. `assign` gives a joining peer its share.
3. WRITING: a write is under way (transports that see it begin; a one-sided write stays CREDITED until it has landed).
4. HELD: the bytes are here and being verified and copied; nobody may write. `credit` makes it CREDITED again.
5. QUARANTINED: the peer was released while a write might be under way. FREE again once that write has ended (`landed`)
   or the peer's endpoint is gone (`endpoint_gone`).

One lock: the transfer thread moves slots, the control thread assigns and counts.
"""

import threading
from dataclasses import dataclass
from enum import IntEnum

import torch

from server.errors import ConfigError, TransferError


class SlotState(IntEnum):
    FREE = 0
    CREDITED = 1
    WRITING = 2
    HELD = 3
    QUARANTINED = 4


@dataclass(frozen=True, slots=True)
class RingCounts:
    """`credited` are all slots of living peers, whatever their state; `idle` ones hold nothing and await nothing."""

    total: int
    free: int
    credited: int
    quarantined: int
    idle: int


class LandingRing:
    """Slots of `blocks_per_slot` whole blocks (the boot chunk size), shared evenly among up to `max_peers` writers."""

    def __init__(
        self,
        ring_bytes: int,
        block_bytes: int,
        blocks_per_slot: int,
        max_peers: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if block_bytes % 4:
            raise ConfigError(f"a KV block of {block_bytes} bytes is not a whole number of 32-bit words")
        self.block_bytes = block_bytes
        self.blocks_per_slot = max(1, blocks_per_slot)
        self.slot_bytes = self.blocks_per_slot * block_bytes
        self.num_slots = ring_bytes // self.slot_bytes
        self.slots_per_peer = self.num_slots // max_peers
        if self.slots_per_peer < 2:
            raise ConfigError(
                f"transfer.ring_bytes = {ring_bytes} gives {self.num_slots} slots of {self.slot_bytes} bytes "
                f"({self.blocks_per_slot} blocks of {block_bytes}) for {max_peers} peers; each needs 2",
                help=f"set transfer.ring_bytes to at least {2 * max_peers * self.slot_bytes}, "
                "or a smaller transfer.chunk_tokens",
            )
        self.data = torch.empty(self.num_slots, self.slot_bytes, dtype=torch.uint8, device=device)
        self.data.zero_()  # touches every page now, not under the first chunk
        self._lock = threading.Lock()
        self._state = [SlotState.FREE] * self.num_slots
        self._owner = [""] * self.num_slots

    def assign(self, peer: str) -> tuple[int, ...]:
        """Gives `peer` its share. Raises TransferError when the ring has no share left."""
        with self._lock:
            if any(o == peer and s != SlotState.QUARANTINED for o, s in self._slots()):
                raise TransferError(f"peer {peer} already has its share of the landing ring")
            free = [i for i, s in enumerate(self._state) if s == SlotState.FREE][: self.slots_per_peer]
            if len(free) < 2:
                raise TransferError(f"the landing ring is full: {self.num_slots} slots, none left for peer {peer}")
            for slot in free:
                self._move(slot, SlotState.CREDITED, peer)
            return tuple(free)

    def has(self, peer: str) -> bool:
        """Whether `peer` has a share."""
        with self._lock:
            return any(o == peer and s != SlotState.QUARANTINED for o, s in self._slots())

    def begin_write(self, peer: str, slot: int, num_bytes: int) -> str:
        """CREDITED -> WRITING; "" or why not. For transports that see a write before it happens."""
        with self._lock:
            if not 0 <= slot < self.num_slots:
                return f"slot {slot} of {self.num_slots}"
            if self._owner[slot] != peer or self._state[slot] != SlotState.CREDITED:
                return f"slot {slot} is not credited to it"
            if not 0 <= num_bytes <= self.slot_bytes:
                return f"{num_bytes} bytes for a slot of {self.slot_bytes}"
            self._move(slot, SlotState.WRITING, peer)
            return ""

    def landed(self, peer: str, slot: int) -> bool:
        """The write has ended: CREDITED or WRITING -> HELD. False: not this peer's to write (a quarantined slot is
        freed by it), and the arrival means nothing."""
        with self._lock:
            if not 0 <= slot < self.num_slots or self._owner[slot] != peer:
                return False
            if self._state[slot] == SlotState.QUARANTINED:
                self._move(slot, SlotState.FREE, "")
            if self._state[slot] not in (SlotState.CREDITED, SlotState.WRITING):
                return False
            self._move(slot, SlotState.HELD, peer)
            return True

    def is_held(self, peer: str, slot: int) -> bool:
        """Whether the bytes of `slot` are `peer`'s last write and nobody can write over them now."""
        with self._lock:
            return 0 <= slot < self.num_slots and (self._owner[slot], self._state[slot]) == (peer, SlotState.HELD)

    def credit(self, peer: str, slot: int) -> bool:
        """HELD -> CREDITED, unless the peer was released meanwhile."""
        with self._lock:
            if self._owner[slot] != peer or self._state[slot] != SlotState.HELD:
                return False
            self._move(slot, SlotState.CREDITED, peer)
            return True

    def release(self, peer: str) -> None:
        """`peer` may write no more. What it might be writing right now is quarantined."""
        with self._lock:
            for slot, (owner, state) in enumerate(self._slots()):
                if owner == peer and state == SlotState.HELD:
                    self._move(slot, SlotState.FREE, "")
                elif owner == peer:
                    self._move(slot, SlotState.QUARANTINED, peer)

    def endpoint_gone(self, peer: str) -> None:
        """No write of `peer` can land any more: ends its quarantine."""
        with self._lock:
            for slot, (owner, state) in enumerate(self._slots()):
                if owner == peer and state == SlotState.QUARANTINED:
                    self._move(slot, SlotState.FREE, "")

    def counts(self) -> RingCounts:
        with self._lock:
            free = self._state.count(SlotState.FREE)
            quarantined = self._state.count(SlotState.QUARANTINED)
            idle = free + self._state.count(SlotState.CREDITED)
            return RingCounts(self.num_slots, free, self.num_slots - free - quarantined, quarantined, idle)

    def credited(self, peer: str) -> tuple[int, ...]:
        """Slots that `peer` may write now."""
        with self._lock:
            return tuple(i for i, held in enumerate(self._slots()) if held == (peer, SlotState.CREDITED))

    def check_integrity(self) -> None:
        with self._lock:
            for slot, (owner, state) in enumerate(self._slots()):
                assert (owner == "") == (state == SlotState.FREE), f"slot {slot}: {state.name} of {owner!r}"
            for peer in {o for o in self._owner if o}:
                share = sum(o == peer and s != SlotState.QUARANTINED for o, s in self._slots())
                assert share <= self.slots_per_peer, f"peer {peer} has {share} of {self.slots_per_peer} slots"

    def _slots(self) -> list[tuple[str, SlotState]]:
        return list(zip(self._owner, self._state, strict=True))

    def _move(self, slot: int, state: SlotState, owner: str) -> None:
        self._state[slot] = state
        self._owner[slot] = owner
