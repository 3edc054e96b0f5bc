"""All transports, by name and as two running ends."""

from collections.abc import Iterator

import pytest

from tests.transfer.world import World


@pytest.fixture(params=["local", "tcp", "nixl", "auto"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def world(kind: str) -> Iterator[World]:
    world = World(kind)
    yield world
    world.close()
