"""Codecs alone, and over every transport: zstd gives back each bit, fp8 stays within its bound at half the bytes."""

import pytest
import torch

from server.errors import TransferError
from server.messages import ChunkTag
from server.transfer.codec import FP8, NONE, ZSTD, Codec
from server.transfer.either import choose
from tests.transfer.world import BLOCK_BYTES, World, seq

GROUP = 16 * 64


def kv(dtype: torch.dtype, num_blocks: int = 8) -> torch.Tensor:
    """Numbers as a model's KV has them: around zero, a few large."""
    torch.manual_seed(1)
    values = torch.randn(num_blocks, 4 * GROUP) * torch.rand(num_blocks, 4 * GROUP).exp()
    values[:, 5] = 80.0
    values[1] = 0.0
    return values.to(dtype)


def round_trip(name: str, values: torch.Tensor, ids: list[int]) -> tuple[torch.Tensor, int]:
    codec = Codec(name, values.dtype, GROUP)
    blocks = values.view(len(values), -1).view(torch.uint8)
    target = torch.zeros(blocks.numel(), dtype=torch.uint8)
    code, num_bytes = codec.encode(blocks, ids, target)
    assert code == codec.code
    plain = codec.decode(code, target[:num_bytes], len(ids) * blocks.shape[1])
    assert codec.seconds > 0
    return plain.view(values.dtype).view(len(ids), -1), num_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zstd_is_bit_equal_and_smaller(dtype: torch.dtype) -> None:
    values, ids = kv(dtype), [3, 4, 5, 1]
    plain, num_bytes = round_trip("zstd", values, ids)
    assert torch.equal(plain.view(torch.uint8), values[ids].view(torch.uint8))
    assert num_bytes < 0.9 * plain.numel() * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_is_half_of_bf16_and_within_its_bound(dtype: torch.dtype) -> None:
    """Three bits of mantissa: within 1/16 of a value, or of the smallest step that its group's largest leaves."""
    values, ids = kv(dtype), [6, 1, 2]
    plain, num_bytes = round_trip("fp8", values, ids)
    assert num_bytes == pytest.approx(plain.numel(), rel=0.005)
    exact = values[ids].float().view(-1, GROUP)
    bound = torch.maximum(exact.abs() / 15, exact.abs().amax(1, keepdim=True) / 448 / 512) + 1e-30
    assert bool(((plain.float().view(-1, GROUP) - exact).abs() <= bound).all())
    assert not plain[1].any()


def test_what_would_not_shrink_is_sent_as_it_is() -> None:
    noise = torch.randint(0, 256, (4, 4096), dtype=torch.uint8)
    assert Codec("zstd", torch.bfloat16, GROUP).encode(noise, [1, 2], torch.zeros(8192, dtype=torch.uint8))[0] == NONE


@pytest.mark.parametrize("name", ["zstd", "fp8"])
def test_what_encode_never_made_is_refused(name: str) -> None:
    codec = Codec(name, torch.bfloat16, GROUP)
    rng = torch.Generator().manual_seed(2)
    for size in (0, 1, 7, 4096, 5000):
        junk = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=rng)
        with pytest.raises(TransferError):
            codec.decode(codec.code, junk, 8192)
    with pytest.raises(TransferError, match="agreed was"):
        codec.decode(FP8 if codec.code == ZSTD else ZSTD, torch.zeros(10, dtype=torch.uint8), 8192)


def codec_world(kind: str, name: str, theirs: str | None = None) -> World:
    def make(which: str) -> Codec:
        return Codec(which, torch.bfloat16, 512)

    world = World(kind, codec=make(name), receiver_codec=make(theirs or name), offered_codec=theirs or name)
    world.source.view(torch.bfloat16).copy_(torch.randn(world.source.shape[0], BLOCK_BYTES // 2))
    return world


@pytest.mark.parametrize("name", ["zstd", "fp8"])
def test_pair_with_a_codec(kind: str, name: str) -> None:
    world = codec_world(kind, name)
    source, target = list(range(1, 100)), list(range(200, 299))
    world.open(seq(1), source, target)
    world.push(seq(1), 99)
    stats = world.complete(seq(1))
    assert stats.kv_bytes == 99 * BLOCK_BYTES
    assert stats.wire_bytes == world.sender.counters["sent_bytes"] < (0.52 if name == "fp8" else 0.9) * stats.kv_bytes
    assert world.same(source, target) == (name == "zstd")
    exact, got = world.source[source].view(torch.bfloat16).float(), world.pool[target].view(torch.bfloat16).float()
    assert (exact - got).abs().max() < 0.3
    assert world.sender.counters["encode_s"] > 0
    assert world.receiver.counters["decode_s"] > 0
    world.drop(seq(1))
    world.check()
    world.close()


def test_pair_that_agrees_on_nothing_sends_plain(kind: str) -> None:
    world = codec_world(kind, "zstd", "fp8")
    world.open(seq(1), [1, 2, 3], [4, 5, 6])
    world.push(seq(1), 3)
    stats = world.complete(seq(1))
    assert stats.wire_bytes == stats.kv_bytes
    assert world.same([1, 2, 3], [4, 5, 6])
    world.drop(seq(1))
    world.close()


def test_encoded_chunk_that_cannot_be_read_is_asked_for_again() -> None:
    world = World("local")
    world.receiver.open(seq(1), "P", 1, [5, 6], 0, 2)
    slot = world.slots[0]
    tag = ChunkTag(seq(1), 1, slot, 0, 2, 100, 0, ZSTD)
    assert world.d_thread.run(world.receiver._source, world.receiver._receives[seq(1)], tag) is None
    assert world.d.get("missing") == ("missing", seq(1), ((0, 2),))
    assert world.receiver.counters["codec_failures"] == 1
    world.receiver.revoke(seq(1))
    world.close()


def test_the_choice_of_a_transport_says_why() -> None:
    assert choose(["nixl", "tcp"], ["nixl", "tcp"]) == ("nixl", "both ends have it")
    assert choose(["nixl", "tcp"], ["tcp"]) == ("tcp", "no nixl there")
    assert choose(["tcp"], ["nixl", "tcp"], {"nixl": "not installed"}) == ("tcp", "no nixl here: not installed")
    with pytest.raises(TransferError, match="no transport in common: nixl here, tcp there"):
        choose(["nixl"], ["tcp"])
