"""What an open console costs: CPU at one frame a second, and how soon a key is answered."""

import shutil

import pytest

from bench.console import LIMITS, measure

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")]


@pytest.mark.parametrize("count", LIMITS)
def test_an_open_console_is_cheap_and_answers(count: int) -> None:
    cost = measure(count, 60)
    assert not cost.misses, cost
