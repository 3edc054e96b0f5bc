"""The step: schedule under the lock, compute without it, update under it; and a step that fails."""

import threading
from typing import Any

import pytest

from server.engine.block_pool import BlockPool
from server.engine.engine import Engine, StepTimes
from server.engine.kv_cache import KVCachePool
from server.engine.scheduler import Limits, Scheduler
from server.sequence import Batch, SeqState, Stuck, Token
from tests.engine.models import make_sequence


class FakeRunner:
    """Samples token 7; `during` is called in the middle of each execute."""

    pool: KVCachePool

    def __init__(self) -> None:
        self.during: Any = lambda batch: None

    def execute(self, batch: Batch) -> list[Token | None]:
        self.during(batch)
        return [Token(7) if s.samples else None for s in batch.slices]


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
    plain = runner.execute
    runner.execute = lambda batch: [  # type: ignore[method-assign]
        Stuck("no way") if s.seq is seqs[0] and s.seq.output else token
        for s, token in zip(batch.slices, plain(batch), strict=True)
    ]
    stuck = []
    while (result := engine.step()) is not None:
        stuck += result.stuck
        scheduler.check_integrity()
    assert stuck == [(seqs[0], "no way")]
    assert (seqs[0].output, seqs[0].finish_reason) == ([7], "")
    assert (seqs[1].output, seqs[1].finish_reason) == ([7, 7, 7], "length")
    assert scheduler.counters().blocks_used == 0
