"""A stage of each kind; whatever a story did, nothing of it may be left."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.messages import Abort
from tests.worker.stage import DecodeStage, PrefillStage


@pytest.fixture
def p(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefillStage]:
    stage = PrefillStage(tmp_path, monkeypatch)
    yield stage
    for entry in stage.worker.ledger:
        stage.tell(stage.router, Abort(entry.id))
    stage.step()
    stage.all_sent()
    assert stage.num_held == 0
    assert stage.sender.num_open == 0


@pytest.fixture
def d(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DecodeStage]:
    stage = DecodeStage(tmp_path, monkeypatch)
    yield stage
    for entry in stage.worker.ledger:
        stage.tell(stage.router, Abort(entry.id))
    stage.step()
    stage.step()
    assert stage.num_held == 0
    assert not stage.receiver.is_busy
    stage.ring.check_integrity()
