"""The step: schedule under the lock, compute without it, update under it; and a step that fails."""

import threading
from typing import Any, cast

import pytest

from server.engine.block_pool import BlockPool
from server.engine.engine import Engine, StepTimes
from server.engine.kv_cache import KVCachePool
from server.engine.loop import EngineThread
from server.engine.model_runner import Launched
from server.engine.scheduler import Limits, Scheduler
from server.sequence import Batch, SeqState, Sequence, Stuck, Token
from tests.engine.models import make_sequence


class FakeRunner:
    """Samples token 7; `during` is called in the middle of each launch."""

    pool: KVCachePool
    is_async = False

    def __init__(self) -> None:
        self.during: Any = lambda batch: None

    def launch(self, batch: Batch) -> Launched:
        self.during(batch)
        samples = [s.samples for s in batch.slices]
        return Launched(lambda: [Token(7) if each else None for each in samples], lambda: True)


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def engine(runner: FakeRunner, clock: FakeClock) -> Engine:
    return Engine(Scheduler(Limits(), BlockPool(32, 16), clock), runner, clock)


def scheduler_of(engine: Engine) -> Scheduler:
    assert isinstance(engine.scheduler, Scheduler)
    return engine.scheduler


def test_nothing_to_do(engine: Engine) -> None:
    assert engine.step() is None
    assert engine.num_steps == 0


def test_a_sequence_to_its_end(engine: Engine) -> None:
    seq = make_sequence(0, [1, 2, 3], max_tokens=3)
    scheduler_of(engine).add(seq)
    results = [engine.step() for _ in range(3)]
    assert [r.steps[0].token for r in results if r] == [Token(7)] * 3
    assert seq.output == [7, 7, 7]
    assert seq.finish_reason == "length"
    assert engine.step() is None
    assert engine.num_steps == 3


def test_the_lock_is_free_during_a_forward(engine: Engine, runner: FakeRunner) -> None:
    """Another thread adds one sequence and aborts the running one meanwhile."""
    running, added = make_sequence(0, [1] * 20), make_sequence(1, [2] * 20)

    def other_thread() -> None:
        with engine.lock:
            scheduler_of(engine).add(added)
            scheduler_of(engine).abort(running.id)

    def during(batch: Batch) -> None:
        runner.during = lambda batch: None
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join(timeout=5)
        assert not thread.is_alive()

    runner.during = during
    scheduler_of(engine).add(running)
    result = engine.step()
    assert result is not None
    assert result.steps == []
    assert running.state is SeqState.FINISHED
    assert running.output == []
    scheduler_of(engine).check_integrity()
    following = engine.step()
    assert following is not None
    assert [s.seq for s in following.batch.slices] == [added]


def test_a_failed_step_ends_its_sequences_and_not_the_loop(
    engine: Engine, runner: FakeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    seqs = [make_sequence(i, [i] * 20) for i in range(3)]
    scheduler = scheduler_of(engine)
    for seq in seqs:
        scheduler.add(seq)

    def explode(batch: Batch) -> None:
        scheduler.abort(seqs[2].id)  # the client left in the same moment: not reported again
        raise RuntimeError("out of memory")

    runner.during = explode
    result = engine.step()
    assert result is not None
    assert result.failed == seqs[:2]
    assert str(result.error) == "out of memory"
    assert "its 3 sequences end" in caplog.text
    scheduler.check_integrity()
    assert scheduler.counters().blocks_used == 0

    runner.during = lambda batch: None
    survivor = make_sequence(9, [0] * 20, max_tokens=1)
    scheduler.add(survivor)
    after = engine.step()
    assert after is not None
    assert after.error is None
    assert survivor.num_cached == 0, "no block of the failed step may be found as a prefix"


def test_a_failed_step_leaves_alone_who_was_begun_anew_meanwhile(engine: Engine, runner: FakeRunner) -> None:
    old, anew = make_sequence(0, [1, 2, 3]), make_sequence(0, [1, 2, 3, 7])
    scheduler_of(engine).add(old)

    def begin_anew(batch: Batch) -> None:
        with engine.lock:
            scheduler_of(engine).abort(old.id)
            scheduler_of(engine).add(anew)
        raise RuntimeError("no")

    runner.during = begin_anew
    result = engine.step()
    assert result is not None and result.error is not None and not result.failed
    assert scheduler_of(engine).get(anew.id) is anew


def test_age_and_prediction(engine: Engine, runner: FakeRunner, clock: FakeClock) -> None:
    seen: list[tuple[float, float]] = []

    def during(batch: Batch) -> None:
        clock.now += 0.5
        seen.append((engine.step_age_s, engine.predicted_step_s))

    runner.during = during
    scheduler_of(engine).add(make_sequence(0, [1] * 64, max_tokens=2))
    result = engine.step()
    assert result is not None
    assert result.seconds == 0.5
    assert engine.step_age_s == 0.0
    engine.step()
    assert seen == [(0.5, 0.0), (0.5, 0.5)]


def test_step_times() -> None:
    times = StepTimes()
    assert times.predict(100) == 0.0
    times.observe(1, 0.02)
    times.observe(256, 0.2)
    assert times.predict(1) == 0.02
    assert times.predict(256) == 0.2
    assert times.predict(1024) == pytest.approx(0.8)
    assert times.predict(200) == pytest.approx(0.2), "never below the nearest kind of step"
    for _ in range(50):
        times.observe(256, 0.4)
    assert times.predict(256) == pytest.approx(0.4, rel=0.01)


def test_a_sequence_that_is_stuck_ends_alone(engine: Engine, runner: FakeRunner) -> None:
    scheduler = scheduler_of(engine)
    seqs = [make_sequence(i, [i] * 20, max_tokens=3) for i in range(2)]
    for seq in seqs:
        scheduler.add(seq)
    plain = runner.launch

    def launch(batch: Batch) -> Launched:
        stuck = [s.seq is seqs[0] and bool(s.seq.output) for s in batch.slices]
        tokens = plain(batch).collect()
        found = [Stuck("no way") if is_stuck else t for is_stuck, t in zip(stuck, tokens, strict=True)]
        return Launched(lambda: found, lambda: True)

    runner.launch = launch  # type: ignore[method-assign]
    stuck = []
    while (result := engine.step()) is not None:
        stuck += result.stuck
        scheduler.check_integrity()
    assert stuck == [(seqs[0], "no way")]
    assert (seqs[0].output, seqs[0].finish_reason) == ([7], "")
    assert (seqs[1].output, seqs[1].finish_reason) == ([7, 7, 7], "length")
    assert scheduler.counters().blocks_used == 0


# -- a device that computes by itself ---------------------------------------------------------------------------------


class Device(FakeRunner):
    """Says when each step is launched and waited for."""

    is_async = True

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, list[tuple[int, int]]]] = []
        self.is_done = True  # what is under way: the next one is due

    def launch(self, batch: Batch) -> Launched:
        what = [(s.seq.id.seq, s.num_tokens) for s in batch.slices]
        self.said.append(("launched", what))
        launched = super().launch(batch)

        def wait() -> list[Token | Stuck | None]:
            self.said.append(("landed", what))
            return launched.collect()

        return Launched(wait, lambda: self.is_done)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def ahead(device: Device, clock: FakeClock) -> Engine:
    limits = Limits(chunk_tokens=32, token_budget=32, max_running=8, max_seqs=8)
    return Engine(Scheduler(limits, BlockPool(32, 16, prefix_cache=False), clock), cast("Any", device), clock)


def granted(engine: Engine, number: int, length: int) -> Sequence:
    seq = make_sequence(number, [number] * length, max_tokens=5)
    seq.needs_grant, seq.arrival = True, float(number)
    scheduler_of(engine).add(seq)
    assert scheduler_of(engine).granted(seq.id, 1, 0)
    return seq


def test_the_next_chunk_is_launched_before_the_last_one_is_waited_for(ahead: Engine, device: Device) -> None:
    """Two prompts, of 80 and 40 tokens: each step is launched while the one before it runs."""
    scheduler = scheduler_of(ahead)
    first, second = granted(ahead, 0, 80), granted(ahead, 1, 40)
    results = []
    while (result := ahead.step()) is not None:
        results.append(result)
        scheduler.check_integrity()
    assert device.said == [
        ("launched", [(1, 32)]),
        ("launched", [(1, 8), (0, 24)]),
        ("landed", [(1, 32)]),
        ("launched", [(0, 32)]),
        ("landed", [(1, 8), (0, 24)]),
        ("launched", [(0, 24)]),
        ("landed", [(0, 32)]),
        ("landed", [(0, 24)]),
    ]
    ready = [[(step.seq.id.seq, step.ready) for step in result.steps] for result in results]
    assert ready == [[(1, range(2))], [(1, range(2, 3)), (0, range(1))], [(0, range(1, 3))], [(0, range(3, 5))]]
    assert [first.output, second.output] == [[7], [7]]
    assert first.state is second.state is SeqState.PUSHING
    assert first.num_under_way == second.num_under_way == 0


def test_a_step_that_is_not_full_is_left_open_until_the_last_moment(
    ahead: Engine, device: Device, clock: FakeClock
) -> None:
    """1. A sequence decodes, 10 ms a step, and launching one takes 1 ms. 2. The next step is launched when 1.5 ms are
    left of this one: a prompt that came before that is in it. 3. A step that is over earlier than it should be is
    followed at once."""
    scheduler = scheduler_of(ahead)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(clock.now)
        clock.now += seconds
        if len(slept) == 10:
            scheduler.add(make_sequence(1, [1] * 8, max_tokens=1))

    def launching(batch: Batch) -> None:
        clock.now += 0.001

    device.during = launching
    scheduler.add(make_sequence(0, [0] * 8, max_tokens=6))
    ahead.step()
    ahead.times = StepTimes()
    ahead.times.observe(1, 0.010)
    device.is_done, ahead._sleep = False, sleep
    device.said.clear()
    began = clock.now
    ahead.step()
    assert device.said[0] == ("launched", [(0, 1), (1, 8)])
    assert clock.now - began == pytest.approx(0.0095, abs=0.0002)
    device.is_done, count = True, len(slept)
    ahead.step()
    assert len(slept) == count and device.said[-2:] == [("launched", [(0, 1)]), ("landed", [(0, 1), (1, 8)])]


def test_a_sequence_goes_on_from_a_token_that_nobody_knows_yet(ahead: Engine, device: Device) -> None:
    """1. Its next step is launched while the one that brings its token runs. 2. None is launched beyond its length."""
    scheduler = scheduler_of(ahead)
    seq = make_sequence(0, [0] * 8, max_tokens=3)
    scheduler.add(seq)
    assert (first := ahead.step()) is not None and first.steps[0].token == Token(7)
    assert (seq.output, seq.num_computed, seq.num_scheduled, seq.num_coming) == ([7], 8, 9, 1)
    while ahead.step() is not None:
        scheduler.check_integrity()
    assert (seq.output, seq.finish_reason, seq.num_coming) == ([7, 7, 7], "length", 0)
    assert [what for what, _ in device.said] == ["launched", "launched", "landed", "launched", "landed", "landed"]
    assert scheduler.counters().blocks_used == 0


def test_what_was_computed_after_a_stop_is_passed_over(ahead: Engine, device: Device) -> None:
    """1. It stops with its first token; a step that goes on from there is under way, and writes its block. 2. That step
    brings nothing, and the block is free."""
    scheduler = scheduler_of(ahead)
    seq = make_sequence(0, [0] * 8, max_tokens=9, stop_token_ids=(7,))
    scheduler.add(seq)
    assert (first := ahead.step()) is not None and first.steps[0].finished
    assert (seq.finish_reason, seq.num_under_way, scheduler.counters().blocks_used) == ("stop", 1, 1)
    assert (second := ahead.step()) is not None and second.steps == []
    assert seq.output == [7] and scheduler.counters().blocks_used == 0
    assert ahead.step() is None


@pytest.mark.parametrize(
    "params", [{"top_p": 0.9, "temperature": 1.0}, {"presence_penalty": 0.5}, {"num_logprobs": 1}, {"min_tokens": 2}]
)
def test_who_needs_the_token_before_waits_for_it(ahead: Engine, device: Device, params: dict[str, Any]) -> None:
    scheduler = scheduler_of(ahead)
    scheduler.add(make_sequence(0, [0] * 8, max_tokens=3, **params))
    while ahead.step() is not None:
        scheduler.check_integrity()
    assert [what for what, _ in device.said] == ["launched", "landed"] * 3


def test_greedy_ones_need_no_edge(ahead: Engine, device: Device) -> None:
    scheduler_of(ahead).add(make_sequence(0, [0] * 8, max_tokens=3, top_p=0.9))
    while ahead.step() is not None:
        pass
    assert [what for what, _ in device.said][:3] == ["launched", "launched", "landed"]


@pytest.mark.parametrize("why", ["paused", "no place"])
def test_who_is_not_in_the_next_step_holds_up_nobody(ahead: Engine, device: Device, why: str) -> None:
    """One that needs each token before the next, whose client does not read; or that waits for a place."""
    scheduler, other = scheduler_of(ahead), make_sequence(0, [0] * 8, max_tokens=9, presence_penalty=1.0)
    if why == "paused":
        scheduler.limits.idle_swap_s = 100.0
        scheduler.add(other)
        ahead.step()
        scheduler.pause(other.id)
    else:
        scheduler.limits.max_running = 1
    scheduler.add(make_sequence(1, [1] * 8, max_tokens=3))
    device.said.clear()
    ahead.step()
    if why == "no place":
        scheduler.add(other)
    for _ in range(2):
        ahead.step()
    assert [what for what, _ in device.said] == ["launched", "launched", "landed", "launched", "landed", "landed"]


def test_a_device_that_fails_while_it_is_looked_at_ends_the_step(ahead: Engine, device: Device) -> None:
    def failing() -> Any:
        raise RuntimeError("an illegal memory access")

    device.launch = lambda batch: Launched(failing, failing)  # type: ignore[method-assign]
    ahead.times.observe(8, 0.010)
    seq = make_sequence(0, [0] * 8, max_tokens=3)
    scheduler_of(ahead).add(seq)
    result = ahead.step()
    assert result is not None and result.failed == [seq] and "illegal" in str(result.error)


def test_a_launch_that_raises_loses_no_step_under_way(
    ahead: Engine, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. The scheduler fails while a step runs: that step's result is told. 2. The failure is raised after it. 3. It
    goes on."""
    scheduler, schedule, count = scheduler_of(ahead), scheduler_of(ahead).schedule, iter(range(99))

    def fail_once() -> Batch:
        if next(count) == 1:
            raise RuntimeError("a bug")
        return schedule()

    monkeypatch.setattr(scheduler, "schedule", fail_once)
    scheduler.add(seq := make_sequence(0, [0] * 8, max_tokens=3))
    assert (first := ahead.step()) is not None and first.steps[0].token == Token(7)
    with pytest.raises(RuntimeError, match="a bug"):
        ahead.step()
    while ahead.step() is not None:
        pass
    assert (seq.output, seq.finish_reason) == ([7, 7, 7], "length")


def test_a_step_took_what_the_device_says(ahead: Engine, device: Device, clock: FakeClock) -> None:
    """Not how late Python looked: with that a step of prompts behind a short one seemed to cost next to nothing."""
    launch = device.launch

    def timed(batch: Batch) -> Launched:
        launched = launch(batch)
        clock.now += 0.007
        return Launched(launched.collect, launched.is_done, lambda: 0.0044)

    device.launch = timed  # type: ignore[method-assign]
    scheduler_of(ahead).add(make_sequence(0, [0] * 8, max_tokens=3))
    results = [ahead.step() for _ in range(3)]
    assert [result.seconds for result in results if result] == [0.0044] * 3


def test_nobody_goes_on_ahead_who_would_have_to_take_a_block_from_another(ahead: Engine, device: Device) -> None:
    """31 blocks: a prompt of 30 of them, and one that wants a second block when the pool has none."""
    scheduler = scheduler_of(ahead)
    first, second = make_sequence(0, [0] * 464, max_tokens=17), make_sequence(1, [1] * 15, max_tokens=9)
    for seq in (first, second):
        scheduler.add(seq)
    while ahead.step() is not None:
        scheduler.check_integrity()
    assert (len(first.output), len(second.output)) == (17, 9)
    order = [what for what, _ in device.said]
    assert ["launched", "landed", "launched"] in [order[i : i + 3] for i in range(len(order))]
    assert scheduler.counters().blocks_used == 0


def test_blocks_of_an_aborted_prompt_stay_until_no_step_has_them(ahead: Engine, device: Device) -> None:
    """1. Two of its steps are under way when it is let go. 2. The first one ends: its blocks are still written. 3. The
    second ends: they are free."""
    scheduler = scheduler_of(ahead)
    seq = granted(ahead, 0, 96)
    assert (first := ahead.step()) is not None and len(first.steps) == 1
    assert seq.num_under_way == 32, "the second is under way"
    assert device.said[-2:] == [("launched", [(0, 32)]), ("landed", [(0, 32)])]
    scheduler.abort(seq.id)
    scheduler.release(seq.id)
    assert scheduler.counters().blocks_used == 6
    assert (second := ahead.step()) is not None and second.steps == []
    assert scheduler.counters().blocks_used == 0
    assert ahead.step() is None
    scheduler.check_integrity()


def test_a_thread_that_stops_leaves_no_step_behind(ahead: Engine, device: Device) -> None:
    """The pool goes to the next role: what was launched is waited for, and nothing is launched any more."""
    granted(ahead, 0, 160)
    thread = EngineThread(ahead, lambda result: thread._stopping.set())
    thread.start()
    thread._thread.join(timeout=10)
    assert device.said == [("launched", [(0, 32)])] * 2 + [("landed", [(0, 32)])] * 2


def test_a_step_that_cannot_be_launched_takes_none_with_it(ahead: Engine, device: Device) -> None:
    """The one before it, which is under way, is told as ever; then its own sequences end."""
    scheduler = scheduler_of(ahead)
    first, second = granted(ahead, 0, 32), granted(ahead, 1, 64)

    def explode(batch: Batch) -> None:
        if batch.slices[0].seq is second:
            raise RuntimeError("out of memory")

    device.during = explode
    assert (result := ahead.step()) is not None and result.error is None
    assert [step.seq for step in result.steps] == [first]
    assert (result := ahead.step()) is not None and str(result.error) == "out of memory"
    assert result.failed == [second]
    for seq in (first, second):
        scheduler.release(seq.id)
    assert scheduler.counters().blocks_used == 0
    assert ahead.step() is None
