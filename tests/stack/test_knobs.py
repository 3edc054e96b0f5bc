"""Knobs turned on a running stack: by hand, under load, across a router restart."""

import itertools
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.stack import reference
from tests.stack.harness import PD, Running, complete, eventually, running
from tests.stack.test_text import prompts

# Every knob.
TURNS: list[dict[str, float | str]] = [
    {"transfer.chunk_tokens": 16, "transfer.max_inflight": 1},
    {"prefill.token_budget": 64, "prefill.chunk_tokens": 64},
    {"decode.max_running": 1, "decode.queue_high": 3},
    {"decode.kv_low": 0.06, "decode.kv_high": 0.1},
    {"hybrid.threshold_tokens": 200, "decode.prefill_tokens": 16},
    {"prefill.max_seqs": 1, "prefill.queue_high": 1},
    {"hybrid.threshold_tokens": "auto", "decode.prefill_tokens": "auto"},
    {"decode.kv_low": 0.8, "decode.kv_high": 0.92, "transfer.chunk_tokens": 48},
    {"prefill.chunk_tokens": 16, "decode.max_running": 3, "decode.idle_swap_s": 1},
    {"hybrid.threshold_tokens": 0, "router.queue_high": 60, "decode.queue_low": 1},
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("stack"), PD, model=tiny_model_dir) as stack:
        yield stack


def test_commands(stack: Running) -> None:
    first = json.loads(stack.cli("get", "--json").stdout)
    assert first["rev"] == 1
    assert first["knobs"]["transfer.chunk_tokens"]["now"] == 64
    assert stack.cli("set", "router.queue_high=80", "--reason", "test").returncode == 0
    refused = stack.cli("set", "router.queue_high=0")
    assert refused.returncode == 7
    assert "OUT_OF_RANGE" in refused.stderr
    assert stack.cli("set", "router.queue_high=90", "--if-rev", "1").returncode == 7
    assert "router.queue_high 50 -> 80" in stack.cli("history").stdout
    assert stack.cli("set", "router.queue_high=81", "--save").returncode == 0
    assert "queue_high = 81" in Path(stack.status()["profile_file"]).read_text()
    assert "81 -> 80" in stack.cli("undo").stdout
    assert "80 -> 50" in stack.cli("reset", "router.queue_high").stdout
    assert stack.cli("get", "router.queue_hihg").returncode == 2


def test_a_router_restart_replays(stack: Running) -> None:
    assert stack.cli("set", "decode.queue_high=20").returncode == 0
    rev = json.loads(stack.cli("get", "--json").stdout)["rev"]
    assert stack.cli("restart", "router").returncode == 0
    assert stack.cli("wait", stack.name, "--for", "ready").returncode == 0
    after = json.loads(stack.cli("get", "--json").stdout)
    assert (after["rev"], after["knobs"]["decode.queue_high"]["now"]) == (rev, 20)
    state = stack.admin("/admin/state")
    assert {worker["load"]["rev"] for worker in state["workers"]} == {rev}


def change_and_ask(stack: Running, folder: Path, seconds: float) -> tuple[int, int]:
    """Requests answered and changes made within the time; every text is the one expected."""
    model = reference.load(folder)
    lengths = [5, 33, 64, 130, 257, 300, 513, 700]
    expected = [(p, reference.generate(model, p, 24)) for p in prompts(lengths, 512, seed=3)]
    url, until = stack.url, time.monotonic() + seconds
    answered = itertools.count()

    def ask(number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < until:
            prompt, tokens = rng.choice(expected)
            assert complete(url, prompt, max_tokens=24)["token_ids"] == tokens, f"{len(prompt)} tokens"
            next(answered)

    knobs = json.loads(stack.cli("get", "--json").stdout)["knobs"]
    assert set(knobs) == {knob for turn in TURNS for knob in turn}, "a knob that nobody turns here"
    changes = 0
    with ThreadPoolExecutor(6) as clients:
        asking = [clients.submit(ask, number) for number in range(6)]
        start = time.monotonic()
        for second, turn in enumerate(itertools.cycle(TURNS), 1):  # one change a second is the story
            time.sleep(max(0.0, start + second - time.monotonic()))
            if time.monotonic() >= until:
                break
            done = stack.admin("/admin/knobs", "PATCH", {"values": turn}, url)
            assert done["pending"] == []
            changes += 1
        for each in asking:
            each.result()
    stack.cli("reset")
    return next(answered), changes


def check_nothing_left(stack: Running) -> None:
    def is_clean() -> bool:
        loads = [worker["load"] for worker in stack.admin("/admin/state")["workers"]]
        return all(not load["blocks_used"] and not load["blocks_granted"] and not load["integrity"] for load in loads)

    eventually(is_clean, 15, "all blocks free and counts that agree")


@pytest.mark.timeout(180)
def test_changes_under_load(stack: Running, tiny_model_dir: Path) -> None:
    answered, changes = change_and_ask(stack, tiny_model_dir, 15)
    assert changes >= len(TURNS)
    assert answered > 20
    check_nothing_left(stack)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_minute_of_changes(stack: Running, tiny_model_dir: Path) -> None:
    answered, changes = change_and_ask(stack, tiny_model_dir, 65)
    assert changes >= 60
    assert answered > 100
    check_nothing_left(stack)
