"""Block ids: who holds which, and which still hold a prefix worth finding again. No tensors here.

A block is in one of three places: referenced (by one or more block tables), cached (unreferenced, but its KV can be hit
until it is evicted, least recently used first), or free. Cached blocks count as free. What is evicted may go on in host
memory (`HostPool`) and be hit there. Block 0 is the null block: graph padding writes to it, so it is never given out.

A full block's name is a digest chained from its parent's, rooted in the salt. It is blake2b, not Python's `hash`:
clients choose the tokens, and whoever can build a collision would be served another's KV. A digest also names a block
whose parent was evicted and came back, and is equal in every process, where a trie of ids is neither.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

from server.engine.host_pool import HostPool
from server.errors import OutOfBlocks

Hit = int | bytes  # a block of the device, or the name of one that is on the host alone

_DIGEST_BYTES = 16
_TOKEN_BYTES = array("I").itemsize


def prefix_digests(tokens: Sequence[int], salt: str, block_size: int) -> Iterator[bytes]:
    """The names of the whole blocks of a prompt, first to last; the router asks for them too."""
    return _chain(blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest(), tokens, block_size)


def _chain(parent: bytes, tokens: Sequence[int], block_size: int) -> Iterator[bytes]:
    packed = array("I", tokens).tobytes()
    width = block_size * _TOKEN_BYTES
    for start in range(0, len(packed) - width + 1, width):
        parent = blake2b(parent + packed[start : start + width], digest_size=_DIGEST_BYTES).digest()
        yield parent


class BlockPool:
    def __init__(
        self, num_blocks: int, block_size: int, prefix_cache: bool = True, host: HostPool | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.host = host or HostPool()
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack: the block freed last is the warmest
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._digests: list[bytes | None] = [None] * num_blocks
        self._by_digest: dict[bytes, int] = {}
        self.is_watched = False  # somebody calls take_changes()
        self._changes: dict[bytes, bool] = {}

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks that can be hit and that nobody references."""
        return len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    @property
    def usage(self) -> float:
        return self.num_used / max(1, self.num_usable)

    def allocate(self, n: int) -> list[int]:
        """`n` blocks with one reference each. Raises OutOfBlocks, having taken nothing."""
        if n > self.num_free:
            raise OutOfBlocks(f"{n} blocks wanted, {self.num_free} of {self.num_usable} free")
        free = self._free
        blocks = [free.pop() if free else self._evict() for _ in range(n)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each; a cached block is no longer evictable."""
        for block in blocks:
            if not self._refs[block]:
                del self._evictable[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each. Last block first, so that of a prefix the tail is evicted before the root."""
        refs, digests, free = self._refs, self._digests, self._free
        for block in reversed(blocks):
            if not refs[block]:
                raise ValueError(f"block {block} released more often than held")
            refs[block] -= 1
            if refs[block]:
                continue
            if digests[block] is None:
                free.append(block)
            else:
                self._retire(block)

    def match(self, tokens: Sequence[int], salt: str = "") -> list[Hit]:
        """The longest cached prefix of `tokens`, whole blocks only. Takes no reference."""
        hits: list[Hit] = []
        if not self._by_digest and not self.host.num_used:
            return hits
        for digest in prefix_digests(tokens, salt, self.block_size):
            block = self._by_digest.get(digest)
            if block is None and digest not in self.host:
                break
            hits.append(digest if block is None else block)
        return hits

    def take(self, hits: Sequence[Hit], num_new: int) -> list[int]:
        """A block table: these hits, those on the host brought back, and new blocks. Raises OutOfBlocks."""
        self.acquire(hit for hit in hits if isinstance(hit, int))  # before allocating, which could evict them
        pinned = self.host.pin(hit for hit in hits if isinstance(hit, bytes))
        fresh = self.allocate(len(pinned) + num_new)
        back, new = fresh[: len(pinned)], fresh[len(pinned) :]
        self.host.restore(pinned, back)
        for name, block in zip(pinned, back, strict=True):
            self._name(block, name)
        returned = iter(back)
        return [hit if isinstance(hit, int) else next(returned) for hit in hits] + new

    def num_taken(self, hits: Iterable[Hit]) -> int:
        """By how many blocks the free count would shrink with these: those on the host, and those nobody references."""
        return sum(isinstance(hit, bytes) or not self._refs[hit] for hit in hits)

    def register(self, blocks: Sequence[int], tokens: Sequence[int], salt: str = "", first: int = 0) -> None:
        """Names `blocks[first:]` as far as `tokens`, those of block `first` on, fill them. Their KV must be written.

        A block whose content is already cached under another id keeps its name to chain from, but is not hit.
        """
        if not self.prefix_cache:
            return
        if not first:
            names = prefix_digests(tokens, salt, self.block_size)
        elif (parent := self._digests[blocks[first - 1]]) is not None:
            names = _chain(parent, tokens, self.block_size)
        else:
            raise ValueError(f"block {blocks[first - 1]} has no name yet: register a table from its start")
        for index, digest in enumerate(names, first):
            self._name(blocks[index], digest)

    @property
    def digests(self) -> Iterable[bytes]:
        """Of every block that can be hit, here or on the host."""
        return self._by_digest.keys() | self.host.names

    def take_changes(self) -> dict[bytes, bool]:
        """Digests that came (True) or went (False) since the last call, while `is_watched`."""
        changes, self._changes = self._changes, {}
        return changes

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError when counts, maps and the block tables that exist do not agree."""
        counts = Counter(block for table in tables for block in table)
        assert 0 not in counts, "the null block was given out"
        assert all(self._refs[b] == counts[b] for b in range(self.num_blocks)), "references differ from block tables"
        unreferenced = {b for b in range(1, self.num_blocks) if not self._refs[b]}
        assert len(self._free) + len(self._evictable) == len(unreferenced), "a block is free twice or lost"
        assert set(self._free) | set(self._evictable) == unreferenced, "a free block is referenced"
        assert all(self._digests[b] is None for b in self._free), "a free block has a name"
        assert all(self._digests[block] == digest for digest, block in self._by_digest.items()), "names disagree"
        assert set(self._evictable) <= set(self._by_digest.values()), "a cached block cannot be found"
        self.host.check_integrity()

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        digest = self._digests[block]
        assert digest is not None
        dropped = self.host.save(digest, block)
        self._forget(block)
        if dropped is not None:
            self._note(dropped)
        return block

    def _retire(self, block: int) -> None:
        """Nobody has this named block: it stays where it can be hit, unless another is hit in its place."""
        digest = self._digests[block]
        if digest is not None and self._by_digest.get(digest) == block:
            self._evictable[block] = None
        else:
            self._digests[block] = None
            self._free.append(block)

    def _name(self, block: int, digest: bytes) -> None:
        if self._digests[block] != digest:
            self._forget(block)
            self._digests[block] = digest
            if self._by_digest.setdefault(digest, block) == block:
                self._note(digest)

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None and self._by_digest.get(digest) == block:
            del self._by_digest[digest]
            self._note(digest)
        self._digests[block] = None

    def _note(self, digest: bytes) -> None:
        if self.is_watched:
            self._changes[digest] = digest in self._by_digest or digest in self.host
