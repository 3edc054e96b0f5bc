"""On a CUDA device: the transfer's stream, the engine's, and who may read what when."""

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from server.transfer.blocks import Mover
from server.transfer.checksum import Multilinear
from server.transfer.codec import Codec
from server.transfer.streams import remote_write_flush
from tests.transfer.world import BLOCK_SIZE, World, random_pool, seq

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DEVICE = torch.device("cuda:0")
LONG = 4_000_000_000  # clock cycles: about two seconds


@pytest.fixture(params=["local", "nixl"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "nixl":
        pytest.importorskip("nixl_cu13")
    world = World(request.param, device="cuda", block_bytes=65536, num_blocks=256)
    yield world
    world.close()


def test_the_checksum_is_the_one_of_a_cpu() -> None:
    """Pieces of unequal length, in no order in memory, and a tail that is no whole word."""
    data = random_pool(3, 64, 4096)
    pieces = [data[40:47].view(-1), data[3], data[20:22].view(-1), data[9, :1001]]
    here, there = Multilinear(2**20), Multilinear(2**20, DEVICE)
    assert there([piece.to(DEVICE) for piece in pieces]) == here(pieces)
    assert there([]) == here([])


@pytest.mark.parametrize("block_bytes", [4, 1000, 65536, 70_000])
def test_blocks_are_summed_up_as_they_move(block_bytes: int) -> None:
    """Out of a pool and back into it: the bytes are where they belong, whoever has a block keeps it, and the sum is the
    one that a CPU makes of the piece."""
    pool, theirs = random_pool(1, 40, block_bytes), random_pool(2, 40, block_bytes)
    checksum = Multilinear(40 * block_bytes)
    here, there = Mover(pool.to(DEVICE)), theirs.to(DEVICE)
    ids = [7, 8, 3, 30, 0]
    piece = torch.zeros(len(ids) * block_bytes, dtype=torch.uint8, device=DEVICE)
    total = here.gather(ids, piece)
    assert torch.equal(piece.cpu(), pool[ids].view(-1))
    expected = checksum([pool[ids].view(-1)])
    assert Multilinear.of_total(total, piece.numel()) == expected
    total = Mover(there).scatter(piece.view(len(ids), -1), 10, [11, 13], {11: 20, 12: 21, 13: 5})  # type: ignore[arg-type]
    assert Multilinear.of_total(total, piece.numel()) == expected
    theirs[20], theirs[5] = pool[8], pool[30]
    assert torch.equal(there.cpu(), theirs)


def test_a_chunk_crosses_while_the_engine_computes(world: World) -> None:
    """1. What is loaded and allocated at its first use is. 2. The device is busy for two seconds on the stream that the
    engine uses. 3. A prompt's blocks cross, are verified and copied before that is over."""
    source, target = list(range(10, 40)), list(range(100, 130))
    world.open(seq(0), source, target)
    world.push(seq(0), len(source))
    world.complete(seq(0))
    world.drop(seq(0))
    world.pool.zero_()
    world.open(seq(1), source, target)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    over = torch.cuda.Event()
    over.record()
    world.push(seq(1), len(source))
    stats = world.complete(seq(1))
    assert not over.query()
    assert stats.kv_bytes == len(source) * 65536
    over.synchronize()
    assert world.same(source, target)
    world.drop(seq(1))
    world.check()


def test_blocks_that_are_complete_may_be_read_at_once(world: World) -> None:
    """Once it is said that a sequence's blocks are here, another stream finds them and waits for nothing."""
    reader = torch.cuda.Stream(priority=-1)
    for number in range(20):
        source, target = list(range(1 + number, 100 + number)), list(range(120, 219))
        world.pool.zero_()
        torch.cuda.synchronize()
        world.open(seq(number), source, target)
        world.push(seq(number), len(source))
        world.complete(seq(number))
        with torch.cuda.stream(reader):
            assert world.same(source, target)
        world.drop(seq(number))
    world.check()


@pytest.mark.parametrize("name", ["zstd", "fp8"])
def test_an_encoded_chunk_is_whole_before_it_is_sent(name: str) -> None:
    """Without a checksum nothing else would wait for the codec's kernels."""
    codecs = [Codec(name, torch.bfloat16, BLOCK_SIZE * 64) for _ in range(2)]
    world = World(
        "local", device="cuda", block_bytes=65536, num_blocks=256, checksum=False,
        codec=codecs[0], receiver_codec=codecs[1], offered_codec=name,
    )  # fmt: skip
    values = torch.randn(256, 32768, device=DEVICE).round(decimals=1).to(torch.bfloat16)
    world.source.copy_(values.view(torch.uint8))
    torch.cuda.synchronize()
    source, target = list(range(10, 90)), list(range(100, 180))
    world.open(seq(1), source, target)
    world.push(seq(1), len(source))
    world.complete(seq(1))
    arrived = world.pool[target].view(torch.bfloat16).float()
    torch.testing.assert_close(arrived, values[source].float(), rtol=0.07, atol=0.05)
    assert world.sender.counters["sent_bytes"] < world.sender.counters["sent_kv_bytes"]
    world.drop(seq(1))
    world.check()
    world.close()


def test_what_the_network_wrote_is_flushed_before_it_is_read(world: World) -> None:
    """The driver takes the call, and the receiver makes it before each look into the ring."""
    remote_write_flush(DEVICE)()
    calls: list[int] = []
    world.receiver._flush = lambda: calls.append(1)
    world.open(seq(1), [5, 6, 7, 8, 9], [15, 16, 17, 18, 19])
    world.push(seq(1), 5)
    world.complete(seq(1))
    assert len(calls) == 2  # chunks of four blocks and of one
    world.drop(seq(1))
    world.check()
