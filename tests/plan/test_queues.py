"""Known answers. One server, first come first served: what queueing theory says, the simulator must find.

M/M/1 (exponential service): mean time in system 1 / (mu - lambda). M/D/1 (constant service): Pollaczek-Khinchine,
service * (1 + rho / (2 (1 - rho))). Kleinrock, Queueing Systems I, 1975, sections 3.2 and 5.6.
"""

from collections.abc import Iterator
from random import Random

import pytest

from pdctl.plan.loads import Arrival, Lengths, closed, poisson
from pdctl.plan.sim import Cluster, Layout, Sizes
from pdctl.plan.stages import Stages, StepModel

TOKENS = 1000  # of a mean service: its granularity
SERVICE_S = 1.0
# One prompt at a time, whole, in the order of arrival.
ONE_BY_ONE = Sizes(
    token_budget=1 << 20,
    chunk_tokens=1 << 20,
    max_seqs=1,
    max_running=1,
    num_blocks=64,
    block_size=1 << 20,
    age_limit_s=0.0,
)
MODEL = StepModel(prompt_token_s=SERVICE_S / TOKENS)
SERVER = Stages(MODEL, MODEL, MODEL)


def exponential(rate: float, count: int, seed: int) -> Iterator[Arrival]:
    random, at = Random(seed), 0.0
    for _ in range(count):
        at += random.expovariate(rate)
        # 2 at least: a slice of one token counts as decoding.
        yield Arrival(at, max(2, round(random.expovariate(1 / TOKENS))), 1)


def time_in_system(arrivals: Iterator[Arrival]) -> float:
    return Cluster(Layout(colocated=1), SERVER, ONE_BY_ONE).run(arrivals).ttft_mean


def theory(rho: float, kind: str) -> float:
    return SERVICE_S / (1 - rho) if kind == "M/M/1" else SERVICE_S * (1 + rho / (2 * (1 - rho)))


def measured(rho: float, kind: str, count: int) -> float:
    if kind == "M/M/1":
        return time_in_system(exponential(rho, count, seed=5))
    return time_in_system(poisson(rho, count, Lengths(TOKENS, 1), seed=5))


@pytest.mark.parametrize("kind", ["M/M/1", "M/D/1"])
@pytest.mark.parametrize(("rho", "tolerance"), [(0.5, 0.03), (0.8, 0.08)])
def test_queue(kind: str, rho: float, tolerance: float) -> None:
    assert measured(rho, kind, 20_000) == pytest.approx(theory(rho, kind), rel=tolerance)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["M/M/1", "M/D/1"])
@pytest.mark.parametrize("rho", [0.5, 0.8])
def test_queue_over_a_million_arrivals(kind: str, rho: float) -> None:
    assert measured(rho, kind, 1_000_000) == pytest.approx(theory(rho, kind), rel=0.02)


def test_zero_latency_link_equals_local() -> None:
    """One at a time, two workers joined by a link that costs nothing take as long as one that does both."""
    both = StepModel(base_s=0.002, floor_s=0.003, prompt_token_s=5e-5, decode_seq_s=1e-4, context_token_s=1e-8)
    stages = Stages(both, both, both, kv_token_bytes=131_072)
    lengths = Lengths(1500, 60, spread=0.5)
    local = Cluster(Layout(colocated=1), stages)
    split = Cluster(Layout(prefill=1, decode=1), stages)
    local.run(closed(50, lengths), concurrency=1)
    split.run(closed(50, lengths), concurrency=1)
    assert list(split.tally.ttft) == pytest.approx(list(local.tally.ttft))
    assert list(split.tally.e2e) == pytest.approx(list(local.tally.e2e))


def test_link_costs_what_it_says() -> None:
    both = StepModel(prompt_token_s=1e-5, floor_s=0.004)
    bytes_a_token, tokens = 1000.0, 1024
    stages = Stages(both, both, both, kv_token_bytes=bytes_a_token, link_bytes_s=1e6, link_latency_s=0.5)
    seen = Cluster(Layout(prefill=1, decode=1), stages).run(closed(3, Lengths(tokens, 8)), concurrency=1)
    assert seen.transfer_mean == pytest.approx(bytes_a_token * tokens / 1e6 + 0.5), "one chunk: nothing overlaps"
