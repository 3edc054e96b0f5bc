"""One stack of each kind over the tiny model, for tests that compare what a client sees of them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.harness import COLOCATED, PD, Running, running


@pytest.fixture(scope="package")
def pd_stack(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("pd"), PD, model=tiny_model_dir) as stack:
        yield stack


@pytest.fixture(scope="package")
def colocated_stack(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("colocated"), COLOCATED, model=tiny_model_dir) as stack:
        yield stack


@pytest.fixture(scope="package")
def pd_url(pd_stack: Running) -> str:
    return pd_stack.url


@pytest.fixture(scope="package")
def colocated_url(colocated_stack: Running) -> str:
    return colocated_stack.url


@pytest.fixture(params=["pd", "colocated"])
def url(request: pytest.FixtureRequest) -> str:
    """Of a live stack, each kind in turn; PDCTL_TEST_URL names one that runs already."""
    found: str = os.environ.get("PDCTL_TEST_URL") or request.getfixturevalue(f"{request.param}_url")
    return found
