"""The two halves of a pd sequence: asking, granting under watermarks, holding, receiving, recovering."""

from server.sequence import SeqState, Sequence, Token
from tests.engine.stories import Story


def test_a_prefill_half_waits_for_its_grant_and_holds_its_blocks_until_release() -> None:
    story = Story(chunk_tokens=8)
    seq = story.seq(14, needs_grant=True)
    # 1. Without a grant it holds nothing and is not computed.
    story.add(seq)
    assert story.step() == [] and story.pool.num_used == 0
    assert story.scheduler.grants_wanted() == [seq] and story.scheduler.grants_wanted() == []
    # 2. Granted, with one block resident on the other side: all blocks at once, ready ones named from there on.
    assert story.scheduler.granted(seq.id, 5, 1)
    [step] = story.step()
    assert len(seq.block_table) == 4 and step.ready == range(1, 2)
    # 3. The last chunk brings the first token and the partial block.
    [step] = story.step()
    assert (step.index, step.finished, step.ready) == (0, False, range(2, 4))
    assert seq.state is SeqState.PUSHING and story.pool.num_used == 4
    assert story.step() == [] and story.scheduler.counters().num_pushing == 1
    # 4. Acknowledged.
    assert story.scheduler.release(seq.id) is seq
    story.scheduler.check_integrity()
    assert (seq.state, story.pool.num_used) == (SeqState.FINISHED, 0)
    assert story.scheduler.release(seq.id) is None


def test_prefix_hits_are_ready_to_push_with_the_first_chunk() -> None:
    story = Story()
    for generation in (1, 2):
        story.add(seq := story.seq(prompt=list(range(1, 13)), needs_grant=True))
        story.grant(generation, seq)
        [step] = story.step()
        assert step.ready == range(3)
    assert seq.num_cached == 8


def test_a_first_token_that_ends_it_still_holds_the_blocks() -> None:
    story = Story()
    seqs = [story.seq(4, needs_grant=True), story.seq(4, max_tokens=1, needs_grant=True)]
    for seq, token, reason in zip(seqs, (0, 7), ("stop", "length"), strict=True):
        story.add(seq)
        story.grant(1, seq)
        [step] = story.step(token)
        assert (step.finished, seq.state, seq.finish_reason) == (True, SeqState.FINISHED, reason)
        assert len(seq.block_table) == 1
        story.scheduler.release(seq.id)
    assert story.pool.num_used == 0


def test_abort_never_frees_a_prefill_half() -> None:
    story = Story()
    seq = story.seq(8, needs_grant=True)
    story.add(seq)
    story.grant(1, seq)
    batch = story.schedule()
    # 1. Aborted within a step, its blocks outlast the step.
    story.scheduler.abort(seq.id)
    assert story.update(batch) == [] and story.pool.num_used == 2
    # 2. Released.
    story.scheduler.release(seq.id)
    assert story.pool.num_used == 0
    # 3. Released within a step, they outlast the step.
    story.add(again := story.seq(8, needs_grant=True))
    story.grant(1, again)
    batch = story.schedule()
    story.scheduler.release(again.id)
    assert story.pool.num_used == 2
    assert story.update(batch) == [] and story.pool.num_used == 0


def test_a_late_or_repeated_grant_is_refused() -> None:
    story = Story()
    seq = story.seq(8, needs_grant=True)
    story.add(seq)
    assert story.scheduler.granted(seq.id, 3, 0)
    assert not story.scheduler.granted(seq.id, 3, 0)
    assert not story.scheduler.granted(seq.id, 2, 0)
    story.scheduler.abort(seq.id)
    assert not story.scheduler.granted(seq.id, 4, 0)


def test_no_more_grants_are_asked_for_than_ahead() -> None:
    story = Story(ahead=2, age_limit_s=5.0)
    long, short, medium = (story.seq(n, needs_grant=True) for n in (40, 4, 16))
    story.add(long, short, medium)
    # 1. The shortest are next in line.
    assert story.scheduler.grants_wanted() == [short, medium]
    # 2. A grant is used up at admission; then the next may be asked for.
    story.grant(1, short)
    assert story.scheduler.grants_wanted() == []
    story.step()
    assert story.scheduler.grants_wanted() == [long]


def test_a_prompt_without_a_grant_holds_up_nobody_however_old() -> None:
    story = Story(age_limit_s=5.0)
    story.add(old := story.seq(8, needs_grant=True))
    story.now = 10.0
    story.add(new := story.seq(8, needs_grant=True))
    story.grant(1, new)
    assert story.computed() == [(new, 8)]
    assert old.state is SeqState.WAITING


def test_a_decode_half_from_prompt_to_end() -> None:
    story = Story()
    seq = story.seq(10, max_tokens=3)
    story.scheduler.expect(seq)
    # 1. Granted: its prompt's blocks are its own, and counted as granted, not as written.
    assert story.scheduler.grants_possible() == [seq] and seq.generation == 1
    counters = story.scheduler.counters()
    assert (counters.blocks_granted, counters.blocks_used, counters.blocks_reserved) == (3, 0, 1)
    assert counters.num_receiving == 1 and story.step() == []
    # 2. KV and first token are here: it decodes at the next step, and its prefix can be hit.
    assert story.scheduler.received(seq.id, Token(7)) is seq
    assert story.scheduler.received(seq.id, Token(7)) is None
    assert story.scheduler.counters().blocks_used == 3
    assert story.computed() == [(seq, 1)] and seq.output == [7, 7]
    assert story.pool.match(seq.prompt) == seq.block_table[:2]
    # 3. It ends.
    assert story.step()[0].finished and story.pool.num_used == 0


def test_generations_rise_and_resident_prefixes_are_pinned() -> None:
    story = Story()
    prompt = list(range(1, 13))
    story.receive(first := story.seq(prompt=prompt))
    story.scheduler.abort(first.id)
    assert story.pool.num_used == 0
    story.scheduler.expect(second := story.seq(prompt=prompt))
    story.scheduler.grants_possible()
    assert (second.generation, second.num_resident_blocks) == (2, 2)
    assert story.pool.num_used == 3 and story.scheduler.counters().blocks_granted == 1


def expect(story: Story, *lengths: int, max_tokens: int = 1) -> list[Sequence]:
    seqs = [story.seq(length, max_tokens=max_tokens) for length in lengths]
    for seq in seqs:
        story.scheduler.expect(seq)
    return seqs


def test_grants_stop_over_the_high_mark_and_resume_under_the_low_one() -> None:
    story = Story(num_blocks=21, kv_low=0.5, kv_high=0.8, prefix_cache=False)
    # 1. 16 of 20 blocks may be committed: three times (4 for the prompt, 1 to grow).
    one, two, three, four = expect(story, 16, 16, 16, 16)
    assert story.scheduler.grants_possible() == [one, two, three]
    assert not story.scheduler.counters().grants_open
    # 2. Down to 10 of 20, the low mark, it opens again; a small one would have fitted before.
    [small] = expect(story, 4)
    assert story.scheduler.grants_possible() == []
    story.scheduler.abort(one.id)
    assert story.scheduler.grants_possible() == [four]
    story.scheduler.abort(two.id)
    assert story.scheduler.grants_possible() == [small]


def test_grants_stop_when_too_many_wait_to_run() -> None:
    story = Story(max_running=1, queue_low=0, queue_high=1)
    expect(story, 4, 4, 4, max_tokens=4)
    for seq in story.scheduler.grants_possible():
        story.scheduler.received(seq.id, Token(7))
    story.step()
    assert story.scheduler.counters().num_received == 2
    expect(story, 4)
    assert story.scheduler.grants_possible() == []
    story.limits.max_running = 3
    story.step()
    assert len(story.scheduler.grants_possible()) == 1


def test_an_empty_pool_grants_what_fits_it_over_the_mark() -> None:
    story = Story(num_blocks=11, kv_low=0.3, kv_high=0.5)
    large, small = expect(story, 38, 4)
    assert story.scheduler.grants_possible() == [large]
    assert small.state is SeqState.EXPECTED


def test_small_prompts_pass_a_large_one_until_it_is_aged() -> None:
    story = Story(num_blocks=21, kv_low=0.7, kv_high=0.8, age_limit_s=5.0)
    [first] = expect(story, 8)
    assert story.scheduler.grants_possible() == [first]
    # 1. The large one does not fit beside it; a small one behind it does.
    large, small = expect(story, 60, 4)
    assert story.scheduler.grants_possible() == [small]
    # 2. Aged, it lets nobody pass, until the pool is empty enough for it.
    story.now = 6.0
    [late] = expect(story, 4)
    assert story.scheduler.grants_possible() == []
    story.scheduler.abort(first.id)
    story.scheduler.abort(small.id)
    assert story.scheduler.grants_possible() == [large]
    assert late.state is SeqState.EXPECTED


def test_local_prompts_do_not_pass_an_aged_one_that_is_expected() -> None:
    story = Story(num_blocks=21, age_limit_s=5.0)
    [first] = expect(story, 40)
    story.scheduler.grants_possible()
    [large] = expect(story, 60)
    story.scheduler.grants_possible()
    story.now = 6.0
    story.add(local := story.seq(4))
    assert story.step() == [] and local.state is SeqState.WAITING
    story.scheduler.abort(first.id)
    assert story.scheduler.grants_possible() == [large]


def test_a_receiving_sequence_is_never_preempted() -> None:
    story = Story(num_blocks=7, kv_high=1.0, prefix_cache=False)
    for _ in range(20):
        story.scheduler._gate.lengths.add(1)  # believes in short outputs, and grants too much
    story.receive(running := story.seq(12))
    [receiving] = expect(story, 7, max_tokens=9)
    story.step()
    assert story.scheduler.grants_possible() == [receiving]
    # 1. The running one needs a block, none is free: it sits out, with its blocks.
    while story.step():
        pass
    assert len(running.block_table) == 4 and len(receiving.block_table) == 2
    assert story.scheduler.counters().num_receiving == 1
    # 2. Once received, the other gives way although it was next to run.
    story.scheduler.received(receiving.id, Token(7))
    story.limits.max_running = 1
    assert story.computed() == [(running, 1)]
    assert receiving.state is SeqState.SWAPPED and receiving.output == [7]
    # 3. While it waits nobody is granted; it goes on from its known tokens when there is room.
    expect(story, 4)
    assert story.scheduler.grants_possible() == []
    story.scheduler.abort(running.id)
    assert story.computed() == [(receiving, 8)] and receiving.output == [7, 7]


def test_a_failed_transfer_goes_on_from_its_verified_prefix() -> None:
    story = Story()
    [known, unknown] = expect(story, 12, 12, max_tokens=9)
    story.scheduler.grants_possible()
    tables = [list(known.block_table), list(unknown.block_table)]
    # 1. Two blocks are verified and the first token is known: four tokens are computed, then the known one.
    story.scheduler.recompute(known.id, 2, Token(3))
    assert story.computed() == [(known, 4)]
    assert story.computed() == [(known, 1)] and known.output == [3, 7]
    # 2. All verified but no token: the last one is computed again for its logits.
    story.scheduler.recompute(unknown.id, 3)
    [step, other] = story.schedule().slices
    assert (step.seq, other.seq, other.start, other.num_tokens) == (known, unknown, 11, 1)
    assert [known.block_table[:3], unknown.block_table] == tables


def test_a_first_token_that_ends_it_on_the_decode_side() -> None:
    story = Story()
    [seq] = expect(story, 4, max_tokens=1)
    story.scheduler.grants_possible()
    assert story.scheduler.received(seq.id, Token(7)) is seq
    assert (seq.state, seq.finish_reason, story.pool.num_used) == (SeqState.FINISHED, "length", 0)


def test_a_local_prompt_leaves_what_was_promised_to_a_grant() -> None:
    """Else the granted sequence is preempted, or preempts, for want of blocks that its grant counted."""
    story = Story(num_blocks=17, reserves_growth=True)
    granted, *local = (story.seq(8, max_tokens=24) for _ in range(3))
    # 1. A granted sequence decodes: two blocks, six to come. The pool has 16.
    story.scheduler.expect(granted)
    assert story.scheduler.grants_possible() == [granted]
    story.scheduler.received(granted.id, Token(7))
    # 2. Of two local prompts that would fit now, one can also grow beside it.
    story.add(*local)
    story.step()
    assert [seq.state for seq in local] == [SeqState.RUNNING, SeqState.WAITING]
    # 3. All of them end, and nobody was preempted.
    while story.scheduler.has_work:
        story.step()
    assert story.scheduler.counters().preemptions == 0
    assert [len(seq.output) for seq in (granted, *local)] == [24, 24, 24]


def ahead(story: Story, length: int = 8, num_outputs: int = 3, **fields: object) -> Sequence:
    """A prefill half that runs ahead of its grant."""
    story.add(seq := story.seq(length, needs_grant=True, **fields))
    assert story.scheduler.run_ahead(seq.id)
    for _ in range(num_outputs):
        story.step()
    return seq


def test_a_half_that_no_grant_comes_for_runs_ahead_until_one_does() -> None:
    story = Story()
    seq = ahead(story)
    # 1. It decodes as a local one does.
    assert (seq.state, len(seq.output)) == (SeqState.RUNNING, 3)
    # 2. Granted between two steps it stops at once; its KV is all there but the last token's.
    assert story.scheduler.granted(seq.id, 4, 0) and seq.state is SeqState.PUSHING
    assert story.step() == [] and seq.num_computed == seq.num_to_hand_over == 10
    # 3. The other side had no room for all of it: it goes on, until the next grant. Said again, that means nothing.
    assert story.scheduler.run_ahead(seq.id) and story.computed() == [(seq, 1)]
    assert not story.scheduler.granted(seq.id, 4, 0)
    assert story.scheduler.granted(seq.id, 5, 0) and seq.state is SeqState.PUSHING
    # 4. Its blocks stay until they are released.
    story.scheduler.abort(seq.id)
    assert story.pool.num_used == 3
    story.scheduler.release(seq.id)
    assert story.pool.num_used == 0


def test_a_grant_within_a_step_leaves_it_that_step() -> None:
    story = Story()
    seq = ahead(story)
    batch = story.schedule()
    assert story.scheduler.granted(seq.id, 1, 0) and seq.state is SeqState.RUNNING
    story.update(batch)
    assert (seq.state, len(seq.output)) == (SeqState.PUSHING, 4)


def test_a_grant_for_one_that_nobody_reads_takes_nothing_from_a_step_under_way() -> None:
    """1. Of two that decode, one sits a step out. 2. The other has that step, when its client falls silent and its
    grant comes: it ends with the step under way. 3. The other would go on, and wants a block that is not there."""
    story = Story(num_blocks=7, max_running=4, ahead_share=1.0, idle_swap_s=5.0)
    seq, other = story.seq(3, needs_grant=True), story.seq(4)
    story.add(seq, other)
    assert story.scheduler.run_ahead(seq.id)
    while other.num_tokens < 13:
        story.step()
    assert not story.pool.num_free and len(other.block_table) * 4 == other.num_computed
    story.scheduler.pause(other.id)
    batch = story.schedule()
    assert [piece.seq for piece in batch.slices] == [seq]
    story.scheduler.resume(other.id)
    story.scheduler.pause(seq.id)
    assert story.scheduler.granted(seq.id, 1, 0)
    story.add(story.seq(20))
    table = list(seq.block_table)
    assert not story.scheduler.may_schedule
    assert seq.block_table == table and seq.state is SeqState.RUNNING
    story.update(batch)
    assert seq.state is SeqState.PUSHING


def test_a_grant_for_one_that_gave_way_is_used_when_it_returns() -> None:
    story = Story(num_blocks=9, prefix_cache=False, ahead_share=1.0)
    for _ in range(20):
        story.scheduler._gate.lengths.add(1)  # it believes in short outputs
    old, young = ahead(story, 8, 1, max_tokens=30), ahead(story, 8, 1, max_tokens=30)
    # 1. Both grow; the younger gives way.
    while young.state is not SeqState.SWAPPED:
        story.step()
    num_known = len(young.output)
    # 2. Granted, it still waits for room, reads again what it had, and stops with one token more.
    assert story.scheduler.granted(young.id, 1, 0) and young.state is SeqState.SWAPPED
    while old.state is not SeqState.FINISHED:
        story.step()
    story.step()
    assert (young.state, len(young.output)) == (SeqState.PUSHING, num_known + 1)


def test_who_runs_ahead_takes_nothing_from_anybody() -> None:
    story = Story(num_blocks=21, reserves_growth=True, max_running=4)
    granted, other = story.seq(4, needs_grant=True), story.seq(4, needs_grant=True, max_tokens=12)
    story.add(granted, other)
    story.grant(1, granted)
    # 1. One with a grant waits, or is read: it has the worker for itself.
    assert not story.scheduler.run_ahead(other.id)
    story.step()
    assert granted.state is SeqState.PUSHING
    # 2. It has not; and half of all blocks are enough for it to grow.
    # 3. For another they are not: it holds nothing, and may yet be granted.
    # 4. Half of all places are taken.
    assert story.scheduler.run_ahead(other.id)
    story.add(long := story.seq(20, needs_grant=True), short := story.seq(4, needs_grant=True, max_tokens=4))
    assert not story.scheduler.run_ahead(long.id)
    assert long.needs_grant and not long.block_table
    assert story.scheduler.run_ahead(short.id)
    story.add(last := story.seq(2, needs_grant=True, max_tokens=2))
    assert not story.scheduler.run_ahead(last.id)
    assert story.scheduler.granted(long.id, 2, 0)


def test_a_grant_grows_with_what_came_before_it() -> None:
    story = Story(num_blocks=9, kv_high=1.0)
    for _ in range(20):
        story.scheduler._gate.lengths.add(1)  # it believes in short outputs
    [seq] = expect(story, 8, max_tokens=30)
    assert story.scheduler.grants_possible() == [seq] and len(seq.block_table) == 2
    # 1. Nine outputs came first: eight of them have KV, two blocks more, under another generation.
    assert story.scheduler.grant_again(seq.id, [7] * 8)
    assert (len(seq.block_table), seq.generation) == (4, 2)
    # 2. Still more, and no blocks for them: it waits anew, holding nothing, in its old place.
    story.receive(story.seq(8))
    assert not story.scheduler.grant_again(seq.id, [7] * 20)
    assert (seq.state, seq.block_table, story.scheduler.counters().num_expected) == (SeqState.EXPECTED, [], 1)
    story.step(0)
    assert story.scheduler.grants_possible() == [seq] and len(seq.block_table) == 7
    # 3. It goes on from the last output, which is read here.
    story.scheduler.received(seq.id, Token(7))
    assert story.computed() == [(seq, 1)] and len(seq.output) == 22


def test_one_that_was_begun_elsewhere_goes_before_all_that_is_new() -> None:
    story = Story(max_seqs=1)
    story.add(new := story.seq(4), begun := story.seq(8, output=[7, 9]))
    over, ends = story.seq(4, max_tokens=2, output=[7, 7]), story.seq(4, output=[7, 0])
    story.add(over, ends)
    assert (over.finish_reason, ends.finish_reason) == ("length", "stop")
    assert story.computed() == [(begun, 10)] and begun.output == [7, 9, 7]
    assert new.state is SeqState.WAITING


def test_a_shut_gate_opens_when_nobody_waits_any_more() -> None:
    """1. Over the high mark one is refused. 2. It goes elsewhere. 3. Under the low mark it opens, though nobody asks:
    the router sends nobody to a shut one."""
    story = Story(num_blocks=21, kv_low=0.5, kv_high=0.8, prefix_cache=False)
    one, two, three, refused = expect(story, 16, 16, 16, 16)
    assert story.scheduler.grants_possible() == [one, two, three]
    for seq, is_open in ((refused, False), (one, True)):
        story.scheduler.abort(seq.id)
        assert story.scheduler.grants_possible() == []
        assert story.scheduler.counters().grants_open == is_open


def test_those_who_were_granted_do_not_take_every_place() -> None:
    """One place. 1. A local prompt waits for it, and so do two that are received; within the age limit these go first.
    2. Aged, it gets the next place, before one that came after it. 3. Where there are no blocks for it they go on."""
    story = Story(num_blocks=21, max_running=1, age_limit_s=5.0, prefix_cache=False)
    first, second = expect(story, 4, 4, max_tokens=2)
    assert story.scheduler.grants_possible() == [first, second]
    story.add(local := story.seq(4, max_tokens=2))
    story.now = 1.0
    third, fourth = expect(story, 4, 4, max_tokens=2)
    assert story.scheduler.grants_possible() == [third, fourth]
    for seq in (first, second, third, fourth):
        story.scheduler.received(seq.id, Token(7))
    assert [story.computed() for _ in range(2)] == [[(first, 1)], [(second, 1)]]
    assert story.computed() == [(third, 1)]
    story.now = 7.0
    assert [story.computed() for _ in range(2)] == [[(local, 4)], [(local, 1)]]
    story.add(large := story.seq(77))
    story.now = 20.0
    [late] = expect(story, 4, max_tokens=2)
    assert story.scheduler.grants_possible() == [late]
    story.scheduler.received(late.id, Token(7))
    assert story.computed() == [(fourth, 1)]
    assert story.computed() == [(late, 1)]
    assert large.state is SeqState.WAITING
