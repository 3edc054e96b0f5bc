"""PDCTL_FAULTS: what it says, and that what it does is counted."""

import pytest

from server.errors import ConfigError
from server.transfer.faults import FaultyTransport, with_faults
from server.transfer.local import LocalHub, LocalTransport
from server.transfer.ring import LandingRing


def make() -> tuple[LocalTransport, LandingRing]:
    ring = LandingRing(1024, 64, 2, 1)
    return LocalTransport(LocalHub(), "D", ring=ring), ring


def test_nothing_asked_nothing_wrapped() -> None:
    transport, ring = make()
    assert with_faults(transport, ring, "") is transport
    assert with_faults(transport, ring, "seed=7, engine.slow=2") is transport
    assert with_faults(transport, None, "transfer.lose=0.5") is transport


@pytest.mark.parametrize(
    "text", ["transfer.lose=2", "transfer.hold=0.1", "transfer.loose=0.1", "seed=x", "transfer.lose"]
)
def test_wrong_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="PDCTL_FAULTS"):
        with_faults(*make(), text)


def test_wrapped_counts_and_is_repeatable() -> None:
    from server.messages import ChunkTag
    from server.transfer.base import Arrived
    from tests.transfer.world import seq

    def run() -> list[str]:
        faulty = with_faults(*make(), "transfer.lose=0.05,transfer.corrupt=0.01,seed=7")
        assert isinstance(faulty, FaultyTransport)
        event = Arrived("P", ChunkTag(seq(1), 1, 0, 0, 1, 64, 0))
        drawn = [faulty._decide(event).value for _ in range(2000)]
        assert set(faulty.counters) >= {"fault_lose", "fault_corrupt", "refused"}
        return drawn

    first = run()
    assert first == run()
    assert 60 < first.count("lose") < 140
    assert 5 < first.count("corrupt") < 40
