"""What a prefill worker does with each message in each state: the cells of its table in docs/protocol.md."""

from typing import Any

import msgspec
import pytest

from server.engine.engine import StepResult
from server.engine.model_runner import Launched
from server.knobs import turned
from server.messages import (
    Abort,
    AbortAck,
    Decode,
    Done,
    Grant,
    GrantRequest,
    Heartbeat,
    Load,
    Pause,
    Peers,
    Prefill,
    Renew,
    Resume,
    SetKnobs,
    SlotCredit,
    Tokens,
)
from server.pool_worker import PoolWorker
from server.prefill import PrefillWorker
from server.sequence import Batch, SamplingParams, Sequence, Slice
from tests.transfer.world import seq
from tests.worker.stage import AHEAD_S, LEASE_S, PARAMS, PROMPT, TOKEN, Peer, PrefillStage

ID = seq(1)
KNOWN = ("waiting", "granted", "running", "pushing", "ahead", "cut")
each_state = pytest.mark.parametrize("state", PrefillStage.STATES)


def test_a_whole_life(p: PrefillStage) -> None:
    """1. Prefill: a grant is asked for, nothing is held. 2. Grant: a block a step, pushed after each. 3. The first
    token goes to both. 4. Received: blocks are free once the last post has ended."""
    p.prefill(ID)
    assert p.decode.take(GrantRequest) == [GrantRequest(ID, len(PROMPT))]
    p.step()
    assert (p.num_held, p.posted()) == (0, [])
    p.grant(ID)
    for num_pushed in (1, 2, 3):
        p.step()
        assert p.posted() == list(range(num_pushed))
    (tokens,) = p.router.take(Tokens)
    assert [item.token for item in tokens.items] == [TOKEN]
    assert [item.token for item in p.decode.take(Tokens)[0].items] == [TOKEN]
    assert [done.reason for done in p.router.take(Done)] == ["handed_over"]
    p.tell(p.decode, Done(ID, "received"))
    assert p.num_held == 3
    p.all_sent()
    assert p.num_held == 0


@each_state
def test_prefill_message(p: PrefillStage, state: str) -> None:
    """Unknown: it joins the line. Let go: the router hears that it is not here. Else said twice, which changes
    nothing."""
    p.bring(ID, state)
    p.prefill(ID)
    assert len(p.decode.take(GrantRequest)) == (state == "unknown")
    assert [done.reason for done in p.router.take(Done)] == (["error"] if state == "finished" else [])
    assert p.state(ID) == ("waiting" if state == "unknown" else state)


@each_state
def test_prefill_for_another_decode_worker(p: PrefillStage, state: str) -> None:
    """1. The router names another decode worker. 2. That one is asked, the first is told. 3. Its grant is enough: what
    was computed is sent to it, what was not is computed, and token 0 goes there. 4. No token of the prompt was read
    twice."""
    p.bring(ID, state)
    steps = p.engine.num_steps
    p.prefill(ID, "decode-1")
    if state in ("finished", "ahead"):  # ahead: decode does not know what the client has, and hears it from the router
        assert [done.reason for done in p.router.take(Done)] == ["error"]
        return
    assert p.other.take(GrantRequest) == [GrantRequest(ID, len(PROMPT))]
    assert len(p.decode.take(Abort)) == (state in KNOWN)
    p.grant(ID, p.other, generation=1, resident=1)
    for _ in range(4):
        p.step()
    num_outputs = p.NUM_AHEAD if state == "cut" else 1
    assert [item.token for item in p.other.take(Tokens)[0].items] == [TOKEN] * num_outputs
    if state == "cut":
        p.grant(ID, p.other, generation=2, resident=1)
    assert p.posted("decode-1-instance") == [1, 2]
    assert p.engine.num_steps - steps == {"running": 2, "pushing": 0, "cut": 0}.get(state, 3)
    assert [done.reason for done in p.router.take(Done)] == ["handed_over"]
    p.tell(p.other, Done(ID, "received"))
    p.all_sent()
    assert p.state(ID) == "finished"
    assert p.num_held == 0


@each_state
def test_grant(p: PrefillStage, state: str) -> None:
    """The one that was asked for counts, and said again it changes nothing. Ahead: it stops, and tells its outputs; the
    next grant is for them."""
    p.bring(ID, state)
    for generation in (1, 1, 2):
        p.grant(ID, generation=generation)
        if state == "ahead":
            assert p.state(ID) == ("cut" if generation == 1 else "pushing")
    assert len(p.decode.take(Abort)) == 3 * (state not in KNOWN)
    assert [len(told.items) for told in p.decode.take(Tokens)] == ([p.NUM_AHEAD] if state == "ahead" else [])
    assert p.state(ID) == {"waiting": "granted", "ahead": "pushing", "cut": "pushing"}.get(state, state)


@each_state
def test_grant_of_another_worker(p: PrefillStage, state: str) -> None:
    """It is told that nobody wants it; the sequence stays where it was."""
    p.bring(ID, state)
    p.grant(ID, p.other, generation=9)
    assert len(p.other.take(Abort)) == 1
    assert p.state(ID) == state


@each_state
def test_grant_with_missing(p: PrefillStage, state: str) -> None:
    """What was sent is sent again, nothing else."""
    p.bring(ID, state)
    before = len(p.posted())
    p.tell(p.decode, Grant(ID, 1, 0, LEASE_S, missing=((0, 2),)))
    assert p.posted()[before:] == {"running": [0], "pushing": [0, 1]}.get(state, [])
    assert len(p.decode.take(Abort)) == (state not in KNOWN)
    assert p.state(ID) == state


@each_state
def test_slot_credit(p: PrefillStage, state: str) -> None:
    """Of no sequence: a slot more to write, once, however often it is said."""
    p.bring(ID, state)
    p.tell(p.decode, SlotCredit((70, 71)), SlotCredit((71,)))
    credits = list(p.sender._peers["decode-0-instance"].credits)
    assert [slot for slot in credits if slot >= 70] == [70, 71]
    assert p.state(ID) == state


@each_state
def test_done_received(p: PrefillStage, state: str) -> None:
    """PUSHING: over, blocks free. Before token 0 (all of it was resident, or its last chunk was quick): remembered."""
    p.bring(ID, state)
    p.tell(p.decode, Done(ID, "received"))
    p.all_sent()
    assert p.state(ID) == ("finished" if state == "pushing" else state)
    if state == "running":
        p.step()
        p.step()
        p.all_sent()
        assert p.state(ID) == "finished"
        assert p.num_held == 0
    assert not p.decode.take(Abort)


@each_state
def test_abort_of_the_router(p: PrefillStage, state: str) -> None:
    """Always answered. Decode is told if it was asked; blocks are free once no post reads them; the id never
    returns."""
    p.bring(ID, state)
    p.tell(p.router, Abort(ID))
    assert p.router.take(AbortAck) == [AbortAck(ID)]
    assert len(p.decode.take(Abort)) == (state in KNOWN)
    assert p.state(ID) == "finished"
    p.all_sent()
    assert p.num_held == 0
    p.prefill(ID)
    assert not p.decode.take(GrantRequest)


@each_state
def test_abort_of_decode(p: PrefillStage, state: str) -> None:
    """It goes on without us: blocks free, nobody else is told."""
    p.bring(ID, state)
    p.tell(p.decode, Abort(ID))
    p.all_sent()
    assert p.state(ID) == "finished"
    assert p.num_held == 0
    assert not p.router.take(Done)
    assert len(p.decode.take(AbortAck)) == (state not in KNOWN)


@each_state
def test_renew_is_an_answer(p: PrefillStage, state: str) -> None:
    """1. Every third of the lease the grant is renewed. 2. While decode answers, it goes on. 3. A lease after the last
    answer the sequence ends here, and the router hears of it: decode is to go on alone, and is not aborted."""
    p.bring(ID, state)
    if state not in KNOWN or state in ("waiting", "ahead", "cut"):
        p.tell(p.decode, Renew((ID,)))
        p.wait(3 * LEASE_S)
        assert p.state(ID) == ("ahead" if state == "cut" else state)
        assert not p.decode.take(Renew)
        return
    for _ in range(6):
        p.wait(LEASE_S / 2)
        assert p.decode.take(Renew) == [Renew((ID,))]
        p.tell(p.decode, Renew((ID,)))
    assert p.state(ID) == state
    p.wait(LEASE_S - 0.1)
    assert p.state(ID) == state
    p.wait(0.2)
    p.all_sent()
    assert p.state(ID) == "finished"
    assert p.worker.counters["lease_expired"] == 1
    assert p.num_held == 0
    assert [done.reason for done in p.router.take(Done)] == ["error"]
    assert not p.decode.take(Abort)


@each_state
def test_decode_connection_lost(p: PrefillStage, state: str) -> None:
    """1. Decode is lost: what is computed stays, and computing goes on. Ahead: the router is told at once. 2. Nobody
    takes it over: after the hold it ends."""
    p.bring(ID, state)
    p.lose(p.decode)
    assert [done.reason for done in p.router.take(Done)] == (["error"] if state == "ahead" else [])
    p.step()
    p.step()
    assert p.num_held == (3 if state in ("running", "pushing", "cut") else 0)
    p.wait(LEASE_S + 0.1)
    p.all_sent()
    assert p.num_held == 0
    assert [done.reason for done in p.router.take(Done)] == (["error"] if state in KNOWN and state != "ahead" else [])
    assert p.state(ID) == ("unknown" if state == "unknown" else "finished")


@pytest.mark.parametrize("state", KNOWN[:4])
def test_lost_decode_worker_is_replaced(p: PrefillStage, state: str) -> None:
    """As above, but the router names another one in time: nothing is read twice, and the first one's posts are waited
    for before blocks are free."""
    p.bring(ID, state)
    p.lose(p.decode)
    num_old, steps = len(p.posted()), p.engine.num_steps
    p.step()
    assert len(p.posted()) == num_old
    p.prefill(ID, "decode-1")
    p.grant(ID, p.other)
    for _ in range(4):
        p.step()
    assert p.posted("decode-1-instance") == [0, 1, 2]
    assert p.engine.num_steps - steps == {"running": 2, "pushing": 0}.get(state, 3)
    assert p.worker.counters["regranted"] == 1
    p.tell(p.other, Done(ID, "received"))
    assert p.num_held == 3
    p.all_sent()
    assert p.num_held == 0


def test_a_replacement_that_does_not_grant(p: PrefillStage) -> None:
    """Blocks that wait for a grant are what deadlocks are made of: the wait ends, the router has it done elsewhere."""
    p.bring(ID, "running")
    p.lose(p.decode)
    p.prefill(ID, "decode-1")
    p.wait(LEASE_S + 0.1)
    p.all_sent()
    assert [done.reason for done in p.router.take(Done)] == ["error"]
    assert not p.other.take(Abort)
    assert p.num_held == 0


def test_prefill_without_a_connection_to_decode(p: PrefillStage) -> None:
    p.prefill(ID, "decode-7")
    assert [(done.reason, done.message) for done in p.router.take(Done)] == [
        ("error", "prefill-0 has no connection to decode-7")
    ]


@each_state
def test_router_connection_lost(p: PrefillStage, state: str) -> None:
    """As its Abort."""
    p.bring(ID, state)
    p.lose(p.router)
    assert len(p.decode.take(Abort)) == (state in KNOWN)
    p.all_sent()
    assert p.num_held == 0
    assert p.state(ID) == ("unknown" if state == "unknown" else "finished")


@each_state
def test_knobs_peers_and_heartbeats(p: PrefillStage, state: str) -> None:
    """Of no sequence. Knobs are confirmed by a Load; the chunk size counts from the next push on."""
    p.bring(ID, state)
    p.tell(p.router, SetKnobs(5, {"transfer.chunk_tokens": 32, "prefill.chunk_tokens": 32}))
    assert [load.rev for load in p.router.take(Load)] == [5]
    assert p.sender.chunk_tokens == 32
    p.tell(p.router, Peers({}), Heartbeat(), AbortAck(ID), Pause(ID), Resume(ID))
    assert p.state(ID) == state
    assert p.worker.counters["unexpected"] == 0


@each_state
def test_what_is_not_for_prefill(p: PrefillStage, state: str) -> None:
    """Counted, and nothing else."""
    p.bring(ID, state)
    p.tell(p.router, Decode(ID, PROMPT, PARAMS), GrantRequest(ID, 1), Tokens(()), Load(0, 0, 0, 0, 0, 0, 0, 0))
    assert p.worker.counters["unexpected"] == 4
    assert p.state(ID) == state


def test_failed_engine_leaves_decode_to_go_on(p: PrefillStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router is told, and has decode do it alone: an Abort from here would take the sequence away from it."""
    p.bring(ID, "granted")

    def fail(batch: object) -> list[object]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(p.engine.runner, "launch", fail)
    p.step()
    assert [done.reason for done in p.router.take(Done)] == ["error"]
    assert not p.decode.take(Abort)
    assert p.num_held == 0


@each_state
def test_whole_sequence_here(p: PrefillStage, state: str) -> None:
    """`decode` empty: tokens to the router alone, no grant, nothing pushed. Of an id that is known: nothing."""
    p.bring(ID, state)
    p.tell(p.router, Prefill(ID, PROMPT, PARAMS))
    if state != "unknown":
        assert p.state(ID) == state
        return
    for _ in range(12):
        p.step()
    assert sum(len(tokens.items) for tokens in p.router.take(Tokens)) == PARAMS.max_tokens
    assert [done.reason for done in p.router.take(Done)] == ["length"]
    assert p.posted() == []


def told(peer: Peer) -> list[int]:
    """Indices of the outputs that it heard of."""
    return [item.index for tokens in peer.take(Tokens) for item in tokens.items]


def test_nobody_waits_for_a_full_decode_pool(p: PrefillStage) -> None:
    """1. No grant comes: after a while the prompt is read, and more tokens follow. 2. The grant: no step more, decode
    hears of all outputs. 3. It grants anew, for these too: their KV is pushed, all but the last one's, and the router
    hears at which output decode goes on."""
    p.prefill(ID)
    p.be_hybrid()
    p.wait(AHEAD_S - 0.01)
    p.step()
    assert p.num_held == 0
    p.wait(0.01)
    for _ in range(20):
        p.step()
        if p.worker.ledger.get(ID).seq.num_tokens == len(PROMPT) + 6:  # type: ignore[union-attr]
            break
    assert told(p.router) == list(range(6))
    assert not p.posted()
    p.grant(ID)
    p.step()
    assert (told(p.decode), p.posted(), told(p.router)) == ([0, 1, 2, 3, 4, 5], [], [])
    assert not p.router.take(Done)
    p.grant(ID, generation=2, resident=1)
    assert p.posted() == [1, 2]
    assert p.sender._pushes[ID].table == p.worker.ledger.get(ID).seq.block_table[:3]  # type: ignore[union-attr]
    (done,) = p.router.take(Done)
    assert (done.reason, done.stages["cut"]) == ("handed_over", 6)
    p.tell(p.decode, Done(ID, "received"))
    p.all_sent()
    assert p.state(ID) == "finished"
    assert (p.worker.counters["ran_ahead"], p.worker.counters["cuts"]) == (1, 1)


def test_nobody_runs_ahead_where_every_prompt_crosses(p: PrefillStage) -> None:
    p.prefill(ID)
    p.wait(60.0)
    p.step()
    assert p.state(ID) == "waiting"


def test_nobody_runs_ahead_of_those_who_are_granted(p: PrefillStage) -> None:
    """A prompt that has its grant waits or is read: it has the worker for itself."""
    p.be_hybrid()
    p.prefill(ID)
    p.prefill(seq(2))
    p.grant(seq(2))
    p.wait(1.0)
    assert (p.state(ID), p.state(seq(2))) == ("waiting", "granted")
    p.step()
    p.wait(1.0)
    assert (p.state(ID), p.state(seq(2))) == ("waiting", "running")
    p.step()
    p.step()
    p.wait(1.0)
    assert (p.state(ID), p.state(seq(2))) == ("ahead", "pushing")


def test_a_grant_while_it_reads_ahead(p: PrefillStage) -> None:
    """There is no output yet: from here on all is as if the grant had come in time."""
    p.prefill(ID)
    p.be_hybrid()
    p.wait(AHEAD_S)
    p.step()
    p.grant(ID)
    assert p.posted() == [0]
    p.step()
    p.step()
    assert p.posted() == [0, 1, 2]
    assert told(p.decode) == [0]
    (done,) = p.router.take(Done)
    assert done.reason == "handed_over"
    assert "cut" not in done.stages


def test_a_grant_within_a_step(p: PrefillStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's token still counts: it is the last one from here."""
    p.bring(ID, "ahead")
    launch = p.engine.runner.launch

    def granted_meanwhile(batch: Batch) -> Launched:
        p.grant(ID)
        return launch(batch)

    monkeypatch.setattr(p.engine.runner, "launch", granted_meanwhile)
    p.step()
    assert p.state(ID) == "cut"
    assert told(p.decode) == list(range(p.NUM_AHEAD + 1))


def test_not_now(p: PrefillStage) -> None:
    """1. There were no blocks for all outputs: after a while it goes on here. 2. The next grant finds it further on:
    decode is told what is new, and grants once more. 3. That one is for all of it."""
    p.bring(ID, "cut")
    p.be_hybrid()
    p.wait(AHEAD_S)
    p.step()
    assert p.state(ID) == "ahead"
    p.grant(ID, generation=2)
    assert told(p.decode) == [p.NUM_AHEAD]
    assert p.state(ID) == "cut"
    p.grant(ID, generation=3)
    assert p.state(ID) == "pushing"
    assert p.posted() == [0, 1, 2]


@pytest.mark.parametrize("state", ["ahead", "cut"])
def test_it_may_end_before_decode_has_room(p: PrefillStage, state: str) -> None:
    """The router has its end from here, and decode forgets it."""
    p.bring(ID, state)
    p.be_hybrid()
    p.wait(AHEAD_S)
    for _ in range(PARAMS.max_tokens):
        p.step()
    (done,) = p.router.take(Done)
    assert done.reason == "length"
    assert told(p.router) == list(range(p.NUM_AHEAD, PARAMS.max_tokens))
    assert len(p.decode.take(Abort)) == 1
    assert p.state(ID) == "finished"
    assert p.num_held == 0


def test_what_runs_ahead_leaves_room(p: PrefillStage) -> None:
    """Of 63 blocks each takes 7 and grows by 7: two have room in one half, the other is for those with grants."""
    p.be_hybrid()
    params = SamplingParams(max_tokens=112, temperature=0.0)
    ids = [seq(i) for i in range(1, 8)]
    for i, id in enumerate(ids):
        p.tell(p.router, Prefill(id, [i + 3] * 112, params, decode="decode-0"))
    for _ in range(8):
        p.wait(AHEAD_S)
        p.step()
    assert [p.state(id) for id in ids] == ["ahead"] * 2 + ["waiting"] * 5


def test_rest_of_a_sequence_here(p: PrefillStage) -> None:
    """Begun elsewhere: what the client knows is taken as it is. All of it known: only its end is told."""
    p.tell(p.router, Prefill(ID, PROMPT, PARAMS, output=[7, 9, 11]))
    p.tell(p.router, Prefill(seq(2), PROMPT, PARAMS, output=[7] * PARAMS.max_tokens))
    for _ in range(12):
        p.step()
    assert told(p.router) == list(range(3, PARAMS.max_tokens))
    assert [(done.id, done.reason) for done in p.router.take(Done)] == [(seq(2), "length"), (ID, "length")]
    assert p.num_held == 0


def test_its_own_streams_keep_to_the_objective(p: PrefillStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 10 ms and 0.5 ms a prompt token; slo.tpot_p95 is 40 ms. 1. A whole sequence is done here. 2. A long
    prompt that is to cross comes: beside the stream its steps stay within the objective. 3. Nothing streams any more:
    it is read in whole chunks."""
    launch, took = p.engine.runner.launch, []

    def slowly(batch: Batch) -> Launched:
        took.append(0.010 + 0.0005 * sum(piece.num_tokens for piece in batch.slices if piece.num_tokens > 1))
        p.clock.now += took[-1]
        return launch(batch)

    monkeypatch.setattr(p.engine.runner, "launch", slowly)
    p.engine.scheduler.limits.chunk_tokens = 256
    own, long = seq(2), seq(1)
    p.tell(p.router, Prefill(own, PROMPT, SamplingParams(max_tokens=6, temperature=0.0)))
    p.step()
    p.step()
    p.tell(p.router, Prefill(long, list(range(3, 903)), PARAMS, decode="decode-0"))
    p.grant(long)
    beside = []
    while p.state(own) == "ahead":
        p.step()
        beside.append(took[-1])
    assert max(beside) <= 0.040
    assert max(beside[1:]) == pytest.approx(0.036, abs=0.001)  # USED of it, once a step with a prompt was measured
    p.step()
    assert took[-1] == pytest.approx(0.010 + 256 * 0.0005)


def test_a_limit_of_none_turned_to_auto(p: PrefillStage) -> None:
    """1. decode.prefill_tokens = 0 leaves a prefill worker its least. 2. Where the profile itself says 0, auto begins
    with what it begins with elsewhere, not with nothing."""
    limits, boot = p.engine.scheduler.limits, p.worker.boot
    p.tell(p.router, SetKnobs(1, {"decode.prefill_tokens": 0}))
    assert limits.local_prefill_tokens == 32
    none = PrefillWorker(msgspec.structs.replace(boot, config=turned(boot.config, {"decode.prefill_tokens": 0})))
    none.engine, none.config = p.engine, boot.config
    PoolWorker.turn(none)
    assert limits.local_prefill_tokens == 32


def test_a_failed_step_says_nothing_of_its_cost(p: PrefillStage) -> None:
    """One that decodes would have told what that takes alone, and one with a prompt what a token takes beside it."""
    own = Sequence(seq(1), PROMPT, PARAMS)
    alone, mixed = Batch([Slice(own, 40, 1)]), Batch([Slice(own, 40, 1), Slice(own, 0, 32)])
    for batch in (alone, mixed) * 3:
        p.worker.stepped(StepResult(batch, [], 0.0, 1e-5, error=RuntimeError("no")))
    assert p.engine.scheduler.limits.local_prefill_tokens == 32


def test_what_a_step_under_way_writes_is_not_pushed(p: PrefillStage) -> None:
    """1. A device computes the first chunk, and the second is launched behind it: neither is there to be read. 2. The
    first has ended: it crosses, and it alone."""
    runner: Any = p.engine.runner
    runner.is_async = True
    p.bring(ID, "granted")
    result = p.engine.step()
    assert result is not None and p.worker.ledger.get(ID).seq.num_under_way == 16  # type: ignore[union-attr]
    assert p.posted() == []
    p.worker._stepped(result)
    assert p.posted() == [0]
    assert not p.worker.counters["prefetched_blocks"]


def test_a_grant_for_one_that_gave_way_before_its_first_token(p: PrefillStage) -> None:
    """1. It runs ahead, and gives way while its prompt is read. 2. Granted meanwhile, it has nothing to push. 3. It
    returns, and every block of it crosses."""
    p.prefill(ID)
    p.be_hybrid()
    p.wait(AHEAD_S)
    p.be_hybrid(False)
    p.step()
    entry = p.worker.ledger.get(ID)
    assert entry is not None and not entry.seq.output
    p.engine.scheduler._preempt(entry.seq)
    p.grant(ID)
    assert not p.posted()
    for _ in range(4):
        p.step()
    assert [done.reason for done in p.router.take(Done)] == ["handed_over"]
    assert p.posted()[0] == 0
    assert len(p.posted()) == 3
