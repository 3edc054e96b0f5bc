"""Leaping changes how long a simulation takes, not what it says."""

import pytest

from pdctl.plan.loads import Lengths, closed, poisson
from pdctl.plan.sim import Cluster, Layout, Sizes
from pdctl.plan.stages import Stages, StepModel
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
