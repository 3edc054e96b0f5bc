"""decode.prefill_tokens = "auto": a step with prompts stays within the objective of those that decode."""

import pytest

from server.engine.local_prefill import MIN_TOKENS, LocalPrefill
from server.sequence import Batch, SamplingParams, SeqId, Sequence, Slice


def batch(num_decoding: int, num_prompt: int) -> Batch:
    seq = Sequence(SeqId("r", 1, 0), [1] * 4096, SamplingParams(8))
    slices = [Slice(seq, 9, 1) for _ in range(num_decoding)]
    return Batch(slices + ([Slice(seq, 0, num_prompt)] if num_prompt else []))


def run(objective_s: float, alone_s: float, token_s: float, num_decoding: int = 4) -> LocalPrefill:
    """Steps as long as a machine takes that needs so much for decoding and so much a prompt token."""
    local = LocalPrefill(objective_s, start=32)
    for _ in range(40):
        local.observe(batch(num_decoding, 0), alone_s)
        local.observe(batch(num_decoding, local.tokens), alone_s + local.tokens * token_s)
    return local


@pytest.mark.parametrize("token_s", [0.00005, 0.0002, 0.0005])
def test_it_fills_the_objective(token_s: float) -> None:
    local = run(0.040, 0.010, token_s)
    assert 0.010 + local.tokens * token_s == pytest.approx(0.036, abs=2 * token_s)


def test_over_the_objective_it_stretches_a_step() -> None:
    local = run(0.040, 0.100, 0.001)
    assert local.tokens == pytest.approx(40, abs=2)


def test_it_never_starves_prompts() -> None:
    assert run(0.040, 0.030, 0.1).tokens == MIN_TOKENS


def test_nothing_known_nothing_changed() -> None:
    local = LocalPrefill(0.04, start=32)
    local.observe(batch(0, 256), 1.0)
    local.observe(batch(2, 0), 0.01)
    assert local.tokens == 32
