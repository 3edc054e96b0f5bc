"""KV that the device has no room for: evicted to host memory and brought back, by preemption, by silence, by reuse."""

from pathlib import Path

import pytest

from server.engine.block_pool import BlockPool
from server.engine.engine import Engine, StepTimes
from server.engine.host_pool import HostPool
from server.engine.model_runner import ModelRunner
from server.engine.scheduler import Limits, Scheduler
from server.errors import StartError
from server.sequence import SeqState, Sequence
from tests.engine.models import FAMILIES, Reference, load_runner, make_sequence, random_prompt, save_model
from tests.engine.stories import Story


def two_until_one_gives_way(story: Story) -> tuple[Sequence, Sequence]:
    """`old` and `young`, each of two blocks, decode until `young` is preempted."""
    story.add(old := story.seq(8))
    story.step()
    story.now += 1.0
    story.add(young := story.seq(8))
    while not story.scheduler.counters().preemptions:
        story.step()
    assert (old.state, young.state) == (SeqState.RUNNING, SeqState.SWAPPED)
    return old, young


def test_a_preempted_sequence_is_copied_block_by_block_and_comes_back_whole() -> None:
    story = Story(num_blocks=7, host_blocks=8)
    old, young = two_until_one_gives_way(story)
    # 1. It holds nothing. Its last block was partly filled, so the older one took that; nothing is copied yet.
    assert young.block_table == [] and story.copies == []
    known = young.num_tokens
    # 2. As the older one grows, the younger one's blocks are evicted, last first; each is copied before it is reused.
    while story.pool.host.num_used < 2:
        story.step()
        assert all(copy.is_out and copy.block in old.block_table for copy in story.copies)
    # 3. The older one ends. What is on the device and what is on the host are found, the rest is computed.
    story.scheduler.abort(old.id)
    [piece] = story.schedule().slices
    assert (piece.seq, piece.start, piece.num_tokens) == (young, 8, known - 8)
    assert [copy.block for copy in story.copies if not copy.is_out] == young.block_table[:2]
    counters = story.scheduler.counters()
    assert (counters.swapped_in_blocks, counters.num_swapped) == (2, 0)


@pytest.mark.parametrize("cause", ["there is no room", "it would not pay"])
def test_what_the_host_does_not_keep_is_computed_again(cause: str) -> None:
    story = Story(num_blocks=7, host_blocks=1 if cause == "there is no room" else 8)
    old, young = two_until_one_gives_way(story)
    if cause == "it would not pay":
        story.pool.host.is_worthwhile = False
    # 1. Both blocks are evicted. The host has room for one, and the later one pushes the earlier one out; or for none.
    while len(old.block_table) < 6:
        story.step()
    assert story.pool.host.num_used == (1 if cause == "there is no room" else 0)
    # 2. With the root alone, or nothing, it is computed from there, and goes on with its next token.
    story.scheduler.abort(old.id)
    known = len(young.output)
    batch = story.schedule()
    [piece] = batch.slices
    assert (piece.seq, piece.start) == (young, 4 if cause == "there is no room" else 0)
    [step] = story.update(batch)
    assert step.index == known


def test_blocks_that_others_share_are_not_copied() -> None:
    story = Story(num_blocks=9, host_blocks=8)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    story.add(old := story.seq(prompt=[*prompt, 9]))
    story.step()
    story.now = 1.0
    story.add(young := story.seq(prompt=[*prompt, 10]))
    story.step()
    assert old.block_table[:2] == young.block_table[:2]
    while not story.scheduler.counters().preemptions:
        story.step()
    # 1. The younger one's own blocks go to the host as they are taken; the prompt's are the older one's too, and stay.
    while story.pool.num_free:
        story.step()
        assert not {copy.block for copy in story.copies} & set(old.block_table[:2])
    outs = story.scheduler.counters().swapped_out_blocks
    assert 0 < outs < len(old.block_table) - 2
    # 2. It returns to the same shared blocks.
    shared = old.block_table[:2]
    story.scheduler.abort(old.id)
    story.schedule()
    assert young.block_table[:2] == shared


def test_an_abort_while_swapped_leaks_nothing() -> None:
    story = Story(num_blocks=7, host_blocks=8)
    old, young = two_until_one_gives_way(story)
    while not story.pool.host.num_used:
        story.step()
    assert story.scheduler.abort(young.id) is young
    story.scheduler.abort(old.id)
    story.scheduler.check_integrity()
    assert (young.state, story.pool.num_used, story.scheduler.has_work) == (SeqState.FINISHED, 0, False)
    # What is left on the host is a cache: all of it gives way to others.
    for n in range(20):
        story.add(story.seq(20, max_tokens=1, prompt=[n + 1] * 20))
        story.step()
        story.step()
    assert story.pool.host.num_used == 8 and story.pool.num_used == 0


def test_a_swapped_sequence_returns_before_anything_is_granted() -> None:
    story = Story(num_blocks=7, host_blocks=8, kv_high=1.0)
    old, young = two_until_one_gives_way(story)
    story.scheduler.expect(wants := story.seq(4, max_tokens=4))
    # 1. A block may be free; whoever gave way has the first claim to it.
    assert story.scheduler.grants_possible() == []
    story.scheduler.abort(old.id)
    assert story.scheduler.grants_possible() == []
    story.step()
    assert young.state is SeqState.RUNNING
    # 2. Now others may come.
    story.scheduler.abort(young.id)
    assert story.scheduler.grants_possible() == [wants]


def test_a_prefix_on_the_host_is_resident_when_a_grant_asks() -> None:
    story = Story(num_blocks=7, host_blocks=8, kv_high=1.0)
    prompt = list(range(1, 14))
    story.add(story.seq(prompt=prompt, max_tokens=1))
    story.step()
    # 1. Another one needs the whole device: the first one's three whole blocks go to the host.
    story.add(story.seq(23, max_tokens=1))
    story.step()
    story.step()
    assert story.pool.host.num_used == 3
    assert story.pool.match(prompt) == list(story.pool.host.names)[::-1], "the root was evicted last"
    # 2. The next turn of the conversation finds them: they are brought back, and need not be sent.
    story.scheduler.expect(turn := story.seq(prompt=[*prompt, 50, 51]))
    assert story.scheduler.grants_possible() == [turn]
    assert turn.num_resident_blocks == 3
    ins = [copy.block for copy in story.scheduler.take_copies() if not copy.is_out]
    assert ins == turn.block_table[:3]
    story.scheduler.check_integrity()


# -- a client that does not read ---------------------------------------------------------------------------------------


def test_a_sequence_that_nobody_reads_keeps_its_blocks_for_a_while_and_then_gives_them_away() -> None:
    story = Story(host_blocks=8, idle_swap_s=30.0)
    story.add(seq := story.seq(8), other := story.seq(8))
    story.step()
    # 1. Paused, it is not computed; the other one is.
    story.scheduler.pause(seq.id)
    story.now = 29.0
    assert story.computed() == [(other, 1)]
    assert seq.state is SeqState.RUNNING and seq.block_table
    # 2. Read again in time, it goes on as if nothing had been.
    story.scheduler.resume(seq.id)
    assert (seq, 1) in story.computed()
    # 3. Paused for thirty seconds, it gives its blocks away, and does not return by itself.
    story.scheduler.pause(seq.id)
    story.now += 30.0
    assert story.computed() == [(other, 1)]
    assert seq.state is SeqState.SWAPPED and seq.block_table == []
    story.scheduler.expect(new := story.seq(8))
    assert story.scheduler.grants_possible() == [new], "it has no claim while nobody reads"
    story.scheduler.abort(new.id)
    # 4. Nobody needed its blocks: it finds them on the device.
    story.scheduler.resume(seq.id)
    computed = dict(story.computed())
    assert computed[seq] == seq.num_tokens - 1 - 8 and story.scheduler.counters().swapped_in_blocks == 0


def test_whom_nobody_reads_gives_way_first() -> None:
    story = Story(num_blocks=7, host_blocks=8, idle_swap_s=30.0)
    story.add(old := story.seq(8))
    story.step()
    story.now = 1.0
    story.add(young := story.seq(8))
    story.step()
    story.scheduler.pause(old.id)
    while not story.scheduler.counters().preemptions:
        story.step()
    assert (old.state, young.state) == (SeqState.SWAPPED, SeqState.RUNNING)


def test_the_knob_is_read_at_every_step() -> None:
    story = Story(idle_swap_s=0.0)
    story.add(seq := story.seq(8))
    story.step()
    story.scheduler.pause(seq.id)
    # 1. 0: it runs on, unread.
    story.now = 100.0
    assert story.computed() == [(seq, 1)]
    # 2. Turned on, it has been silent for long enough.
    story.limits.idle_swap_s = 50.0
    assert story.computed() == [] and seq.state is SeqState.SWAPPED
    # 3. Turned off again, it comes back.
    story.limits.idle_swap_s = 0.0
    assert [seq for seq, _ in story.computed()] == [seq] and seq.state is SeqState.RUNNING


# -- tokens ------------------------------------------------------------------------------------------------------------

LENGTHS = [63, 64, 65, 33, 31]


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), **FAMILIES["llama"])


@pytest.fixture(scope="module")
def runner(llama_dir: Path) -> ModelRunner:
    return load_runner(llama_dir, max_len=200, host_swap_bytes=2**20)


@pytest.fixture(scope="module")
def answers(llama_dir: Path) -> list[list[int]]:
    reference = Reference(llama_dir)
    return [reference.generate(random_prompt(length, seed=3)) for length in LENGTHS]


class Serving:
    """An engine over 17 usable blocks, on a clock that is set by hand."""

    def __init__(self, runner: ModelRunner, host_blocks: int, **limits: float) -> None:
        self.now = 0.0
        self.pool = BlockPool(18, 16, host=HostPool(host_blocks))
        self.scheduler = Scheduler(Limits(max_len=200, **limits), self.pool, lambda: self.now)  # type: ignore[arg-type]
        self.engine = Engine(self.scheduler, runner)
        self.engine.times.observe = lambda num_tokens, seconds: None  # type: ignore[method-assign]  # swapping pays
        runner.pool.data.fill_(7.0)  # what a block held before must not matter, nor help
        runner.pool.data[0] = 0.0

    def add(self) -> list[Sequence]:
        seqs = [make_sequence(i, random_prompt(length, seed=3)) for i, length in enumerate(LENGTHS)]
        for seq in seqs:
            self.scheduler.add(seq)
        return seqs

    def step(self) -> bool:
        result = self.engine.step()
        assert result is None or result.error is None
        self.scheduler.check_integrity()
        return result is not None

    def serve(self) -> None:
        while self.step():
            pass


@pytest.mark.parametrize("host_blocks", [2, 64])
def test_swapping_changes_no_token(runner: ModelRunner, answers: list[list[int]], host_blocks: int) -> None:
    serving = Serving(runner, host_blocks)
    seqs = serving.add()
    serving.serve()
    assert [seq.output for seq in seqs] == answers
    counters = serving.scheduler.counters()
    assert counters.preemptions and counters.swapped_out_blocks and counters.swapped_in_blocks
    # What has ended is still there, on either side of the bus, and gives the same again.
    again = serving.add()
    serving.serve()
    assert [seq.output for seq in again] == answers
    assert host_blocks == 2 or all(seq.num_cached >= len(seq.prompt) // 16 * 16 - 16 for seq in again)


def test_a_client_that_pauses_gets_the_same_text(runner: ModelRunner, answers: list[list[int]]) -> None:
    serving = Serving(runner, 64, idle_swap_s=30.0)
    seqs = serving.add()
    while len(seqs[0].output) < 5:
        serving.step()
    # 1. Its client stops reading; after thirty seconds its blocks are anybody's, and the others need them.
    serving.scheduler.pause(seqs[0].id)
    serving.now = 31.0
    serving.serve()
    assert seqs[0].state is SeqState.SWAPPED and serving.pool.num_used == 0
    assert [seq.output for seq in seqs[1:]] == answers[1:]
    # 2. It reads on.
    serving.scheduler.resume(seqs[0].id)
    serving.serve()
    assert seqs[0].output == answers[0]


def test_copies_are_measured_and_weighed_against_computing(runner: ModelRunner) -> None:
    serving = Serving(runner, 64)
    assert runner.host.block_s > 0
    # 1. Computing is slow: blocks go to the host. 2. It is fast: they do not.
    for token_s, pays in ((1.0, True), (1e-12, False)):
        serving.engine.times = StepTimes()
        serving.engine.times.observe(1, token_s)
        serving.step()
        assert serving.pool.host.is_worthwhile is pays


def test_host_memory_that_is_not_there_is_refused_with_the_numbers(llama_dir: Path) -> None:
    with pytest.raises(StartError, match=r"host_swap_bytes, 95367432 MiB beside a KV cache of 64 MiB, does not fit"):
        load_runner(llama_dir, max_len=200, host_swap_bytes=10**14)
