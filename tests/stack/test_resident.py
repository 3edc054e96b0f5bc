"""Conversations on a running stack: the next turn goes where the KV of the last one lies, and says the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import reference
from tests.stack.harness import PD, Running, complete, eventually, running
from tests.stack.test_text import prompts


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("stack"), PD, model=tiny_model_dir, kv_bytes="1MiB", max_len=2000) as stack:
        yield stack


def path_when(url: str, prompt: list[int], path: str, tokens: list[int]) -> dict[str, object]:
    """Asks until the request went by `path`: what workers publish is a moment late."""

    def ask() -> dict[str, object] | None:
        choice = complete(url, prompt, max_tokens=len(tokens))
        assert choice["token_ids"] == tokens
        record: dict[str, object] = choice["pdctl"]
        return record if record["path"] == path else None

    found: dict[str, object] = eventually(ask, 10, f"a request on path {path}")
    return found


def test_turns_of_a_conversation(stack: Running, tiny_model_dir: Path) -> None:
    model, url = reference.load(tiny_model_dir), stack.url
    (prompt,) = prompts([200], 512, seed=11)
    expected = reference.generate(model, prompt, 40)
    first = complete(url, prompt, max_tokens=40)
    assert (first["token_ids"], first["pdctl"]["path"]) == (expected, "pd")
    assert first["pdctl"]["cached_tokens"] == 0

    # The same prompt: all but its last block is there.
    again = path_when(url, prompt, "resident", expected)
    assert (again["cached_tokens"], again["kv_bytes"]) == (192, None)

    # The next turn: prompt, answer and two tokens more. 239 have KV, for an answer's last token is never read.
    turn = [*prompt, *expected, 7, 9]
    record = path_when(url, turn, "resident", reference.generate(model, turn, 8))
    assert record["cached_tokens"] in (224, 240)  # 240: another try of the same turn

    # Another salt is another client's: nothing is shared.
    other = complete(url, prompt, max_tokens=40, cache_salt="someone else")
    assert (other["pdctl"]["path"], other["pdctl"]["cached_tokens"]) == ("pd", 0)


def test_a_longer_turn_is_local_under_the_threshold(stack: Running, tiny_model_dir: Path) -> None:
    model, url = reference.load(tiny_model_dir), stack.url
    prompt, more = prompts([300, 60], 512, seed=12)
    complete(url, prompt, max_tokens=4)
    stack.admin("/admin/knobs", "PATCH", {"values": {"hybrid.threshold_tokens": 128}})
    record = path_when(url, [*prompt, *more], "colocated", reference.generate(model, [*prompt, *more], 8))
    assert record["cached_tokens"] in (288, 352)  # 352: another try of the same turn
    stack.admin("/admin/knobs/reset", "POST", {})


def test_eviction_is_published(stack: Running, tiny_model_dir: Path) -> None:
    """A pool much smaller than what passes through it: stale views and evictions change no text."""
    model, url = reference.load(tiny_model_dir), stack.url
    cases = [(p, reference.generate(model, p, 8)) for p in prompts([180, 350, 520, 700, 900, 1100, 1300], 512, 13)]
    paths = []
    for _ in range(3):
        for prompt, expected in cases:
            choice = complete(url, prompt, max_tokens=8)
            assert choice["token_ids"] == expected
            paths.append(choice["pdctl"]["path"])
    assert "pd" in paths[len(cases) :], "everything fitted: the pool is too large for this story"
