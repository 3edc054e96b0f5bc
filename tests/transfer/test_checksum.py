"""What the checksum must see: any one or two flipped bits, moved words and blocks, truncation, other lengths."""

import random

import pytest
import torch

from server.errors import TransferError
from server.transfer.checksum import Checksum, Multilinear, Xxh3, make_checksum, position_weights

NUM_BYTES = 3 * 64 * 1024 * 4 + 1000  # several cache pieces and a part


@pytest.fixture(scope="module", params=["xxh3", "multilinear"])
def checksum(request: pytest.FixtureRequest) -> Checksum:
    return make_checksum(request.param, NUM_BYTES, torch.device("cpu"))


@pytest.fixture
def data() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=generator)


def test_same_bytes_same_sum_however_cut(checksum: Checksum, data: torch.Tensor) -> None:
    whole = checksum([data])
    assert 0 <= whole < 2**64
    assert checksum([data.clone()]) == whole
    assert checksum([data[:4096], data[4096:8192], data[8192:]]) == whole


def test_known_value() -> None:
    """Both ends compute it in their own process, maybe of another release: the function is part of the protocol."""
    assert Multilinear(16)([torch.arange(16, dtype=torch.uint8)]) == 0xCCCDDA416E5B34B8
    assert Xxh3(16)([torch.arange(16, dtype=torch.uint8)]) == 0x8355E3A6F61770DB


def test_any_flipped_bit(checksum: Checksum, data: torch.Tensor) -> None:
    good = checksum([data])
    rng = random.Random(1)
    for position in [0, 3, NUM_BYTES - 1, *(rng.randrange(NUM_BYTES) for _ in range(50))]:
        for bit in (0, 7):
            data[position] ^= 1 << bit
            assert checksum([data]) != good
            data[position] ^= 1 << bit


@pytest.mark.parametrize("bit", [0, 5, 7])
def test_two_flipped_bits_of_the_same_weight(checksum: Checksum, data: torch.Tensor, bit: int) -> None:
    """Bit 7 of a word's last byte is its top bit: the hard case for a sum of products."""
    good = checksum([data])
    rng = random.Random(2)
    for _ in range(100):
        first, second = (4 * w + 3 for w in rng.sample(range(NUM_BYTES // 4), 2))
        data[first] ^= 1 << bit
        data[second] ^= 1 << bit
        assert checksum([data]) != good
        data[first] ^= 1 << bit
        data[second] ^= 1 << bit


def test_no_two_weights_cancel() -> None:
    """The reason why two flips never cancel, for every pair at once: distinct odd numbers below 2^32 in 33 bits."""
    low = position_weights(4 * 2**20) & (2**33 - 1)
    assert bool((low % 2 == 1).all())
    assert bool((low < 2**32).all())
    assert torch.unique(low).numel() == low.numel()


def test_weights_do_not_depend_on_how_many() -> None:
    assert torch.equal(position_weights(1000), position_weights(50_000)[:1000])


def test_moved_words_and_blocks(checksum: Checksum, data: torch.Tensor) -> None:
    good = checksum([data])
    words = data.view(torch.int32).clone()
    words[[10, 11]] = words[[11, 10]]
    assert checksum([words.view(torch.uint8)]) != good
    blocks = data[:65536].view(16, 4096).clone()
    blocks[[2, 9]] = blocks[[9, 2]]
    assert checksum([blocks.view(-1), data[65536:]]) != good
    assert checksum([data[4096:8192], data[:4096], data[8192:]]) != good
    piece = 64 * 1024 * 4
    assert checksum([data[piece : 2 * piece], data[:piece], data[2 * piece :]]) != good


def test_length_counts(checksum: Checksum, data: torch.Tensor) -> None:
    sums = {checksum([data[:n]]) for n in range(NUM_BYTES - 20, NUM_BYTES)}
    zeros = {checksum([torch.zeros(n, dtype=torch.uint8)]) for n in range(64)}
    assert len(sums) == 20
    assert len(zeros) == 64
    assert checksum([data[:-4], torch.zeros(4, dtype=torch.uint8)]) != checksum([data[:-4]])


def test_limits(data: torch.Tensor) -> None:
    checksum = Multilinear(NUM_BYTES)
    assert checksum([]) == 0
    with pytest.raises(TransferError, match="inside a word"):
        checksum([data[:6], data[6:12]])
    with pytest.raises(TransferError, match="made for"):
        checksum([data, data])


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(TransferError, match="'crc7'; known are xxh3 and multilinear"):
        make_checksum("crc7", 64, torch.device("cpu"))
