"""Grammars: what a matcher allows follows from the output alone, so it may be rebuilt anywhere, at any token."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from server.engine.sampler import Sampler
from server.grammar import MAX_BUILT, Grammars, end_ids, json_grammar, lark_grammar, regex_grammar
from server.sequence import SamplingParams, SeqId, Sequence, Stuck, Token
from tests.conftest import VOCAB_SIZE

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "é"]}}, "required": ["a"], "additionalProperties": False}
EOS = 2


@pytest.fixture(scope="module")
def grammars(tiny_model_dir: Path) -> Grammars:
    return Grammars(tiny_model_dir, VOCAB_SIZE)


def sequence(grammar: str, output: list[int] | None = None, **params: float) -> Sequence:
    more = {"max_tokens": 100, "temperature": 0.0, "stop_token_ids": (EOS,), **params}
    return Sequence(SeqId("g", 1, 0), [5], SamplingParams(grammar=grammar, **more), output=output or [])  # type: ignore[arg-type]


def run(grammars: Grammars, seq: Sequence, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(grammars)
    while len(seq.output) < 100 and EOS not in seq.output:
        logits = torch.randn(1, VOCAB_SIZE, generator=generator)
        seq.output.append(sampler.sample(logits, [seq])[0].id)
    return seq.output


def test_rebuilt_at_any_token(grammars: Grammars) -> None:
    """The hand-over (token 0 known) and a recompute (some known) allow what the first worker would have."""
    grammar = json_grammar(SCHEMA)
    output = run(grammars, sequence(grammar))
    assert output[-1] == EOS
    growing = sequence(grammar)
    for known in range(len(output)):
        growing.output[:] = output[:known]
        assert grammars.mask(growing) == grammars.mask(sequence(grammar, output[:known]))


@pytest.mark.parametrize("seed", range(20))
def test_random_logits_give_valid_json(grammars: Grammars, tiny_model_dir: Path, seed: int) -> None:
    from tokenizers import Tokenizer

    output = run(grammars, sequence(json_grammar(SCHEMA)), seed)
    text = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json")).decode(output)
    assert json.loads(text)["a"] in ("x", "é")


def test_rows_without_a_grammar_are_left_alone(grammars: Grammars) -> None:
    logits = torch.randn(3, VOCAB_SIZE)
    rows = [sequence(""), sequence(regex_grammar("[0-9]")), sequence("", temperature=0.7)]
    free = Sampler().sample(logits, [rows[0], sequence(""), rows[2]])
    bound = Sampler(grammars).sample(logits, rows)
    assert (bound[0], bound[2]) == (free[0], free[2])


def test_the_grammar_wins(grammars: Grammars) -> None:
    """A bias, a ban or min_tokens against all that it allows is passed over."""
    done = sequence(regex_grammar("a"), [67], min_tokens=9)
    assert Sampler(grammars).sample(torch.randn(1, VOCAB_SIZE), [done])[0].id == EOS
    banned = sequence(regex_grammar("a"))
    banned.params = SamplingParams(max_tokens=5, temperature=0.0, grammar=banned.params.grammar, bad_words=((67,),))
    assert Sampler(grammars).sample(torch.randn(1, VOCAB_SIZE), [banned])[0].id == 67


def test_check(grammars: Grammars) -> None:
    for good in (json_grammar(True), json_grammar(SCHEMA), regex_grammar("a|b"), lark_grammar('start: "a"')):
        assert grammars.check(good) == ""
    large = regex_grammar("a" * 300_000)
    for bad in (json_grammar({"type": "odd"}), regex_grammar("("), lark_grammar("start: x"), large):
        assert grammars.check(bad)
        assert "\n" not in grammars.check(bad)


def test_a_limit_on_the_way_is_no_end(grammars: Grammars) -> None:
    """The first mask is cheap, what follows is not: the sequence is stuck, and its neighbours are not."""
    costly, cheap = sequence(regex_grammar("a{1000}{100}")), sequence(regex_grammar("a*"))
    assert grammars.check(costly.params.grammar) == ""
    sampler = Sampler(grammars)
    tokens = sampler.sample(torch.randn(2, VOCAB_SIZE), [costly, cheap])
    assert [type(token) for token in tokens] == [Token, Token]
    costly.output.append(67)
    stuck, token = sampler.sample(torch.randn(2, VOCAB_SIZE), [costly, cheap])
    assert isinstance(stuck, Stuck)
    assert "after 1 tokens" in stuck.why
    assert isinstance(token, Token)


def test_more_ends_than_one(grammars: Grammars) -> None:
    """min_tokens may ask for more after the end of the grammar; that is no error, at once or one by one."""
    for output in ([67, EOS, EOS, EOS], [67]):
        seq = sequence(regex_grammar("a"), output, min_tokens=9)
        for _ in range(3):
            (token,) = Sampler(grammars).sample(torch.randn(1, VOCAB_SIZE), [seq])
            assert isinstance(token, Token)
            assert token.id == EOS
            seq.output.append(token.id)


def test_built_once(grammars: Grammars) -> None:
    grammar = regex_grammar("once|only")
    assert not grammars.is_built(grammar)
    assert grammars.prepare(grammar) is grammars.prepare(grammar)
    assert grammars.is_built(grammar)
    for i in range(MAX_BUILT):
        grammars.prepare(regex_grammar(f"other{i}"))
    assert not grammars.is_built(grammar), "the oldest left"


def test_ends_of_text(tiny_model_dir: Path, smollm2_dir: Path) -> None:
    assert end_ids(tiny_model_dir) == [EOS]
    assert EOS in end_ids(smollm2_dir)


def test_no_torch() -> None:
    code = "import sys, server.grammar; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
