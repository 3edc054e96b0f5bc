"""A worker's own sequences: the order of a step, chunks, prefix hits, preemption, endings, aborts."""

import pytest

from server.errors import CannotFit
from server.sequence import SamplingParams, SeqState, Token
from tests.engine.stories import Story


def test_a_sequence_from_prompt_to_end() -> None:
    story = Story(chunk_tokens=16)
    seq = story.seq(20, max_tokens=3)
    # 1. The prompt's blocks are taken at admission, and it is computed in chunks; the last one samples.
    story.add(seq)
    [first] = story.step()
    assert (first.token, first.finished, first.ready) == (None, False, range(4))
    assert len(seq.block_table) == 5
    [second] = story.step()
    assert (second.token, second.index, second.ready) == (Token(7), 0, range(4, 5))
    # 2. It decodes, growing block by block.
    [third] = story.step()
    assert (third.index, third.finished, len(seq.block_table)) == (1, False, 6)
    # 3. The third token is the last one allowed.
    [last] = story.step()
    assert last.finished and seq.finish_reason == "length" and seq.output == [7, 7, 7]
    assert seq.state is SeqState.FINISHED and story.pool.num_used == 0
    assert not story.scheduler.has_work and story.step() == []


def test_decoding_goes_first_and_short_prompts_are_packed_behind() -> None:
    story = Story(chunk_tokens=16)
    old = story.seq(4)
    story.add(old)
    story.step()
    short, other, long = story.seq(6), story.seq(6), story.seq(40)
    story.add(long, short, other)
    assert story.computed() == [(old, 1), (short, 6), (other, 6), (long, 4)]
    assert story.computed() == [(old, 1), (short, 1), (other, 1), (long, 16)]


def test_a_shorter_prompt_overtakes_until_the_longer_one_is_aged() -> None:
    story = Story(chunk_tokens=8, age_limit_s=5.0)
    long = story.seq(32)
    story.add(long)
    assert story.computed() == [(long, 8)]
    # 1. Within the age limit the shorter one goes first, though the longer one is under way.
    story.now = 4.0
    story.add(one := story.seq(8))
    assert story.computed() == [(one, 8)]
    # 2. Aged, it goes first.
    story.now = 6.0
    story.add(two := story.seq(8))
    assert story.computed() == [(one, 1), (long, 8)]
    assert two.state is SeqState.WAITING


def test_an_aged_prompt_without_blocks_lets_nobody_pass() -> None:
    story = Story(num_blocks=11, chunk_tokens=32, age_limit_s=5.0)
    story.add(holder := story.seq(24, max_tokens=3))
    story.step()
    large, small = story.seq(24), story.seq(4)
    story.add(large)
    story.now = 6.0
    story.add(small)
    # 1. Blocks for the small one are free; they are kept for the aged one.
    story.step()
    assert (large.state, small.state) == (SeqState.WAITING, SeqState.WAITING)
    # 2. It comes in as soon as it can, and the small one with what is left.
    story.step()
    assert holder.state is SeqState.FINISHED
    assert story.computed() == [(large, 24), (small, 4)]


def test_limits_are_read_at_every_step() -> None:
    story = Story(chunk_tokens=16, max_seqs=1)
    one, two = story.seq(4), story.seq(4)
    story.add(one, two)
    assert story.computed() == [(one, 4)]
    story.limits.max_running = 1
    assert story.computed() == [(one, 1)]
    story.limits.max_running = 2
    assert story.computed() == [(one, 1), (two, 4)]


def test_local_prefill_leaves_room_for_those_who_decode() -> None:
    story = Story(chunk_tokens=16, local_prefill_tokens=4)
    story.add(one := story.seq(16))
    assert story.computed() == [(one, 16)]
    story.add(two := story.seq(16))
    assert story.computed() == [(one, 1), (two, 4)]
    story.scheduler.abort(one.id)
    assert story.computed() == [(two, 12)]


@pytest.mark.parametrize(
    ("local", "num_decoding", "num_prompt"),
    [(0, 2, 0), (1, 2, 1), (13, 2, 6), (14, 2, 14), (1, 8, 1), (8, 7, 1), (16, 2, 16), (25, 2, 25)],
)
def test_local_prefill_fills_a_step_that_would_be_padded(local: int, num_decoding: int, num_prompt: int) -> None:
    """Steps are padded to 8, 16 or 18: what would be padded is left out, but never all of it. Larger ones are not."""
    story = Story(chunk_tokens=64, token_budget=64, max_running=16, local_prefill_tokens=local, step_sizes=(8, 16, 18))
    story.add(*(story.seq(1) for _ in range(num_decoding)))
    story.step()
    story.add(story.seq(30))
    assert sum(n for _, n in story.computed()) - num_decoding == num_prompt


def test_a_prefix_hit_is_counted_and_the_last_token_is_always_computed() -> None:
    story = Story()
    prompt = list(range(1, 13))
    story.add(first := story.seq(prompt=prompt))
    story.step()
    # 1. Equal prompts of three blocks share two: the third holds the token whose logits are wanted.
    story.add(second := story.seq(prompt=prompt))
    assert story.computed() == [(first, 1), (second, 4)]
    assert (second.num_cached, second.block_table[:2]) == (8, first.block_table[:2])
    # 2. What was generated can be hit as well.
    for _ in range(4):
        story.step()
    story.add(third := story.seq(prompt=[*prompt, *first.output, 5]))
    story.step()
    assert third.num_cached == len(prompt) + 4
    assert story.scheduler.counters().prefix_hit_tokens == 8 + 16
    # 3. Another salt shares nothing.
    story.add(fourth := story.seq(prompt=prompt, salt="tenant"))
    story.step()
    assert fourth.num_cached == 0


def test_the_youngest_is_preempted_and_never_samples_a_token_twice() -> None:
    story = Story(num_blocks=7, prefix_cache=False)
    old, young = story.seq(8), story.seq(8)
    story.add(old)
    story.step()
    story.now = 1.0
    young.arrival = 1.0
    story.add(young)
    # 1. Both run until the blocks are gone: 8 prompt tokens, then 4 more slots each.
    while not story.scheduler.counters().preemptions:
        story.step()
    assert young.state is SeqState.SWAPPED and young.block_table == [] and young.num_computed == 0
    known = list(young.output)
    assert known and old.state is SeqState.RUNNING
    # 2. It returns to the front once the older one is gone, computes what is known, and samples only the next.
    story.add(third := story.seq(4))
    story.scheduler.abort(old.id)
    steps = story.step()
    assert [(step.seq, step.index) for step in steps] == [(young, len(known)), (third, 0)]
    assert young.output == [*known, 7] and young.num_cached == 0


def test_a_sequence_that_fills_the_pool_ends_by_length() -> None:
    story = Story(num_blocks=4)
    story.add(seq := story.seq(8))
    while seq.state is not SeqState.FINISHED:
        story.step()
    assert (seq.num_tokens, seq.finish_reason) == (12, "length")


@pytest.mark.parametrize(("length", "max_len"), [(12, 100), (5, 5), (0, 100)])
def test_what_can_never_fit_is_refused_with_the_numbers(length: int, max_len: int) -> None:
    story = Story(num_blocks=4, max_len=max_len)
    with pytest.raises(CannotFit, match=rf"{length} tokens.*max_len {max_len}, pool 12 tokens in 3 blocks of 4"):
        story.scheduler.add(story.seq(length))
    with pytest.raises(CannotFit):
        story.scheduler.expect(story.seq(length))
    assert story.scheduler.counters().num_waiting == 0


def test_a_stop_token_counts_only_after_min_tokens() -> None:
    story = Story()
    story.add(seq := story.seq(4))
    seq.params = SamplingParams(max_tokens=10, min_tokens=2, stop_token_ids=(0,))
    for _ in range(2):
        [step] = story.step(token=0)
        assert not step.finished
    [step] = story.step(token=0)
    assert step.finished and seq.finish_reason == "stop" and seq.output == [0, 0, 0]


def test_abort_between_schedule_and_update_keeps_blocks_until_the_step_is_over() -> None:
    story = Story()
    one, two = story.seq(8), story.seq(8)
    story.add(one, two)
    batch = story.schedule()
    # 1. The step under way still writes into its blocks.
    assert story.scheduler.abort(one.id) is one
    story.scheduler.check_integrity()
    assert (one.state, story.pool.num_used) == (SeqState.FINISHED, 4)
    # 2. Its token is discarded, its blocks are free.
    assert [step.seq for step in story.update(batch)] == [two]
    assert (one.output, story.pool.num_used) == ([], 2)
    assert story.scheduler.abort(one.id) is None


def test_abort_of_what_waits_or_runs_frees_at_once() -> None:
    story = Story(max_seqs=1)
    one, two = story.seq(8), story.seq(8)
    story.add(one, two)
    story.step()
    story.scheduler.abort(two.id)
    story.scheduler.abort(one.id)
    story.scheduler.check_integrity()
    assert story.pool.num_used == 0 and not story.scheduler.has_work


def test_tokens_already_sent_are_computed_and_not_sampled_again() -> None:
    story = Story()
    story.add(seq := story.seq(6, output=[3, 4]))
    [step] = story.step()
    assert (step.index, seq.output) == (2, [3, 4, 7])
