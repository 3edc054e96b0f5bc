"""A stage model that made the figures is found again from them, and a prediction is graded."""

from typing import Any

import pytest

from pdctl.exits import UsageError
from pdctl.plan import check
from pdctl.plan.fit import fit, nonnegative
from pdctl.plan.loads import Arrival, Lengths, closed
from pdctl.plan.roofline import estimate
from pdctl.plan.sim import Cluster, Layout, Sizes
from pdctl.plan.stages import Stages, StepModel

TRUE = StepModel(
    base_s=0.01, floor_s=0.03, prompt_token_s=1.5e-3, prompt_context_s=1e-7, decode_seq_s=5e-3, context_token_s=2e-6
)
CHUNK = 256


def calibration() -> dict[str, Any]:
    return {
        "chunk_tokens": CHUNK,
        "prefill": [["colocated", n, TRUE.prefill_s(n, CHUNK), 0] for n in (128, 256, 512, 1024, 2048)],
        "decode": [["colocated", b, c, TRUE.decode_s(b, c), 0] for b in (1, 2, 4, 8) for c in (128, 1024, 2048)],
        "transfer": [[256, 256 * 23_000, 0.002 + 256 * 23_000 / 1e9], [128, 128 * 23_000, 0.002 + 128 * 23_000 / 1e9]],
    }


def test_terms_are_found_again() -> None:
    found = fit(calibration(), "made up")
    for n in (200, 700, 3000):
        assert found.colocated.prefill_s(n, CHUNK) == pytest.approx(TRUE.prefill_s(n, CHUNK), rel=0.02)
    for b, c in ((1, 500), (6, 1500), (12, 300)):
        assert found.decode.decode_s(b, c) == pytest.approx(TRUE.decode_s(b, c), rel=0.02)
    assert found.link_bytes_s == pytest.approx(1e9, rel=0.05)
    assert found.link_latency_s == pytest.approx(0.002, rel=0.05)
    assert found.kv_token_bytes == pytest.approx(23_000)


def test_contention_is_found_and_taken_out() -> None:
    both: dict[str, Any] = calibration()
    decode, prefill = both["decode"], both["prefill"]
    both["decode"] = [
        [role, *p, s * more, busy]
        for role, ratio in (("colocated", 1.7), ("decode", 1.4))
        for _, *p, s, _ in decode
        for busy, more in ((0, 1.0), (1, ratio))
    ]
    both["prefill"] = [
        [role, *p, s * more, busy]
        for role, ratio in (("colocated", 1.2), ("prefill", 1.1))
        for _, *p, s, _ in prefill
        for busy, more in ((0, 1.0), (1, ratio))
    ]
    found, alone = fit(both, "made up"), fit(calibration(), "made up")
    assert found.contention.slowdown(1, 0, 1) == pytest.approx((1.2, 1.4)), "while the other reads"
    assert found.contention.slowdown(0, 1, 1) == pytest.approx((1.1, 1.7)), "while it writes"
    assert found.contention.slowdown(0, 1, 2) == pytest.approx((1.05, 1.35)), "one of two"
    assert found.decode.decode_s(4, 700) == pytest.approx(alone.decode.decode_s(4, 700), rel=0.02)
    two = Cluster(Layout(colocated=2), found, Sizes(token_budget=CHUNK, chunk_tokens=CHUNK))
    one = Cluster(Layout(colocated=2), found, Sizes(token_budget=CHUNK, chunk_tokens=CHUNK))
    lengths = Lengths(200, 20)
    slow, fast = two.run(closed(40, lengths), concurrency=2), one.run(closed(20, lengths), concurrency=1)
    assert 1.3 < slow.tpot_mean / fast.tpot_mean < 1.75, "the other core is at work most of the time"


@pytest.mark.parametrize("lengths", [[1024], [1000, 1010, 1024], [64, 160, 320]])
def test_a_prompt_keeps_its_time_whatever_lengths_were_measured(lengths: list[int]) -> None:
    """0.8 ms a token and 40 ms a step that decodes. Lengths that are alike do not tell a step's constant from its
    tokens: what is too much for the one is the other's, and nothing of it is lost."""
    prompts = [[role, n, 0.0008 * n, 0] for role in ("prefill", "colocated") for n in lengths]
    decoding = [["decode", b, 1056.0, 0.040 + 0.003 * b, 0] for b in (1, 4, 8)]
    stages = fit({"chunk_tokens": 256, "prefill": prompts, "decode": decoding}, "x")
    for length in lengths:
        assert stages.prefill.prefill_s(length, 256) == pytest.approx(0.0008 * length, rel=0.05)
        assert stages.colocated.prefill_s(length, 256) == pytest.approx(0.0008 * length, rel=0.05)
    assert stages.colocated.decode_s(4, 1056) == pytest.approx(0.052, rel=0.05)


def test_no_term_is_negative() -> None:
    assert nonnegative([(1, 1), (1, 2), (1, 3)], [3, 2, 1])[1] == 0
    assert min(nonnegative([(1, 1), (1, 2), (1, 3)], [1, 4, 7])) == 0


def test_too_little_is_refused() -> None:
    with pytest.raises(UsageError, match="no calibration of decoding"):
        fit({"prefill": [["prefill", 100, 0.1, 0]]}, "x.json")


def test_stages_survive_json() -> None:
    stages = estimate("llama-3.1-8b", "h200")
    assert Stages.from_json(stages.to_json()) == stages
    with pytest.raises(UsageError, match="colour"):
        Stages.from_json({**stages.to_json(), "colour": 1})


def test_roofline_is_near_what_an_h200_does() -> None:
    """DESIGN's measured rows: decode batch 1 and 64 at context 1024, a prompt of 4096."""
    step = estimate("llama-3.1-8b", "h200").decode
    assert step.decode_s(1, 1024) == pytest.approx(4.75e-3, rel=0.35)
    assert step.decode_s(64, 1024) == pytest.approx(7.47e-3, rel=0.35)
    assert step.prefill_s(4096, 4096) == pytest.approx(0.101, rel=0.35)


def test_a_result_is_graded() -> None:
    stages = fit(calibration(), "made up")
    cell = {
        "mode": "colocated",
        "prompt": 512,
        "output": 16,
        "prompt_tokens": 512,
        "output_tokens": 16,
        "concurrency": 1,
        "requests": 10,
        "ttft_ms": {"mean": 1e3 * TRUE.prefill_s(512, CHUNK)},
        "tpot_ms": {"mean": 1e3 * TRUE.decode_s(1, 520)},
        "goodput": 0.9,
    }
    result = {
        "version": 1,
        "slo": {"ttft_ms": 5000, "tpot_ms": 500},
        "modes": [{"name": "colocated", "layout": {"colocated": 1}}, {"name": "other", "layout": None}],
        "cells": [cell, {**cell, "mode": "other"}],
    }
    graded = check.grade(result, stages, Sizes(token_budget=CHUNK, chunk_tokens=CHUNK))
    assert len(graded) == 1
    assert graded[0].error("ttft") == pytest.approx(0, abs=0.03)
    assert graded[0].error("tpot") == pytest.approx(0, abs=0.03)
    assert "median error" in check.show(graded)
    assert check.to_json(graded, "x")["median_error"]["tpot"] < 0.03


def graded(mode: str, predicted: float, measured: float, half: float = 10.0) -> check.Graded:
    between = measured - half, measured + half
    return check.Graded(mode, 512, 64, 8, 0.0, False, {"ttft": (predicted, measured)}, between)


@pytest.mark.parametrize(
    ("cells", "is_right"),
    [
        ((graded("a", 90, 100), graded("b", 150, 200)), True),
        ((graded("a", 150, 100), graded("b", 90, 200)), False),
        ((graded("a", 95, 100), graded("b", 90, 104)), True),
        ((graded("a", 150, 100, half=60), graded("b", 90, 200, half=60)), True),
        ((graded("a", 95, 100), graded("b", 90, 104), graded("c", 80, 300)), False),
    ],
    ids=["as measured", "the other way", "as good as equal", "nobody can tell", "one of three"],
)
def test_order_of_modes(cells: tuple[check.Graded, ...], is_right: bool) -> None:
    assert check.ranking(list(cells)) == (int(is_right), 1)


def test_a_simulated_round_is_that_of_the_bench() -> None:
    """One user: what comes after its first request, from when the second is sent to when the last one ends."""
    stages = Stages(TRUE, TRUE, TRUE)
    cluster = Cluster(Layout(colocated=1), stages, Sizes(token_budget=CHUNK, chunk_tokens=CHUNK), skip=1)
    seen = cluster.run(closed(5, Lengths(200, 20)), concurrency=1)
    assert seen.num_requests == 4
    assert 4 / seen.requests_s == pytest.approx(sum(cluster.tally.e2e))
    assert seen.requests_s == pytest.approx(1 / (TRUE.prefill_s(200, CHUNK) + 19 * TRUE.decode_s(1, 210)), rel=0.01)


def test_a_busy_router_and_a_grant_take_what_was_measured() -> None:
    stages = fit(
        {**calibration(), "router_s": 0.004, "router_busy_s": 0.010, "grants": [0.003, 0.002, 0.004]}, "made up"
    )
    assert (stages.router_s, stages.router_busy_s, stages.hop_s) == pytest.approx((0.004, 0.010, 0.0015))
    alone = Cluster(Layout(prefill=1, decode=1), stages).run(closed(2, Lengths(200, 1)), concurrency=1)
    assert alone.ttft_mean == pytest.approx(stages.prefill.prefill_s(200, 1024) + 0.004 + 2 * 0.0015)
    crowd = Cluster(Layout(colocated=2), stages, skip=2)
    seen = crowd.run([Arrival(0.0, 500, 1), Arrival(0.0, 500, 1), Arrival(0.1, 16, 1)])
    assert seen.ttft_mean > 0.010, "both compute when the third one comes"
