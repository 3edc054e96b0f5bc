"""How plain torch reads and writes one layer of a paged pool, and scratch memory beside it."""

import torch

from server.engine.kv_cache import KVCachePool


class Scratch:
    """Named buffers that only grow: the kernel would map and zero fresh ones of this size each time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def get(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        need = 1
        for size in shape:
            need *= size
        have = self._buffers.get(name)
        if have is None or have.numel() < need:
            have = torch.empty(need + need // 4, dtype=dtype, device=self._device)
            self._buffers[name] = have
        return have[:need].view(shape)


class PoolView:
    """A pool as rows: K (or V) of one layer, block and head is one contiguous piece, [block_size * head_dim]; a token
    of it is one slot, [head_dim]. A layer is a shift of the flat view, so that one index serves all layers."""

    def __init__(self, pool: KVCachePool) -> None:
        spec, data = pool.spec, pool.data
        self.spec = spec
        self.device = data.device
        self._per_head = 2 * spec.num_layers  # pieces
        self._heads = torch.arange(spec.num_kv_heads, device=self.device)
        pieces = data.view(-1, spec.block_size * spec.head_dim)
        num_pieces = len(pieces) - self._per_head + 1
        both = [pieces[shift : shift + num_pieces] for shift in range(self._per_head)]
        # By layer, [pieces, block_size * head_dim].
        self.key_pieces, self.value_pieces = both[0::2], both[1::2]
        # By layer, [slots, head_dim].
        self.keys, self.values = ([p.view(-1, spec.head_dim) for p in each] for each in (both[0::2], both[1::2]))

    @property
    def num_slots(self) -> int:
        return len(self.keys[0])

    def piece_index(self, blocks: torch.Tensor) -> torch.Tensor:
        """Pieces of every KV head: [..., n] -> [..., kv_heads, n]."""
        return (blocks.unsqueeze(-2) * self.spec.num_kv_heads + self._heads.unsqueeze(-1)) * self._per_head

    def slot_index(self, slots: torch.Tensor) -> torch.Tensor:
        """Where tokens lie, by the slots of a BatchMeta: [n] -> [kv_heads, n]."""
        block, offset = slots // self.spec.block_size, slots % self.spec.block_size
        return self.piece_index(block) * self.spec.block_size + offset

    def gather(
        self, index: torch.Tensor, layer: int, batch: int, scratch: Scratch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the pieces of `index`, [batch, slots, head_dim], contiguous; valid until the next `gather`."""
        shape = (index.numel(), self.spec.block_size * self.spec.head_dim)
        k = torch.index_select(self.key_pieces[layer], 0, index, out=scratch.get("k", self.spec.dtype, *shape))
        v = torch.index_select(self.value_pieces[layer], 0, index, out=scratch.get("v", self.spec.dtype, *shape))
        return k.view(batch, -1, self.spec.head_dim), v.view(batch, -1, self.spec.head_dim)

    def span(self, context_len: int, first_query: int) -> tuple[int, int]:
        """Blocks [first, last) of a row that its queries from position `first_query` on can see."""
        window = self.spec.sliding_window
        low = 0 if window is None else max(0, first_query + 1 - window)
        return low // self.spec.block_size, self.spec.num_blocks_for(context_len)

    def bias(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """0, or -inf where the query at a position does not see the key at another; they broadcast."""
        hidden = key > query
        if self.spec.sliding_window is not None:
            hidden |= key <= query - self.spec.sliding_window
        return torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, float("-inf"))
