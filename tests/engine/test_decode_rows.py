"""Decode rows in plain torch, gathered and in place, against a plain softmax over each row's own tokens."""

import pytest
import torch

from server.engine.attention import BatchMeta
from server.engine.decode_rows import DecodeRows, GatheredRows, InPlaceRows, decode_rows
from server.engine.kv_cache import KVCachePool, KVSpec
from server.engine.pool_view import PoolView, Scratch

BLOCK, LAYERS, KV_HEADS, HEAD_DIM = 4, 3, 2, 12
WAYS: list[type[InPlaceRows] | type[GatheredRows]] = [InPlaceRows, GatheredRows]


def make_pool(num_blocks: int, window: int | None = None, dtype: torch.dtype = torch.float32) -> KVCachePool:
    pool = KVCachePool(KVSpec(LAYERS, KV_HEADS, HEAD_DIM, dtype, BLOCK, window), num_blocks)
    pool.data[1:] = torch.randn(pool.data[1:].shape, generator=torch.Generator().manual_seed(1))
    return pool


def make_meta(lengths: list[int], tables: list[list[int]]) -> BatchMeta:
    slots = [table[(n - 1) // BLOCK] * BLOCK + (n - 1) % BLOCK for n, table in zip(lengths, tables, strict=True)]
    starts = list(range(len(lengths) + 1))
    return BatchMeta([0] * len(lengths), [n - 1 for n in lengths], slots, starts, lengths, tables, len(lengths))


def scattered(lengths: list[int]) -> list[list[int]]:
    """A block table for each length; the pool needs one block more than they have in all."""
    counts = [-(-n // BLOCK) for n in lengths]
    blocks = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(2)) + 1).tolist()
    return [blocks[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(counts))]


def make_query(heads: int, rows: int) -> torch.Tensor:
    return torch.randn(heads, rows, HEAD_DIM, generator=torch.Generator().manual_seed(3))


def expected(pool: KVCachePool, meta: BatchMeta, query: torch.Tensor, layer: int) -> torch.Tensor:
    heads, rows, _ = query.shape
    out = torch.empty(rows, heads, HEAD_DIM)
    for row, (length, table) in enumerate(zip(meta.context_lens, meta.block_tables, strict=True)):
        low = max(0, length - (pool.spec.sliding_window or length))
        k, v = (t[table].transpose(0, 1).reshape(KV_HEADS, -1, HEAD_DIM)[:, low:length] for t in pool.layer(layer))
        k, v = (t.repeat_interleave(heads // KV_HEADS, 0) for t in (k, v))
        out[row] = torch.einsum("hn,hnd->hd", torch.softmax(torch.einsum("hd,hnd->hn", query[:, row], k) * 0.3, -1), v)
    return out


def attend(way: DecodeRows, query: torch.Tensor, layer: int) -> torch.Tensor:
    out = torch.full((query.shape[1], query.shape[0], HEAD_DIM), float("nan"))
    way.run(query, layer, 0.3, out)
    return out


def test_gathered_in_bfloat16() -> None:
    tables = scattered([70, 60, 9])
    pool = make_pool(1 + sum(map(len, tables)), dtype=torch.bfloat16)
    meta, query = make_meta([70, 60, 9], tables), make_query(6, 3).bfloat16()
    rows = GatheredRows(PoolView(pool), Scratch(pool.data.device))
    rows.plan(meta)
    out = torch.empty(3, 6, HEAD_DIM, dtype=torch.bfloat16)
    rows.run(query, 1, 0.3, out)
    wide = make_pool(pool.num_blocks)
    wide.data.copy_(pool.data)
    torch.testing.assert_close(out.float(), expected(wide, meta, query.float(), 1), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [None, 1, 7, 50])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("lengths", [[1], [4], [9, 9, 8], [120, 31, 30, 5, 1, 1]], ids=str)
def test_against_a_plain_softmax(way: type, window: int | None, group: int, lengths: list[int]) -> None:
    tables = scattered(lengths)
    pool = make_pool(1 + sum(map(len, tables)), window)
    meta, query = make_meta(lengths, tables), make_query(group * KV_HEADS, len(lengths))
    rows = way(PoolView(pool), Scratch(pool.data.device))
    rows.plan(meta)
    for layer in range(LAYERS):
        torch.testing.assert_close(attend(rows, query, layer), expected(pool, meta, query, layer))


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_kept_from_one_step_to_the_next(way: type) -> None:
    """Blocks that are written anew, other tables, fewer rows, and a row of NaN before: each step is of its own."""
    lengths = [30, 17, 6]
    tables = scattered(lengths)
    pool = make_pool(1 + sum(map(len, tables)))
    rows = way(PoolView(pool), Scratch(pool.data.device))
    for lens, step_tables in [(lengths, tables), (lengths, tables), ([17, 6], tables[1:]), ([31, 20, 8], tables)]:
        meta, query = make_meta(lens, step_tables), make_query(6, len(lens))
        rows.plan(meta)
        attend(rows, query * float("nan"), 1)
        rows.plan(meta)
        pool.data[1:] += 0.5
        torch.testing.assert_close(attend(rows, query, 1), expected(pool, meta, query, 1))


@pytest.mark.parametrize("way", WAYS)
def test_what_lies_beside_a_row_is_not_seen(way: type) -> None:
    """The rest of its last block, and other blocks."""
    pool = make_pool(8)
    meta, query = make_meta([6, 3], [[5, 2], [7]]), make_query(6, 2)
    rows = way(PoolView(pool), Scratch(pool.data.device))
    rows.plan(meta)
    before = attend(rows, query, 2)
    pool.data[[1, 3, 4, 6]] = 1e9
    pool.data[2, :, :, :, 2:] = 1e9
    pool.data[7, :, :, :, 3:] = 1e9
    assert attend(rows, query, 2).equal(before)


@pytest.mark.parametrize(
    ("dtype", "way"), [(torch.float32, InPlaceRows), (torch.bfloat16, GatheredRows), (torch.float16, GatheredRows)]
)
def test_which_way(dtype: torch.dtype, way: type) -> None:
    pool = make_pool(3, dtype=dtype)
    assert type(decode_rows(PoolView(pool), Scratch(pool.data.device))) is way
