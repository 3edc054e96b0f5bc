"""Checksums of KV bytes: which one a pair uses follows from where the landing ring is, and the ring's side says it.

XXH3 where the ring lies in host memory. On a CUDA device, where it is made there and in parallel, a sum of products:

Multilinear hashing (Lemire and Kaser): the bytes are 32-bit words, each is multiplied by the 64-bit weight of its
position, and everything is added up modulo 2^64, with the length on top. A word, block or piece at another place, or
missing, or a zero tail of another length, changes the sum with probability 1 - 2^-32 or better.

One or two flipped bits are caught always, not just probably. All weights are odd, so one flip at bit a adds
w * 2^a != 0, and two at different bits leave an odd multiple of the lower one. Two flips at the same bit a <= 31 cancel
only if w_i = +-w_j modulo 2^(64 - a), so the low 33 bits of the weights are distinct odd numbers below 2^32: neither
their differences nor their sums are multiples of 2^33.

Neither is a defence against someone who forges data. Peers are authenticated before they get a path. On one core of a
CPU XXH3 makes 34 GB/s from memory, the sum of products 8 (bench/transfer.py).
"""

from collections.abc import Callable
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from server.device import on_host
from server.errors import TransferError

_MASK = 2**64 - 1
_LENGTH_WEIGHT = 0x9E3779B97F4A7C15
_SEED = 20240917
_PIECE_WORDS = 96 * 1024  # a widened piece (768 KiB) stays in a core's L2 cache

# int64 [1], modulo 2^64, of int32 pieces (each with the position of its first word) and the weights of all positions
WeightedSum = Callable[[list[tuple[Tensor, int]], Tensor], Tensor]


def position_weights(num_words: int) -> Tensor:
    """The first `num_words` weights, the same in every process: random upper half, distinct odd lower half."""
    upper = torch.randint(0, 2**31, (num_words,), generator=torch.Generator().manual_seed(_SEED), dtype=torch.int64)
    index = torch.arange(num_words, dtype=torch.int64)
    lower = (index * 0x5851F42D + 0x14057B7E) % 2**31 * 2 + 1  # an odd factor permutes the residues: no two alike
    return (upper << 33) | lower


class Checksum(Protocol):
    """One instance belongs to one thread."""

    max_bytes: int

    def __call__(self, pieces: list[Tensor]) -> int:
        """Of the bytes of `pieces`, contiguous uint8, one after the other: 64 bits."""
        ...


def checksum_name(ring: torch.device) -> str:
    """Of a pair whose landing ring lies on that device."""
    return "multilinear" if ring.type == "cuda" else "xxh3"


def make_checksum(name: str, max_bytes: int, device: torch.device) -> Checksum:
    """Of bytes on `device`. Raises TransferError."""
    if name not in ("xxh3", "multilinear"):
        raise TransferError(f"the peer wants checksums by {name!r}; known are xxh3 and multilinear")
    return Xxh3(max_bytes) if name == "xxh3" else Multilinear(max_bytes, device)


class Xxh3:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes

    def __call__(self, pieces: list[Tensor]) -> int:
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece.cpu().numpy().data)
        return digest.intdigest()


class Multilinear:
    """Sums up to `max_bytes`. Owns its temporaries, so one instance belongs to one thread."""

    def __init__(self, max_bytes: int, device: torch.device | str = "cpu") -> None:
        self.max_bytes = max_bytes
        num_words = -(-max_bytes // 4)
        self._weights = position_weights(num_words).to(device)
        self._tail = torch.zeros(1, dtype=torch.int32, device=device)
        self._total = _on_cpu(num_words) if self._weights.device.type == "cpu" else _on_cuda()
        if self._weights.is_cuda:  # compiled now, for both alignments, and not under the first chunk
            self._total([(self._tail, 0), (self._tail, 1)], position_weights(2).to(device))

    def __call__(self, pieces: list[Tensor]) -> int:
        """All pieces but the last are whole words long."""
        words: list[tuple[Tensor, int]] = []
        position = num_bytes = 0
        for piece in pieces:
            if num_bytes % 4:
                raise TransferError(f"checksum: a piece begins at byte {num_bytes}, inside a word")
            num_bytes += piece.numel()
            if num_bytes > self.max_bytes:
                raise TransferError(f"checksum: {num_bytes} bytes, made for {self.max_bytes}")
            whole = piece.numel() & ~3
            words.append((piece[:whole].view(torch.int32), position))
            position += whole // 4
            if whole < piece.numel():
                self._tail.zero_().view(torch.uint8)[: piece.numel() - whole].copy_(piece[whole:])
                words.append((self._tail, position))
        total = int(on_host(self._total(words, self._weights)))  # the only wait for the device
        return (total + num_bytes * _LENGTH_WEIGHT) & _MASK


def _on_cpu(max_words: int) -> WeightedSum:
    wide = torch.empty(min(_PIECE_WORDS, max(1, max_words)), dtype=torch.int64)

    def weighted_sum(pieces: list[tuple[Tensor, int]], weights: Tensor) -> Tensor:
        total = torch.zeros(1, dtype=torch.int64)
        for words, position in pieces:
            for start in range(0, words.numel(), wide.numel()):
                part = words[start : start + wide.numel()]
                widened = wide[: part.numel()]
                widened.copy_(part)  # widening apart from the product is twice as fast as a mixed-type product
                total += torch.dot(widened, weights[position + start : position + start + part.numel()])
        return total

    return weighted_sum


def _on_cuda() -> WeightedSum:
    from server.transfer.checksum_cuda import weighted_sum

    return weighted_sum
