"""Blocks are counted, found again by their prefix, and evicted only when nobody holds them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.block_pool import BlockPool
from server.errors import OutOfBlocks


def filled(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """A table that holds `tokens`, computed and registered."""
    table = pool.allocate(-(-len(tokens) // pool.block_size))
    pool.register(table, tokens, salt)
    return table


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(5, 4)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_used, pool.usage) == (0, 4, 1.0)


def test_an_allocation_too_large_takes_nothing() -> None:
    pool = BlockPool(5, 4)
    held = pool.allocate(2)
    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 of 4 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check_integrity([held])


def test_releasing_more_often_than_holding_is_an_error() -> None:
    pool = BlockPool(5, 4)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(ValueError, match="more often than held"):
        pool.release(table)


def test_a_prefix_is_found_in_whole_blocks_and_shared() -> None:
    pool = BlockPool(9, 4)
    # 1. Ten tokens fill two blocks and a half; only the whole ones are named.
    table = filled(pool, list(range(10)))
    assert pool.match(list(range(10))) == table[:2]
    # 2. Another prompt shares the first block only, and a longer one both.
    assert pool.match([0, 1, 2, 3, 9, 9, 9, 9]) == table[:1]
    assert pool.match(list(range(20))) == table[:2]
    # 3. The same tokens after another parent are another block.
    assert pool.match([4, 5, 6, 7]) == []
    # 4. Shared blocks stay used until both let go.
    pool.acquire(table[:2])
    pool.release(table)
    pool.check_integrity([table[:2]])
    assert pool.num_used == 2
    pool.release(table[:2])
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 2, 8)
    pool.check_integrity([])


def test_salts_do_not_share() -> None:
    pool = BlockPool(9, 4)
    filled(pool, [1, 2, 3, 4], salt="a")
    assert pool.match([1, 2, 3, 4], "b") == [] == pool.match([1, 2, 3, 4])
    assert len(pool.match([1, 2, 3, 4], "a")) == 1


def test_eviction_takes_the_least_recently_used_and_of_a_prefix_its_tail_first() -> None:
    pool = BlockPool(5, 4)
    # 1. Two prefixes of two blocks; the first one is used again later.
    old, new = filled(pool, [1] * 8), filled(pool, [2] * 8)
    pool.release(old)
    pool.release(new)
    pool.acquire(old)
    pool.release(old)
    # 2. One block is needed: the tail of the one not used again goes.
    taken = pool.allocate(1)
    assert taken == [new[1]] and pool.match([2] * 8) == new[:1]
    # 3. Then its root; the other prefix is whole still.
    taken += pool.allocate(1)
    assert pool.match([2] * 8) == [] and pool.match([1] * 8) == old
    pool.check_integrity([taken])


def test_a_held_block_is_never_evicted() -> None:
    pool = BlockPool(4, 4)
    held = filled(pool, [1] * 4)
    rest = pool.allocate(2)
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    assert pool.match([1] * 4) == held
    pool.check_integrity([held, rest])


def test_an_evicted_parent_that_returns_finds_its_children_again() -> None:
    pool = BlockPool(4, 4)
    table = filled(pool, [1] * 8)
    # 1. The child is used last, so the parent is evicted before it.
    pool.release(table[:1])
    pool.release(table[1:])
    other = pool.allocate(2)
    assert pool.match([1] * 8) == []
    # 2. Computed again in another block, the parent leads to the same child.
    pool.register(other[:1], [1] * 4)
    assert pool.match([1] * 8) == [other[0], table[1]]
    pool.check_integrity([other])


def test_two_tables_with_one_content_keep_one_name() -> None:
    pool = BlockPool(9, 4)
    first, second = filled(pool, [1] * 8), filled(pool, [1] * 8)
    assert pool.match([1] * 8) == first
    # The copy still chains, and is plainly free once let go.
    grown = pool.allocate(1)
    pool.register(second + grown, [2] * 4, first=2)
    assert pool.match([1] * 8 + [2] * 4) == [*first, *grown]
    pool.release(second)
    assert pool.num_cached == 0
    pool.check_integrity([first, grown])


def test_registering_in_steps_is_registering_at_once() -> None:
    one, two = BlockPool(9, 4), BlockPool(9, 4)
    tokens = list(range(12))
    table = filled(one, tokens)
    other = two.allocate(3)
    for block in range(3):
        two.register(other, tokens[block * 4 : block * 4 + 4], first=block)
    assert len(one.match(tokens)) == len(two.match(tokens)) == 3
    with pytest.raises(ValueError, match="from its start"):
        one.register(one.allocate(2), [9] * 4, first=1)
    assert one.match(tokens) == table


def test_without_a_prefix_cache_nothing_is_found() -> None:
    pool = BlockPool(5, 4, prefix_cache=False)
    table = filled(pool, [1] * 8)
    pool.release(table)
    assert pool.match([1] * 8) == [] and pool.num_cached == 0


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=30))
def test_hits_hold_what_was_asked_for(prompts: list[list[int]]) -> None:
    """Whatever comes and goes, a matched block was filled with just those tokens after just that prefix."""
    pool = BlockPool(9, 2)
    content: dict[int, list[int]] = {}
    for tokens in prompts:
        hits = pool.match(tokens)
        assert all(content[block] == tokens[: 2 * n + 2] for n, block in enumerate(hits))
        pool.acquire(hits)
        table = hits + pool.allocate(-(-len(tokens) // 2) - len(hits))
        content |= {table[n]: tokens[: 2 * n + 2] for n in range(len(hits), len(tokens) // 2)}
        pool.register(table, tokens[len(hits) * 2 :], first=len(hits))
        pool.check_integrity([table])
        pool.release(table)
