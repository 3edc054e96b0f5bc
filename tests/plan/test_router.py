"""The simulated router decides as the real one: its Chooser, and what the dispatcher adds, over the same workers."""

import itertools
import time
from dataclasses import dataclass, field
from typing import cast

import pytest

from pdctl.plan.loads import Arrival, Lengths, closed
from pdctl.plan.router import NO_CARD, NOBODY, Router, Seen
from pdctl.plan.sim import Cluster, Layout, Sizes
from pdctl.plan.stages import Stages, StepModel
from server.config import Config
from server.engine.block_pool import prefix_digests
from server.messages import NAME_BYTES, Load
from server.router.choice import Rates
from server.router.dispatch import Dispatcher
from server.router.errors import ApiError
from server.router.worker import Inbox
from server.router.workers import Workers
from server.sequence import SeqId
from server.wire import Channel

BLOCK = 16
PROMPT = list(range(100, 200))
BOTH = StepModel(base_s=0.002, floor_s=0.003, prompt_token_s=5e-5, decode_seq_s=1e-4, context_token_s=1e-8)
STAGES = Stages(BOTH, BOTH, BOTH, kv_token_bytes=131_072, link_bytes_s=20e9, link_latency_s=1e-4)


@dataclass(frozen=True)
class State:
    """Of one worker. `rested_s`: since a prompt last crossed from it."""

    reading: int = 0  # prompts of 1,000 tokens
    open: int = 0
    cached: int = 0  # tokens of PROMPT
    over_high: bool = False
    free: int = 1000  # blocks
    rested_s: float = 0.0
    is_tight: bool = False


@dataclass(frozen=True)
class Case:
    """`goes`: to whom, as names; `states` of workers that are not as new."""

    goes: str
    prefill: int = 2
    decode: int = 2
    colocated: int = 0
    threshold: int = 256
    num_prompt: int = 100
    states: dict[str, State] = field(default_factory=dict)


RESTED = State(rested_s=60.0)
TIGHT = State(open=1, is_tight=True)
CASES = {
    "a short prompt stays": Case("decode-1", states={"decode-0": State(open=3)}),
    "with a threshold of 0 it crosses": Case("prefill-1>decode-0", threshold=0, states={"prefill-0": State(reading=1)}),
    "a long one crosses, to the idlest": Case(
        "prefill-0>decode-1", threshold=50, states={"decode-0": State(open=1), "prefill-1": State(reading=1)}
    ),
    "the holder reads what is left": Case("decode-1", threshold=0, states={"decode-1": State(cached=96)}),
    "not if it is full": Case("prefill-0>decode-0", threshold=0, states={"decode-1": State(cached=96, over_high=True)}),
    "cached tokens make it short": Case("decode-1", threshold=64, states={"decode-1": State(cached=48)}),
    "prefill by what it has cached": Case("prefill-1>decode-0", threshold=1, states={"prefill-1": State(cached=64)}),
    "backlog: relief": Case("decode-0", prefill=1, threshold=50, states={"prefill-0": State(reading=8)}),
    "backlog, and no room": Case(
        "prefill-0>decode-0",
        prefill=1,
        decode=1,
        threshold=50,
        states={"prefill-0": State(reading=8), "decode-0": State(free=3)},
    ),
    "backlog, and every prompt crosses": Case(
        "prefill-0>decode-0", prefill=1, threshold=0, states={"prefill-0": State(reading=8)}
    ),
    "a rested prefill worker takes short ones": Case(
        "prefill-1", states={"decode-0": State(open=1), "decode-1": State(open=1), "prefill-1": RESTED}
    ),
    "it takes none where all cross": Case(
        "prefill-1>decode-0", threshold=0, states={"prefill-0": State(reading=1), "prefill-1": RESTED}
    ),
    "it is no relief for a long one": Case(
        "prefill-0>decode-0", prefill=1, decode=1, threshold=50, states={"prefill-0": RESTED, "decode-0": State(open=2)}
    ),
    "decode cannot keep its pace: short ones cross": Case(
        "prefill-0>decode-0", states={f"decode-{i}": TIGHT for i in (0, 1)}
    ),
    "also where prefill rests": Case(
        "prefill-0>decode-0", prefill=1, decode=1, states={"prefill-0": RESTED, "decode-0": TIGHT}
    ),
    "not where decode has no streams": Case("decode-1", states={"decode-0": TIGHT, "decode-1": State(is_tight=True)}),
    "it reads on the tight one: it crosses": Case(
        "prefill-0>decode-1",
        states={"decode-0": State(open=9, cached=48, is_tight=True), "prefill-1": State(reading=1)},
    ),
    "nor where prefill would read much more": Case(
        "decode-0", decode=1, threshold=64, states={"decode-0": State(open=1, cached=48, is_tight=True)}
    ),
    "nor where prefill is backlogged": Case(
        "decode-0", prefill=1, decode=1, states={"prefill-0": State(reading=8), "decode-0": TIGHT}
    ),
    "one pool": Case("colocated-1", prefill=0, decode=0, colocated=2, states={"colocated-0": State(reading=1)}),
}


def paint(worker: Seen, state: State, now: float) -> Seen:
    """Makes it look so."""
    names = prefix_digests(PROMPT[: state.cached], "", BLOCK)
    worker.cached = {digest[:NAME_BYTES] for digest in names}
    worker.load = Load(0, 0, 0, 0, 0, 1000, 1000 - state.free, 0, over_high=state.over_high, is_tight=state.is_tight)
    for _ in range(state.reading):
        worker.begin_reading(1000, 0.0)
    worker.open = {SeqId("test", n, 0): Inbox() for n in range(state.open)}
    worker.crossed_at = now - state.rested_s
    return worker


def pool(case: Case, role: str, size: int, now: float) -> list[Seen]:
    names = [f"{role}-{i}" for i in range(size)]
    return [paint(Seen(name, role), case.states.get(name, State()), now) for name in names]


def simulated(case: Case, has_prefixes: bool) -> str:
    role = "colocated" if case.colocated else "decode"
    readers, writers = (
        pool(case, "prefill", case.prefill, 100.0),
        pool(case, role, case.decode or case.colocated, 100.0),
    )
    router = Router(readers, writers, threshold=case.threshold, block_size=BLOCK, has_prefixes=has_prefixes)
    return router.choose(PROMPT[: case.num_prompt], 100.0).route.name


def dispatcher(case: Case, queue_high: int = 50) -> Dispatcher:
    pools = {"prefill": case.prefill, "decode": case.decode, "colocated": case.colocated}
    config = Config.model_validate(
        {
            **{role: {"workers": size} for role, size in pools.items() if size},
            "hybrid": {"threshold_tokens": case.threshold},
            "router": {"queue_high": queue_high},
        }
    )
    workers, now = Workers({}, {}, me=NOBODY, secret=b"", card=NO_CARD), time.monotonic()
    for role, size in pools.items():
        for worker in pool(case, role, size, now):
            worker._channel, worker.instance = cast("Channel", object()), "1"  # it is connected
            workers.all[worker.name] = worker
    found = Dispatcher(workers, config, 4096)
    for route in found.routes:
        found.prove(route, route.instances)
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_as_the_real_one(case: Case) -> None:
    assert dispatcher(case).choose(PROMPT[: case.num_prompt]).route.name == case.goes
    assert simulated(case, has_prefixes=True) == case.goes
    if not any(state.cached for state in case.states.values()):
        assert simulated(case, has_prefixes=False) == case.goes, "the best of each pool make the best pair"


def test_a_colocated_pool_takes_short_ones_whatever_decode_does() -> None:
    """No layout of the simulator's has such a pool beside the others."""
    case = Case("colocated-0", prefill=1, decode=1, colocated=1, states={"decode-0": TIGHT})
    assert dispatcher(case).choose(PROMPT).route.name == case.goes


def test_refuses_as_the_real_one() -> None:
    case = Case("")
    real, router = dispatcher(case, queue_high=3), Router([], [], threshold=0, block_size=BLOCK, queue_high=3)
    for _ in range(3):
        real.admit(1)
        assert router.admit()
    with pytest.raises(ApiError, match="already wait"):
        real.admit(1)
    assert not router.admit()
    assert (router.num_refused, router.most_waiting) == (1, 3)


def run(layout: Layout, lengths: Lengths, sizes: Sizes, *, count: int = 24, concurrency: int = 2) -> Cluster:
    cluster = Cluster(layout, STAGES, sizes)
    cluster.run(closed(count, lengths), concurrency=concurrency)
    for worker in cluster._workers.values():
        worker.scheduler.check_integrity()
        assert not worker.scheduler.has_work
    assert all(not seen.open and not seen.prompt_tokens for seen in cluster._seen.values())
    return cluster


@pytest.mark.parametrize("layout", [Layout(colocated=2), Layout(prefill=1, decode=2)], ids=str)
@pytest.mark.parametrize("lengths", [Lengths(800, 20, shared=0.75), Lengths(300, 40, turns=3)], ids=["shared", "turns"])
def test_what_is_cached_is_not_read_again(layout: Layout, lengths: Lengths) -> None:
    """On every role: later requests of a load that has something in common come sooner than without a cache."""
    cached, plain = (run(layout, lengths, Sizes(prefix_cache=on)) for on in (True, False))
    hits = {name: worker.scheduler.counters().prefix_hit_tokens for name, worker in cached._workers.items()}
    assert all(hits.values()), hits
    assert sum(cached.tally.ttft) < 0.8 * sum(plain.tally.ttft)
    assert len(cached.tally.ttft) == len(plain.tally.ttft) == 24 * lengths.turns


def test_a_conversation_goes_on_where_its_blocks_are() -> None:
    """1. The first turn crosses. 2. A few words more are read where its blocks are: nothing crosses. 3. A long addition
    crosses again, and only what decode does not have is sent."""
    cluster = Cluster(Layout(prefill=1, decode=2), STAGES, Sizes(prefix_cache=True))
    cluster.run([Arrival(0.0, 1024, 32, then=(8, 512))], concurrency=1)
    first, second, third = cluster.tally.transfer
    assert (first > third > 0, second) == (True, 0)
    assert third - STAGES.link_latency_s < 0.6 * (first - STAGES.link_latency_s)


def test_who_is_refused_has_missed() -> None:
    arrivals = [Arrival(0.0, 500, 10) for _ in range(10)]
    cluster = Cluster(Layout(prefill=1, decode=1), STAGES, Sizes(queue_high=4))
    seen = cluster.run(arrivals)
    assert (seen.num_requests, seen.num_refused, seen.most_waiting) == (4, 6, 4)
    assert seen.attained == pytest.approx(0.4)


def test_a_load_of_short_prompts_uses_both_devices() -> None:
    """Rested, the prefill worker decodes; with `rest_s` 0 it never does."""
    layout, lengths = Layout(prefill=1, decode=1, threshold=500), Lengths(64, 40)
    shared, alone = (run(layout, lengths, Sizes(rest_s=s), count=40, concurrency=8) for s in (5.0, 0.0))
    assert alone.utilisation()["prefill"] == 0
    assert shared.utilisation()["prefill"] > 0.5
    assert shared.now < 0.95 * alone.now


def test_a_long_prompt_ends_the_rest() -> None:
    cluster = Cluster(Layout(prefill=1, decode=1, threshold=500), STAGES)
    sizes = itertools.chain([1000], [64] * 20)
    cluster.run([Arrival(0.001 * n, size, 8) for n, size in enumerate(sizes)])
    assert cluster._workers["prefill-0"].scheduler.counters().prefix_hit_tokens == 0
    assert cluster.router.readers[0].crossed_at == 0.0
    assert cluster.utilisation()["prefill"] * cluster.now == pytest.approx(0.002 + 1000 * 5e-5), "one prompt, no more"


def test_a_new_stack_finds_out_that_decode_can_relieve_prefill() -> None:
    """Nothing has been read by the decode worker yet: a queue that has lasted for a second is enough to try it."""
    layout, rates = Layout(prefill=1, decode=1, threshold=256), Rates()
    cluster = Cluster(layout, STAGES, rates=rates)
    cluster.run(closed(40, Lengths(2000, 10)), concurrency=4)
    assert rates.local.count > 0
    assert rates.prefill.count > rates.local.count, "relief, no more"


def test_a_long_prompt_does_not_stall_what_a_prefill_worker_writes() -> None:
    """Short prompts are done where prefill rests, and then one of 2,000 tokens is to cross: 0.1 s of reading."""
    sizes = Sizes(tpot_objective_s=0.02, rest_s=0.01)
    lengths = Lengths(451, 100, mix=(64, 64, 64, 64, 2000))
    mix = run(Layout(prefill=1, decode=1, threshold=256), lengths, sizes, concurrency=8)
    assert mix.tally.gaps.quantile(1.0) < 0.03


def test_a_device_that_cannot_keep_the_objective_reads_no_prompt_beside_its_streams() -> None:
    """A decode step takes at least 5 ms. With an objective of 4 short prompts cross too, as if the threshold were 0;
    with one of 20 they stay on decode, or on prefill while it rests."""
    lengths = Lengths(64, 100)
    tight, roomy = (
        run(Layout(prefill=1, decode=1, threshold=256), lengths, Sizes(tpot_objective_s=s), count=60, concurrency=8)
        for s in (0.004, 0.02)
    )
    assert tight.utilisation()["prefill"] < 0.2 < 0.8 < roomy.utilisation()["prefill"]


def test_decode_takes_of_prompts_what_its_objective_leaves() -> None:
    def tokens(objective_s: float) -> int | None:
        sizes = Sizes(local_prefill_tokens=32, tpot_objective_s=objective_s, rest_s=0.0)
        cluster = run(Layout(prefill=1, decode=1, threshold=500), Lengths(400, 40), sizes, concurrency=4)
        return cluster._workers["decode-0"].scheduler.limits.local_prefill_tokens

    assert tokens(0.0) == 32
    few, many = tokens(0.01), tokens(0.02)
    assert few is not None
    assert many is not None
    assert 64 < few < many
