"""Host memory for KV that the device's pool gives up: what lies there, by name, least recently used first. Ids only.

A block is copied out when it is evicted on the device and never earlier, so what nobody else needs room for stays where
it is, and a block that others share is not copied while they hold it. One brought back keeps its copy here: to evict it
again costs nothing. When this memory is full, what was used longest ago is dropped, to be computed again.

The copies are in the order in which they were decided. Whoever lets the pool hand out blocks carries them out before
anything reads or writes these blocks (`Engine.copy_blocks`), so no block is written while its old KV is still leaving.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple


class Copy(NamedTuple):
    block: int  # of the device
    host_block: int
    is_out: bool  # from the device to the host


class HostPool:
    def __init__(self, num_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.is_worthwhile = True  # bringing a block back costs less than computing it again
        self.num_out = 0  # blocks copied since the start
        self.num_in = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._copies: list[Copy] = []

    @property
    def num_used(self) -> int:
        return len(self._places)

    @property
    def names(self) -> Iterable[bytes]:
        return self._places.keys()

    def __contains__(self, name: bytes) -> bool:
        return name in self._places

    def save(self, name: bytes, block: int) -> bytes | None:
        """The device evicts `block`. Returns the name that had to go for it, if any."""
        if name in self._places:
            self._places.move_to_end(name)
            return None
        if not self.is_worthwhile or (not self._free and not self._places):
            return None
        dropped = None
        if not self._free:
            dropped, place = self._places.popitem(last=False)
            self._free.append(place)
        self._places[name] = self._free.pop()
        self._copies.append(Copy(block, self._places[name], is_out=True))
        self.num_out += 1
        return dropped

    def pin(self, names: Iterable[bytes]) -> dict[bytes, int]:
        """Takes them out of the order, so that what is evicted before `restore` cannot push them out."""
        return {name: self._places.pop(name) for name in names}

    def restore(self, pinned: dict[bytes, int], blocks: Iterable[int]) -> None:
        """Brings them back into `blocks` of the device, in order; the last of a prefix is dropped before its root."""
        for place, block in zip(pinned.values(), blocks, strict=True):
            self._copies.append(Copy(block, place, is_out=False))
        self._places.update(reversed(pinned.items()))
        self.num_in += len(pinned)

    def take_copies(self) -> list[Copy]:
        """What is to be copied since the last call, in this order."""
        copies, self._copies = self._copies, []
        return copies

    def check_integrity(self) -> None:
        """Raises AssertionError when a host block is in two places or in none."""
        places = [*self._free, *self._places.values()]
        assert sorted(places) == list(range(self.num_blocks)), "a host block is in two places, or lost"
