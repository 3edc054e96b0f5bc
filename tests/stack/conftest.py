"""One stack of each kind over the tiny model, for tests that compare what a client sees of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.harness import COLOCATED, PD, Running, running


@pytest.fixture(scope="package")
def pd_url(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[str]:
    yield from _url(tmp_path_factory.mktemp("pd"), PD, tiny_model_dir)


@pytest.fixture(scope="package")
def colocated_url(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[str]:
    yield from _url(tmp_path_factory.mktemp("colocated"), COLOCATED, tiny_model_dir)


def _url(folder: Path, profile: str, model: Path) -> Iterator[str]:
    stack: Running
    with running(folder, profile, model=model) as stack:
        yield stack.url


@pytest.fixture(params=["pd", "colocated"])
def url(request: pytest.FixtureRequest) -> str:
    """Of a live stack, each kind in turn."""
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found
