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

from server.errors import TransferError

_MASK = 2**64 - 1
_MASK32 = 2**32 - 1
_LENGTH_WEIGHT = 0x9E3779B97F4A7C15
_PIECE_WORDS = 96 * 1024  # a widened piece (768 KiB) stays in a core's L2 cache

# Of int32 pieces, each with the position of its first word; as a signed or unsigned number of 64 bits
WeightedSum = Callable[[list[tuple[Tensor, int]]], int]


def position_weights(num_words: int) -> Tensor:
    """The first `num_words` weights, the same everywhere: a mixed-up upper half (the finalizer of MurmurHash3), a
    distinct odd lower half. A CUDA device makes them as it goes (`checksum_cuda`): reading them would be twice the
    bytes that are summed."""
    index = torch.arange(num_words, dtype=torch.int64)
    mixed = (index * 0x9E3779B1) & _MASK32
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & _MASK32
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _MASK32
    upper = (mixed ^ (mixed >> 16)) >> 1
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
        self._tail = torch.zeros(1, dtype=torch.int32, device=device)
        self._total = _on_cuda(self._tail.device) if self._tail.is_cuda else _on_cpu(-(-max_bytes // 4))

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
        return self.of_total(self._total(words), num_bytes)

    @staticmethod
    def of_total(total: int, num_bytes: int) -> int:
        """From a sum of products that somebody else made of that many bytes."""
        return (total + num_bytes * _LENGTH_WEIGHT) & _MASK


def _on_cpu(max_words: int) -> WeightedSum:
    weights = position_weights(max_words)
    wide = torch.empty(min(_PIECE_WORDS, max(1, max_words)), dtype=torch.int64)

    def weighted_sum(pieces: list[tuple[Tensor, int]]) -> int:
        total = torch.zeros(1, dtype=torch.int64)
        for words, position in pieces:
            for start in range(0, words.numel(), wide.numel()):
                part = words[start : start + wide.numel()]
                widened = wide[: part.numel()]
                widened.copy_(part)  # widening apart from the product is twice as fast as a mixed-type product
                total += torch.dot(widened, weights[position + start : position + start + part.numel()])
        return int(total)

    return weighted_sum


def _on_cuda(device: torch.device) -> WeightedSum:
    from server.transfer.checksum_cuda import CudaSum

    return CudaSum(device)
