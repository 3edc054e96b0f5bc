"""KV bytes made smaller for the wire, and back.

- zstd: lossless. The bytes of equal significance are laid side by side first (exponents repeat, mantissas do not).
- fp8: lossy. float8_e4m3fn with one scale for each head's K or V of a layer in a block: half of bf16's bytes.

A chunk says in its tag how it was made, and one that would not shrink is sent as it is. The receiver accepts what the
pair settled on at the handshake and plain chunks, nothing else.
"""

import time
from typing import Protocol

import numpy as np
import torch
import zstandard
from torch import Tensor

from server.errors import TransferError
from server.transfer.coverage import runs

NONE, ZSTD, FP8 = 0, 1, 2
NAMES = {"none": NONE, "zstd": ZSTD, "fp8": FP8}
_ZSTD_LEVEL = 1
_FP8_MAX = 448.0
_SCALE_BYTES = 4


class BlockSpec(Protocol):
    """What of the engine's KVSpec concerns a transfer."""

    @property
    def block_size(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...


class Codec:
    """`dtype` of the pool; `group`: elements that share an fp8 scale (one head's K or V of one layer in a block)."""

    def __init__(self, name: str, dtype: torch.dtype, group: int) -> None:
        self.name = name
        self.code = NAMES[name]
        self.seconds = 0.0  # spent in encode or decode
        self._dtype = dtype
        self._group = group
        self._compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()

    def fp8_bytes(self, num_bytes: int) -> int:
        """What `num_bytes` of KV become as fp8."""
        num = num_bytes // self._dtype.itemsize
        return num + num // self._group * _SCALE_BYTES

    def encode(self, blocks: Tensor, ids: list[int], target: Tensor) -> tuple[int, int]:
        """Blocks `ids` of the pool into `target`: (code, bytes). NONE: they would not shrink, and nothing is there."""
        start = time.monotonic()
        plain = torch.cat([blocks[first:stop].view(-1) for first, stop in runs(ids)])
        data = self._shuffled(plain) if self.code == ZSTD else self._narrowed(plain)
        is_smaller = data.numel() < min(plain.numel(), target.numel() + 1)
        if is_smaller:
            target[: data.numel()].copy_(data)
        self.seconds += time.monotonic() - start
        return (self.code, data.numel()) if is_smaller else (NONE, plain.numel())

    def decode(self, code: int, data: Tensor, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]. Raises TransferError when `data` is not what `encode` makes of that much."""
        if code != self.code or code == NONE:
            raise TransferError(f"a chunk came with codec {code}, agreed was {self.name}")
        start = time.monotonic()
        plain = self._unshuffled(data, num_bytes) if code == ZSTD else self._widened(data, num_bytes)
        self.seconds += time.monotonic() - start
        return plain

    def _shuffled(self, plain: Tensor) -> Tensor:
        # numpy: transposing bytes is eight times as fast there
        planes = np.ascontiguousarray(plain.cpu().numpy().reshape(-1, self._dtype.itemsize).T)
        packed = self._compressor.compress(planes.data)
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def _unshuffled(self, data: Tensor, num_bytes: int) -> Tensor:
        packed = data.cpu().numpy().tobytes()
        try:
            if zstandard.frame_content_size(packed) != num_bytes:  # before a byte of it is unpacked
                raise TransferError("a zstd chunk of another size than its tag says")
            planes = np.frombuffer(self._decompressor.decompress(packed), dtype=np.uint8)
        except zstandard.ZstdError as error:
            raise TransferError(f"a zstd chunk cannot be unpacked: {error}") from error
        return torch.from_numpy(np.ascontiguousarray(planes.reshape(self._dtype.itemsize, -1).T).reshape(-1))

    def _narrowed(self, plain: Tensor) -> Tensor:
        values = plain.view(self._dtype).view(-1, self._group).float()
        scales = (values.abs().amax(1, keepdim=True) / _FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
        narrow = (values / scales).to(torch.float8_e4m3fn)
        return torch.cat([scales.view(-1).view(torch.uint8), narrow.view(-1).view(torch.uint8)])

    def _widened(self, data: Tensor, num_bytes: int) -> Tensor:
        if data.numel() != self.fp8_bytes(num_bytes):
            raise TransferError("an fp8 chunk of another size than its tag says")
        num_scales = num_bytes // self._dtype.itemsize // self._group
        scales = data[: num_scales * _SCALE_BYTES].clone().view(torch.float32).view(-1, 1)
        narrow = data[num_scales * _SCALE_BYTES :].clone().view(torch.float8_e4m3fn).view(-1, self._group)
        return (narrow.float() * scales).to(self._dtype).view(-1).view(torch.uint8)
