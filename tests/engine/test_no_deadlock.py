"""No mix of sizes, arrivals, aborts and delays may stand still; and the simulation sees it when a policy does."""

import pytest

from server.engine.admission import Admission
from server.sequence import Sequence
from tests.engine.cluster import Cluster, Policy, Stuck

SEEDS = range(200)


@pytest.mark.parametrize("first", range(0, len(SEEDS), 20))
def test_every_mix_comes_to_its_end(first: int) -> None:
    num_cut = 0
    for seed in SEEDS[first : first + 20]:
        cluster = Cluster(seed)
        try:
            cluster.run()
        except Exception as error:
            error.add_note(f"seed {seed}, at {cluster.now:.3f} s")
            raise
        assert cluster.num_tokens
        num_cut += cluster.num_cut
    assert num_cut


class RunsAhead(Policy):
    run_ahead = True
    cuts = False


class HoldsTheLine(Admission):
    """Admits by arrival, and waits for the grant of whoever is first."""

    def candidates(self) -> list[Sequence]:
        waiting = self._roster.waiting
        without = next((n for n, seq in enumerate(waiting) if seq.needs_grant and not seq.generation), len(waiting))
        return waiting[:without]


class GrantsOnArrival(Policy):
    grant_on_arrival = True
    cuts = False
    admission = HoldsTheLine


@pytest.mark.parametrize("policy", [RunsAhead, GrantsOnArrival])
def test_the_simulation_sees_a_policy_that_deadlocks(policy: type[Policy]) -> None:
    assert any(stands_still(seed, policy) for seed in SEEDS)


def stands_still(seed: int, policy: type[Policy]) -> bool:
    try:
        Cluster(seed, policy).run()
    except Stuck:
        return True
    return False
