"""Leaping changes how long a simulation takes, not what it says."""

from operator import attrgetter
from random import Random

import pytest

from pdctl.plan.loads import Arrival, Lengths, closed, poisson
from pdctl.plan.router import Least, Seen
from pdctl.plan.sim import Cluster, Layout, Sizes
from pdctl.plan.stages import Stages, StepModel
from pdctl.plan.tally import Slo
from pdctl.plan.worker import Leap

MODEL = StepModel(
    base_s=0.001, floor_s=0.004, prompt_token_s=2.4e-5, decode_seq_s=2e-5, context_token_s=3e-8, prompt_context_s=1e-10
)
STAGES = Stages(MODEL, MODEL, MODEL, kv_token_bytes=131_072, link_bytes_s=20e9, link_latency_s=1e-4)
LAYOUTS = [Layout(colocated=2), Layout(prefill=2, decode=1), Layout(prefill=1, decode=2, threshold=500)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("num_blocks", [16_384, 700], ids=["ample", "scarce"])
def test_the_same_with_and_without(layout: Layout, num_blocks: int) -> None:
    def run(can_leap: bool) -> Cluster:
        cluster = Cluster(layout, STAGES, Sizes(num_blocks=num_blocks), can_leap=can_leap)
        cluster.run(poisson(9.0, 150, Lengths(900, 180, spread=0.6), seed=3))
        return cluster

    slow, fast = run(False), run(True)
    assert list(fast.tally.ttft) == pytest.approx(list(slow.tally.ttft), rel=1e-6)
    assert list(fast.tally.e2e) == pytest.approx(list(slow.tally.e2e), rel=1e-6)
    assert fast.utilisation() == pytest.approx(slow.utilisation(), rel=1e-6)
    assert fast.tally.gaps.quantile(0.99) == pytest.approx(slow.tally.gaps.quantile(0.99), rel=0.05)


def test_one_that_gave_way_returns_in_time() -> None:
    """1. Three sequences fill the pool, and one gives way. 2. Another ends: the one that gave way returns at once, not
    when all that run have ended."""

    def run(can_leap: bool) -> list[float]:
        cluster = Cluster(Layout(colocated=1), STAGES, Sizes(num_blocks=200), can_leap=can_leap)
        cluster.run([Arrival(0.0, 100, 3000), Arrival(0.1, 700, 900), Arrival(0.2, 700, 900)])
        assert cluster._writers[0].scheduler.counters().preemptions
        return list(cluster.tally.e2e)

    assert run(True) == pytest.approx(run(False), rel=1e-6)


@pytest.mark.parametrize("objective_s", [0.006, 0.012, 0.03])
def test_what_steps_may_carry_is_measured_alike(objective_s: float) -> None:
    sizes = Sizes(num_blocks=4096, tpot_objective_s=objective_s, local_prefill_tokens=32)

    def run(can_leap: bool) -> list[float]:
        cluster = Cluster(Layout(prefill=1, decode=1, threshold=4000), STAGES, sizes, can_leap=can_leap)
        cluster.run(poisson(3.0, 60, Lengths(1500, 150, spread=0.6), seed=10))
        return [*cluster.tally.ttft, *cluster.tally.e2e]

    assert run(True) == pytest.approx(run(False), rel=1e-6)


def test_one_cut_short_counts_what_is_over() -> None:
    def run(can_leap: bool) -> Cluster:
        cluster = Cluster(Layout(colocated=3), STAGES, Sizes(num_blocks=700), Slo(ttft_s=1e-6), can_leap=can_leap)
        cluster.run(closed(100, Lengths(300, 30, spread=0.6), seed=91), concurrency=12, max_missed=5)
        return cluster

    slow, fast = run(False), run(True)
    assert fast.utilisation() == pytest.approx(slow.utilisation(), rel=1e-6)
    assert max(slow.utilisation().values()) <= 1
    assert sum(fast.tally.gaps._counts.values()) == sum(slow.tally.gaps._counts.values())


def test_the_least_is_found_among_few_entries() -> None:
    """1. Keys change at random; the first with the least key is always found. 2. The heap does not grow with them."""
    random = Random(3)
    workers = [Seen(f"decode-{i}", "decode") for i in range(7)]
    least = Least(workers, attrgetter("prompt_tokens"))
    for _ in range(5000):
        worker = random.choice(workers)
        worker.prompt_tokens = max(0, worker.prompt_tokens + random.choice([-2, -1, 1, 2]))
        least.changed(worker)
        assert least.first() is min(workers, key=attrgetter("prompt_tokens"))
    assert len(least._heap) <= 8 * len(workers)


def test_a_prompt_with_one_token_left_is_not_leapt_over() -> None:
    cluster = Cluster(Layout(colocated=1), STAGES, Sizes(token_budget=64, chunk_tokens=64))
    cluster.run(closed(8, Lengths(65, 20)), concurrency=2)
    assert min(cluster.tally.ttft) > 0


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_nothing_is_left(layout: Layout) -> None:
    cluster = Cluster(layout, STAGES)
    seen = cluster.run(closed(60, Lengths(600, 30, spread=1.0)), concurrency=7)
    assert seen.num_requests == 60
    for worker in (*cluster._readers, *cluster._writers):
        worker.scheduler.check_integrity()
        assert not worker.scheduler.has_work
        assert worker.scheduler.counters().blocks_used == 0


def test_leap_knows_how_many_steps_are_over() -> None:
    leap = Leap(start=10.0, num_steps=50, first_s=0.01, slope_s=0.0005)
    for k in range(51):
        assert leap.num_done(leap.after(k)) == k
        assert leap.num_done(leap.after(k) + 1e-6) == k
    assert leap.num_done(leap.after(50) + 100) == 50
