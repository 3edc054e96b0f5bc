"""A prefix that prefill has cached crosses while the rest is computed, and the text is the same."""

from pathlib import Path

import pytest

from tests.stack.harness import PD, complete, eventually, running

TWO_DECODE = PD.replace("[decode]\nworkers = 1\ncpus = [1]", "[decode]\nworkers = 2\ncpus = [1, 1]")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cached_prefix_is_pushed_before_the_rest_is_computed(tiny_model_dir: Path, tmp_path: Path) -> None:
    """1. A prompt goes to one decode worker. 2. Longer ones with that prefix: whoever decodes, the text is the same as
    with nothing cached, and what only prefill had was pushed at once."""
    prefix = [3 + i * 7 % 500 for i in range(640)]
    with running(tmp_path, TWO_DECODE, model=tiny_model_dir) as stack:
        complete(stack.url, prefix, max_tokens=4)
        found = [complete(stack.url, [*prefix, *range(5 + n, 300 + n)], max_tokens=8) for n in range(6)]
        pushed = eventually(
            lambda: next(
                worker["load"]["counters"].get("prefetched_blocks", 0)
                for worker in stack.admin("/admin/state")["workers"]
                if worker["role"] == "prefill"
            ),
            10,
            "blocks pushed ahead",
        )
    assert pushed >= len(prefix) // 16
    with running(tmp_path, PD, name="fresh", model=tiny_model_dir) as stack:
        for n, answer in enumerate(found):
            assert (
                complete(stack.url, [*prefix, *range(5 + n, 300 + n)], max_tokens=8)["token_ids"] == answer["token_ids"]
            )
