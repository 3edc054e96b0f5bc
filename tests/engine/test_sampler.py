"""The vectorised sampler against one row at a time in plain Python, and the properties that clients rely on."""

import math
import random
from typing import Any

import pytest
import torch

from server.engine.sampler import Sampler, draw, is_plain_greedy, reshape, uniform
from server.sequence import SamplingParams, SeqId, Sequence

VOCAB = 97


def make_seq(number: int = 0, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **params: Any) -> Sequence:
    sampling = SamplingParams(**{"max_tokens": 100, "seed": number, **params})
    return Sequence(SeqId("t", number, 0), list(prompt), sampling, output=list(output))


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


# -- one row at a time ------------------------------------------------------------------------------------------------


def reference_reshape(row: list[float], seq: Sequence) -> list[float]:
    p = seq.params
    row = list(row)
    if p.allowed_token_ids:
        row = [x if t in p.allowed_token_ids else -math.inf for t, x in enumerate(row)]
    if len(seq.output) < p.min_tokens:
        for t in p.stop_token_ids:
            row[t] = -math.inf
    for t, bias in p.logit_bias.items():
        row[t] += bias
    for t in set(seq.prompt + seq.output):
        row[t] = row[t] / p.repetition_penalty if row[t] > 0 else row[t] * p.repetition_penalty
    for t in set(seq.output):
        row[t] -= p.frequency_penalty * seq.output.count(t) + p.presence_penalty
    return row


def reference_probabilities(row: list[float], p: SamplingParams) -> list[float]:
    scaled = [x / p.temperature for x in row]
    top = max(scaled)
    if p.min_p:
        scaled = [x if x >= top + math.log(p.min_p) else -math.inf for x in scaled]
    if p.top_k:
        edge = sorted(scaled, reverse=True)[min(p.top_k, len(scaled)) - 1]
        scaled = [x if x >= edge else -math.inf for x in scaled]
    weights = [math.exp(x - top) for x in scaled]
    if p.top_p < 1:
        kept, mass, total = set(), 0.0, sum(weights)
        for t in sorted(range(len(weights)), key=lambda t: -weights[t]):
            if mass >= p.top_p * total:
                break
            kept.add(t)
            mass += weights[t]
        weights = [w if t in kept else 0.0 for t, w in enumerate(weights)]
    total = sum(weights)
    return [w / total for w in weights]


def reference_sample(row: list[float], seq: Sequence) -> int:
    row = reference_reshape(row, seq)
    if seq.params.is_greedy:
        return row.index(max(row))
    probabilities = reference_probabilities(row, seq.params)
    target, mass = uniform(seq.params.seed, len(seq.output)), 0.0
    for t, probability in enumerate(probabilities):
        mass += probability
        if mass > target:
            return t
    return max(t for t, probability in enumerate(probabilities) if probability)


def random_seq(number: int, rng: random.Random) -> Sequence:
    """Any mix of parameters, each off about half the time."""
    options = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 1.7]),
        "top_k": rng.choice([0, 1, 5, 50, 500]),
        "top_p": rng.choice([1.0, 0.9, 0.5, 0.01]),
        "min_p": rng.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        "presence_penalty": rng.choice([0.0, 0.7, -1.0]),
        "frequency_penalty": rng.choice([0.0, 0.4, -0.4]),
        "repetition_penalty": rng.choice([1.0, 1.3, 0.8]),
        "min_tokens": rng.choice([0, 3, 50]),
        "stop_token_ids": tuple(rng.sample(range(VOCAB), 3)),
        "logit_bias": {rng.randrange(VOCAB): rng.uniform(-100, 100) for _ in range(rng.choice([0, 3]))},
        "allowed_token_ids": tuple(rng.sample(range(VOCAB), 40)) if rng.random() < 0.3 else (),
        "num_logprobs": rng.choice([-1, 0, 4]),
    }
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30)))
    output = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(0, 20)))
    return make_seq(number, prompt, output, **options)


@pytest.mark.parametrize("seed", range(12))
def test_against_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    seqs = [random_seq(seed * 100 + i, rng) for i in range(40)]
    logits = random_logits(len(seqs), seed)
    tokens = Sampler().sample(logits, seqs)
    for row, seq, token in zip(logits.tolist(), seqs, tokens, strict=True):
        assert token.id == reference_sample(row, seq), seq.params


def test_reshape_values() -> None:
    rng = random.Random(7)
    seqs = [random_seq(i, rng) for i in range(30)]
    logits = random_logits(30)
    expected = torch.tensor([reference_reshape(row, seq) for row, seq in zip(logits.tolist(), seqs, strict=True)])
    torch.testing.assert_close(reshape(logits, seqs), expected)


# -- properties -------------------------------------------------------------------------------------------------------


def test_logits_are_left_alone() -> None:
    logits = random_logits(2)
    before = logits.clone()
    Sampler().sample(logits, [make_seq(repetition_penalty=2.0, prompt=(1, 2)), make_seq(top_k=3)])
    assert torch.equal(logits, before)


def test_a_row_does_not_depend_on_its_batch() -> None:
    rng = random.Random(1)
    seqs = [random_seq(i, rng) for i in range(64)]
    logits = random_logits(64)
    together = Sampler().sample(logits, seqs)
    order = rng.sample(range(64), 64)
    shuffled = Sampler().sample(logits[order], [seqs[i] for i in order])
    assert [together[i] for i in order] == shuffled
    assert [Sampler().sample(logits[i : i + 1], [seqs[i]])[0] for i in range(64)] == together


def test_uniform_is_fixed_and_even() -> None:
    # Written down: a change would break replays between versions.
    pinned = [round(uniform(*at), 6) for at in ((0, 0), (0, 1), (1, 0), (2**63, 10**6))]
    assert pinned == [0.652448, 0.490506, 0.36819, 0.045393]
    numbers = [uniform(seed, index) for seed in range(100) for index in range(100)]
    assert all(0 <= x < 1 for x in numbers)
    counts = torch.histc(torch.tensor(numbers), bins=50, min=0, max=1)
    assert float(((counts - 200) ** 2 / 200).sum()) < 85.4  # chi-square, 49 degrees of freedom, 0.1 %


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.7}]
)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    vocab, num_draws = 20, 4000
    row = random_logits(1, 5, vocab) / 2
    seqs = [make_seq(i, **options) for i in range(num_draws)]
    drawn = torch.bincount(draw(row.expand(num_draws, -1), seqs, [len(seq.output) for seq in seqs]), minlength=vocab)
    expected = torch.tensor(reference_probabilities(row[0].tolist(), seqs[0].params)) * num_draws
    assert not drawn[expected == 0].any()
    kept = expected > 0
    chi_square = float(((drawn[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    assert chi_square < 46  # 19 degrees of freedom, 0.05 %; the seeds are fixed


def test_nucleus_wider_than_the_head() -> None:
    """Nearly flat over a large vocabulary: the edge lies beyond the tokens looked at first."""
    logits = random_logits(3, 2, 5000) / 100
    seqs = [make_seq(0, top_p=0.9), make_seq(1, top_p=0.1), make_seq(2, top_p=0.999, top_k=4000)]
    tokens = Sampler().sample(logits, seqs)
    assert [t.id for t in tokens] == [
        reference_sample(row, seq) for row, seq in zip(logits.tolist(), seqs, strict=True)
    ]


def test_greedy_fast_path_is_the_argmax() -> None:
    logits = random_logits(8).bfloat16()
    seqs = [make_seq(i, temperature=0.0) for i in range(8)]
    assert all(is_plain_greedy(s.params) for s in seqs)
    assert [t.id for t in Sampler().sample(logits, seqs)] == logits.float().argmax(-1).tolist()


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(3)
    seqs = [
        make_seq(0, temperature=0.0, num_logprobs=0, logit_bias={5: 100.0}),
        make_seq(1, temperature=0.2, top_k=3, num_logprobs=5),
        make_seq(2, temperature=0.0),
    ]
    tokens = Sampler().sample(logits, seqs)
    raw = logits.log_softmax(-1)
    assert tokens[0].id == 5
    assert tokens[0].top == ()
    for row in (0, 1):
        assert tokens[row].logprob == pytest.approx(float(raw[row, tokens[row].id]), abs=1e-6)
    values, ids = raw[1].topk(5)
    assert [t for t, _ in tokens[1].top] == ids.tolist()
    assert [v for _, v in tokens[1].top] == pytest.approx(values.tolist())
    assert tokens[2].logprob == 0.0


def test_min_tokens_holds_back_stops_until_reached() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 50.0
    early = make_seq(0, output=(1,), temperature=0.0, min_tokens=2, stop_token_ids=(3,))
    late = make_seq(0, output=(1, 1), temperature=0.0, min_tokens=2, stop_token_ids=(3,))
    assert Sampler().sample(logits, [early])[0].id != 3
    assert Sampler().sample(logits, [late])[0].id == 3


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0])
def test_ids_outside_the_vocabulary_harm_nobody(temperature: float) -> None:
    odd: dict[str, Any] = {
        "logit_bias": {VOCAB + 5: 9.0, -1: 9.0},
        "allowed_token_ids": (VOCAB,),
        "stop_token_ids": (10**9,),
    }
    seqs = [make_seq(0, temperature=temperature, min_tokens=9, **odd), make_seq(1)]
    tokens = Sampler().sample(random_logits(2), seqs)
    assert all(0 <= t.id < VOCAB for t in tokens)


def test_never_a_token_of_probability_zero() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [10, 20]] = 0.0
    drawn = {Sampler().sample(logits, [make_seq(i)])[0].id for i in range(200)}
    assert drawn == {10, 20}


def test_demands_that_leave_nothing_give_way() -> None:
    """All but allowed_token_ids: neither a token that was not allowed nor an error."""
    for temperature in (0.0, 1.0):
        stop = make_seq(allowed_token_ids=(3,), stop_token_ids=(3,), min_tokens=5, temperature=temperature)
        bad = make_seq(allowed_token_ids=(4,), bad_words=((4,),), temperature=temperature)
        assert [t.id for t in Sampler().sample(random_logits(2), [stop, bad])] == [3, 4]


def test_bad_words() -> None:
    logits = torch.zeros(4, 8)
    logits[:, 5] = 9.0
    words = ((1, 2, 5), (6,))
    rows = [
        make_seq(bad_words=words, output=(1, 2), temperature=0.0),
        make_seq(bad_words=words, output=(2, 1), temperature=0.0),
        make_seq(bad_words=words, output=(2,), temperature=0.0),
        make_seq(bad_words=((5,),), temperature=0.0),
    ]
    assert [t.id == 5 for t in Sampler().sample(logits, rows)] == [False, True, True, False]
