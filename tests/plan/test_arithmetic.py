"""The check that everything in a plan must agree with: 40,000 and 8,000 tokens/s, 2,000 in, 800 out is 1 to 2."""

import json

import pytest

from pdctl.cli.app import main
from pdctl.plan.arithmetic import Ratio, best_ratio, exact_ratio, rates, rates_from_tokens
from pdctl.plan.stages import from_rates


def test_one_prefill_to_two_decode() -> None:
    found = rates_from_tokens(2000, 800, 40_000, 8_000)
    assert (found.prefill, found.decode) == (20, 10)
    assert exact_ratio(found) == 2
    assert best_ratio(found) == Ratio(1, 2)
    assert found.per_device(1, 2) == pytest.approx(20 / 3)
    assert found.per_device(5, 1) == pytest.approx(10 / 6), "tokens against tokens: a quarter of what 1:2 serves"


def test_balanced_split_equals_colocated_without_queues() -> None:
    found = rates_from_tokens(2000, 800, 40_000, 8_000)
    assert 3 * found.colocated == pytest.approx(found.split(1, 2))
    assert 2 * found.colocated > found.split(1, 1), "what is not balanced loses"


def test_stage_model_given_outright_has_these_rates() -> None:
    found = rates(from_rates(40_000, 8_000), 2000, 800)
    assert found.prefill == pytest.approx(20)
    assert found.decode == pytest.approx(10)


@pytest.mark.parametrize(
    ("prompt", "output", "ratio"), [(1000, 800, Ratio(1, 4)), (4000, 400, Ratio(2, 1)), (2000, 400, Ratio(1, 1))]
)
def test_ratio_follows_lengths(prompt: int, output: int, ratio: Ratio) -> None:
    assert best_ratio(rates_from_tokens(prompt, output, 40_000, 8_000)) == ratio


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --prompt 2000 --output 800 --prefill-tok-s 40000 --decode-tok-s 8000 --requests 60 --json"
    assert main(words.split()) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["version"] == 1
    assert value["ratio"] == {"prefill": 1, "decode": 2}
    assert value["rates"]["prefill"] == pytest.approx(20)
    assert value["rates"]["decode"] == pytest.approx(10)
    assert {(e["prefill"], e["decode"], e["colocated"]) for e in value["layouts"]} == {(1, 2, 0), (2, 1, 0), (0, 0, 3)}
    assert value["verdict"]


def test_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--prompt", "100"]) == 2
    assert "--output" in capsys.readouterr().err
