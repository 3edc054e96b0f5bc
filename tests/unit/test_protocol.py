"""docs/protocol.md keeps what it promises: a row for every message of the closed set, a test for every row."""

import re
import types
from pathlib import Path
from typing import get_args

import pytest

from server.decode import DecodeWorker
from server.messages import AnyMessage, ChunkTag, Hello
from server.prefill import PrefillWorker
from server.worker import Worker

ROOT = Path(__file__).parents[2]
ROLES = ("Any, before the handshake is over", "Prefill worker", "Decode worker", "Router")
FOLDERS = {"Prefill worker": "tests/worker/test_prefill.py", "Decode worker": "tests/worker/test_decode.py"}


def table(role: str) -> list[list[str]]:
    """Rows of cells, without the header."""
    text = (ROOT / "docs/protocol.md").read_text().partition("## Messages x states\n")[2].partition("\n## ")[0]
    section = text.partition(f"### {role}\n")[2].partition("\n### ")[0]
    rows = [line.strip().strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    assert rows[0][-1].strip() == "proved by"
    return [[cell.strip() for cell in row] for row in rows[2:]]


def messages(role: str) -> set[str]:
    return {word for row in table(role) for word in re.findall(r"[A-Z][a-zA-Z]+", row[0])}


@pytest.mark.parametrize("role", ROLES)
def test_every_row_names_tests_that_exist(role: str) -> None:
    width = {len(row) for row in table(role)}
    assert len(width) == 1, "rows of unequal width"
    files = [ROOT / FOLDERS[role]] if role in FOLDERS else [*(ROOT / "tests").rglob("test_*.py")]
    there = set(re.findall(r"^(?:async )?def (test_\w+)", "\n".join(file.read_text() for file in files), re.MULTILINE))
    for row in table(role):
        named = [name.strip() for name in row[-1].split(",")]
        assert named != [""], f"{role}: no test proves {row[0]}"
        assert set(named) <= there, f"{role}, {row[0]}: no such test: {set(named) - there}"


def test_every_message_has_a_row() -> None:
    assert isinstance(AnyMessage, types.UnionType)
    everything = {kind.__name__ for kind in get_args(AnyMessage)} | {ChunkTag.__name__}
    assert everything - set().union(*map(messages, ROLES)) == set()
    assert messages(ROLES[0]) >= {Hello.__name__}


@pytest.mark.parametrize(("role", "worker"), [("Prefill worker", PrefillWorker), ("Decode worker", DecodeWorker)])
def test_every_message_that_a_worker_handles_is_in_its_table(role: str, worker: type[Worker]) -> None:  # type: ignore[type-arg]
    handled = {kind.__name__ for kind in worker.handlers(object.__new__(worker))}
    assert handled <= messages(role)
