"""The blocks of sequences: what a sequence needs, takes, fills and gives back. The only caller of BlockPool."""

from typing import NamedTuple

from server.engine.block_pool import BlockPool, Hit
from server.errors import CannotFit
from server.sequence import Sequence


class Need(NamedTuple):
    """What holding all known tokens of a sequence takes now: cached blocks, and new ones."""

    hits: list[Hit]
    num_new: int
    num_taken: int  # blocks by which the free count would shrink: the new ones and hits that nobody references yet


class BlockTables:
    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.capacity = pool.num_usable * pool.block_size  # tokens that a sequence alone in the pool can have
        self.prefix_hit_tokens = 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def check_fits(self, seq: Sequence, max_len: int) -> None:
        """Refuses a sequence for which no amount of waiting makes room: its tokens and one more."""
        limit = min(max_len, self.capacity)
        if not 0 < seq.num_tokens < limit:
            raise CannotFit(
                f"{seq.id}: {seq.num_tokens} tokens and one more do not fit: limit {limit} (max_len {max_len}, "
                f"pool {self.capacity} tokens in {self.pool.num_usable} blocks of {self.pool.block_size})"
            )

    def need(self, seq: Sequence) -> Need:
        """Hits leave out the last token: it is always computed, and never into a block that others read."""
        hits = self.pool.match(seq.tokens(0, seq.num_tokens - 1), seq.salt)
        num_new = self.blocks_for(seq.num_tokens) - len(hits)
        return Need(hits, num_new, num_new + self.pool.num_taken(hits))

    def take(self, seq: Sequence, need: Need) -> int:
        """Gives the sequence its blocks; returns the tokens already computed in them."""
        seq.block_table = self.pool.take(need.hits, need.num_new)
        hit_tokens = len(need.hits) * self.pool.block_size
        self.prefix_hit_tokens += hit_tokens
        return hit_tokens

    def num_slots(self, seq: Sequence) -> int:
        """How many tokens more its blocks have room for."""
        return len(seq.block_table) * self.pool.block_size - seq.num_scheduled

    def grow(self, seq: Sequence, num_blocks: int = 1) -> None:
        seq.block_table += self.pool.allocate(num_blocks)

    def wrote(self, seq: Sequence, start: int, stop: int) -> None:
        """The KV of tokens [start, stop) is written: whole blocks that this completes can be hit from now on."""
        if not self.pool.prefix_cache:
            return
        size = self.pool.block_size
        first, last = start // size, stop // size
        if last > first:
            self.pool.register(seq.block_table, seq.tokens(first * size, last * size), seq.salt, first)

    def free(self, seq: Sequence) -> None:
        self.pool.release(seq.block_table)
        seq.block_table = []
