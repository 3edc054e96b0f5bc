"""What a decode worker does with each message in each state: the cells of its table in docs/protocol.md."""

import pytest

from server.messages import (
    Abort,
    AbortAck,
    Decode,
    Done,
    Grant,
    GrantRequest,
    Heartbeat,
    Load,
    NotResident,
    Pause,
    Peers,
    Prefill,
    Renew,
    Resume,
    SeqToken,
    SetKnobs,
    SlotCredit,
    Tokens,
)
from server.sequence import SamplingParams, Token
from tests.transfer.world import seq
from tests.worker.stage import LEASE_S, PARAMS, PROMPT, TOKEN, DecodeStage

ID = seq(1)
each_state = pytest.mark.parametrize("state", DecodeStage.STATES)


def outputs(d: DecodeStage) -> list[int]:
    """Indices of the tokens that the router heard of, once each."""
    indices = [item.index for tokens in d.router.take(Tokens) for item in tokens.items]
    assert len(indices) == len(set(indices))
    return indices


def finish(d: DecodeStage) -> None:
    for _ in range(len(PROMPT) // 16 + PARAMS.max_tokens + 2):
        d.step()


def test_a_whole_life(d: DecodeStage) -> None:
    """1. Expected, asked for, granted: blocks are reserved. 2. Chunks in any order, token 0: received, acknowledged,
    runs. 3. Every token once, Done; nothing is left."""
    d.expect(ID)
    assert d.num_held == 0
    d.ask(ID)
    assert d.prefill.take(Grant) == [Grant(ID, 1, 0, LEASE_S, (), True)]
    assert d.num_held == 3
    for block in (2, 0, 1):
        d.chunk(ID, block)
    assert [done.reason for done in d.prefill.take(Done)] == ["received"]
    d.token0(ID)
    finish(d)
    assert outputs(d) == list(range(PARAMS.max_tokens))
    assert [done.reason for done in d.router.take(Done)] == ["length"]
    assert d.num_held == 0
    assert d.slots_are_back


@each_state
def test_decode_message(d: DecodeStage, state: str) -> None:
    d.bring(ID, state)
    d.expect(ID)
    assert d.state(ID) == ("expected" if state == "unknown" else state)
    assert not d.prefill.heard


def test_grant_request_outruns_decode(d: DecodeStage) -> None:
    """Parked for five seconds; then prefill is told that nobody knows it."""
    d.ask(ID)
    d.wait(4.9)
    d.expect(ID)
    assert [grant.id for grant in d.prefill.take(Grant)] == [ID]
    d.ask(seq(2))
    d.wait(5.1)
    assert [abort.id for abort in d.prefill.take(Abort)] == [seq(2)]


@each_state
def test_whole_sequence_here(d: DecodeStage, state: str) -> None:
    """Prefill with `decode` empty. Nobody else is needed from then on, and what is verified is not computed again."""
    d.bring(ID, state)
    if state in ("receiving", "cut"):
        d.chunk(ID, 0)
        d.chunk(ID, 1)
    d.tell(d.router, Prefill(ID, PROMPT, PARAMS))
    steps = d.engine.num_steps
    finish(d)
    if state in ("unknown", "expected", "receiving", "cut"):
        assert outputs(d) == list(range(PARAMS.max_tokens))
        num_reads, num_known = {"receiving": (1, 0), "cut": (1, d.NUM_AHEAD)}.get(state, (3, 0))
        assert d.engine.num_steps - steps == num_reads + PARAMS.max_tokens - 1 - num_known
    assert d.state(ID) == "finished"
    assert d.worker.counters["recomputed"] == (state in ("expected", "receiving", "cut"))


@each_state
@pytest.mark.parametrize("num_known", [1, 2, 5, PARAMS.max_tokens])
def test_rest_of_a_sequence_here(d: DecodeStage, state: str, num_known: int) -> None:
    """The router tells what the client has had: it stays, whoever sampled it, and no index is left out behind it. What
    prefill has told beyond it is said to the router, which may not have it. Whatever was verified is not read again."""
    d.bring(ID, state)
    for block in range(2 * (state in ("receiving", "cut"))):
        d.chunk(ID, block)
    forced = [TOKEN.id] * num_known if state in ("running", "finished", "cut") else [20 + i for i in range(num_known)]
    d.tell(d.router, Prefill(ID, PROMPT, PARAMS, output=forced))
    steps = d.engine.num_steps
    finish(d)
    if state != "finished":
        first = max(num_known, 2) if state == "running" else num_known  # two of a running one were told on the way
        assert set(outputs(d)) >= set(range(first, PARAMS.max_tokens))
    assert [done.reason for done in d.router.take(Done)] == ["error" if state == "finished" else "length"]
    assert d.state(ID) == "finished"
    if state in ("unknown", "expected", "receiving") and num_known < PARAMS.max_tokens:
        num_reads = 1 if state == "receiving" else 3
        assert d.engine.num_steps - steps == num_reads + PARAMS.max_tokens - num_known - 1


def test_what_was_begun_here_gives_way_to_what_the_client_knows(d: DecodeStage) -> None:
    """1. Prefill is lost; decode knows of no output, and begins by itself. 2. The router tells two that prefill had
    sampled, others than decode's. 3. The text goes on behind those."""
    d.bring(ID, "expected")
    d.lose(d.prefill)
    for _ in range(4):
        d.step()
    assert outputs(d) == [0, 1]
    d.tell(d.router, Prefill(ID, PROMPT, PARAMS, output=[20, 21]))
    found = d.worker.ledger.get(ID).seq  # type: ignore[union-attr]
    steps = d.engine.num_steps
    finish(d)
    assert found.output == [20, 21] + [TOKEN.id] * (PARAMS.max_tokens - 2)
    assert outputs(d) == list(range(2, PARAMS.max_tokens))
    assert d.engine.num_steps - steps == PARAMS.max_tokens - 2, "what it had read was found again"
    assert d.worker.counters["recomputed"] == 1


def test_not_resident(d: DecodeStage) -> None:
    """Less is cached than the router believed: nothing has begun, and the same id may come again."""
    d.tell(d.router, Prefill(ID, PROMPT, PARAMS, num_resident=32))
    assert d.router.take(NotResident) == [NotResident(ID)]
    assert d.state(ID) == "unknown"
    d.tell(d.router, Prefill(seq(2), PROMPT, PARAMS))
    finish(d)
    d.tell(d.router, Prefill(ID, PROMPT, PARAMS, num_resident=32))
    finish(d)
    assert not d.router.take(NotResident)
    assert d.state(ID) == "finished"


@each_state
def test_grant_request(d: DecodeStage, state: str) -> None:
    """Expected: granted. Granted: said again, the same. Over: told so."""
    d.bring(ID, state)
    d.ask(ID)
    generations = {"expected": [1], "receiving": [1], "cut": [2]}.get(state, [])
    assert [grant.generation for grant in d.prefill.take(Grant)] == generations
    assert len(d.prefill.take(Abort)) == (state == "finished")
    assert d.state(ID) == {"expected": "receiving"}.get(state, state)


def test_no_grant_over_the_high_mark(d: DecodeStage) -> None:
    """1. The pool is as full as it may be: who asks waits. 2. Something ends: it is granted."""
    d.engine.scheduler.limits.kv_low, d.engine.scheduler.limits.kv_high = 0.05, 0.06
    d.bring(ID, "receiving")
    d.expect(seq(2))
    d.ask(seq(2))
    assert not d.prefill.take(Grant)
    d.tell(d.router, Abort(ID))
    assert [grant.id for grant in d.prefill.take(Grant)] == [seq(2)]


@each_state
def test_renew(d: DecodeStage, state: str) -> None:
    """Held: the lease runs anew, and prefill hears so. Held no more: prefill is told. Complete: no lease is needed."""
    d.bring(ID, state)
    d.clock.now += LEASE_S - 0.1
    d.tell(d.prefill, Renew((ID,)))
    assert d.prefill.take(Renew) == ([Renew((ID,))] if state in ("receiving", "cut") else [])
    assert len(d.prefill.take(Abort)) == (state in ("unknown", "expected", "finished"))
    d.wait(LEASE_S - 0.1)
    assert d.worker.counters["lease_expired"] == 0
    assert d.state(ID) == state


@each_state
def test_lease_over(d: DecodeStage, state: str) -> None:
    """Prefill renews no more: what is verified is kept, the rest is computed here, and late chunks mean nothing."""
    d.bring(ID, state)
    is_granted = state in ("receiving", "cut")
    if is_granted:
        d.chunk(ID, 0)
    d.wait(LEASE_S + 0.1)
    assert d.worker.counters["lease_expired"] == is_granted
    if is_granted:
        finish(d)
        assert outputs(d) == list(range(PARAMS.max_tokens))
        d.chunk(ID, 1)
        assert d.receiver.counters["dropped_unknown"] == 1
    assert d.slots_are_back


@each_state
def test_chunk(d: DecodeStage, state: str) -> None:
    """Taken where it is wanted. Whatever it is worth, its slot comes back."""
    d.bring(ID, state)
    received = d.receiver.counters["received"]
    d.chunk(ID, 0)
    assert d.receiver.counters["received"] - received == (state in ("receiving", "cut"))
    assert d.state(ID) == state
    assert d.slots_are_back


def test_chunks_that_are_wrong(d: DecodeStage) -> None:
    """1. A flipped bit: asked for again at once. 2. Another generation: nobody's. 3. Twice: once. 4. The blocks are
    right."""
    d.bring(ID, "receiving")
    d.chunk(ID, 0, flip=True)
    assert [grant.missing for grant in d.prefill.take(Grant)] == [((0, 1),)]
    d.chunk(ID, 0, generation=2)
    assert d.receiver.counters["received"] == 0
    for block in (0, 0, 1, 2):
        d.chunk(ID, block)
    assert d.receiver.counters["duplicate"] == 1
    table = d.worker.ledger.get(ID).seq.block_table  # type: ignore[union-attr]
    assert (d.engine.runner.pool.blocks[table] == d.source[:3]).all()


def test_chunks_that_never_come(d: DecodeStage) -> None:
    """1. Token 0 says that all was sent. 2. What is missing is asked for, four times with doubling patience. 3. Then
    prefill is told, and the rest is computed here."""
    d.bring(ID, "receiving")
    d.chunk(ID, 0)
    d.token0(ID)
    for patience in (1.0, 2.0, 4.0, 8.0):
        d.tell(d.prefill, Renew((ID,)))
        d.wait(patience - 0.1)
        assert not d.prefill.take(Grant)
        d.wait(0.2)
        assert [grant.missing for grant in d.prefill.take(Grant)] == [((1, 3),)]
    d.tell(d.prefill, Renew((ID,)))
    d.receiver.tick(d.clock.now + 16.1)
    assert [abort.reason for abort in d.prefill.take(Abort)] == ["chunks never came"]
    finish(d)
    assert outputs(d) == list(range(PARAMS.max_tokens))


@each_state
def test_token_0(d: DecodeStage, state: str) -> None:
    """It counts once, while the KV is awaited; it does not run before that is complete."""
    d.bring(ID, state)
    d.token0(ID)
    d.tell(d.prefill, Tokens((SeqToken(ID, 0, Token(99)), SeqToken(ID, 1, Token(98)))))
    assert d.state(ID) == state
    if state == "receiving":
        for block in range(3):
            d.chunk(ID, block)
        finish(d)
        (first,) = [i.token for t in d.router.take(Tokens) for i in t.items if i.index == 0]
        assert first == TOKEN


@each_state
def test_pause_and_resume(d: DecodeStage, state: str) -> None:
    """A client that does not read is not computed for; its blocks are given away after a while. Nothing of it is lost:
    it reads on, and gets each token once. What has not come to run yet goes on as it was."""
    d.bring(ID, state)
    d.tell(d.router, Pause(ID))
    if state == "running":
        steps = d.engine.num_steps
        finish(d)
        assert d.engine.num_steps == steps
        d.wait(31.0)
        d.step()
        assert d.num_held == 0
    d.tell(d.router, Resume(ID))
    if state == "receiving":
        for block in range(3):
            d.chunk(ID, block)
        d.token0(ID)
    before = outputs(d)
    finish(d)
    if state in ("receiving", "running"):
        first = 2 if state == "running" else 0
        assert before + outputs(d) == list(range(first, PARAMS.max_tokens))
        assert d.state(ID) == "finished"


@each_state
def test_abort(d: DecodeStage, state: str) -> None:
    """Always answered; no copy into its blocks starts any more; they are free; the id never returns, and who asks for
    it again is told so."""
    d.bring(ID, state)
    d.tell(d.router, Abort(ID))
    assert d.router.take(AbortAck) == [AbortAck(ID)]
    assert d.state(ID) == "finished"
    assert d.num_held == 0
    d.chunk(ID, 0)
    d.expect(ID)
    assert d.state(ID) == "finished"
    assert [(done.id, done.reason) for done in d.router.take(Done)] == [(ID, "error")]
    assert d.receiver.counters["received"] == (3 if state in ("running", "finished") else 0)
    assert d.slots_are_back


@each_state
def test_prefill_lets_go(d: DecodeStage, state: str) -> None:
    """It may have lost the router, and nobody else: the sequence is the router's. What needs prefill is computed here,
    and what does not goes on; what the router has not told yet may still come."""
    d.bring(ID, state)
    if state in ("receiving", "cut"):
        d.chunk(ID, 0)
    d.tell(d.prefill, Abort(ID))
    assert d.prefill.take(AbortAck) == [AbortAck(ID)]
    d.expect(ID)
    before = outputs(d)
    if state != "unknown":
        finish(d)
        first = {"running": 2, "finished": PARAMS.max_tokens}.get(state, 0)
        assert before + outputs(d) == list(range(first, PARAMS.max_tokens))
    assert d.state(ID) == ("expected" if state == "unknown" else "finished")
    assert d.worker.counters["recomputed"] == (state in ("expected", "receiving", "cut"))


@each_state
def test_prefill_connection_lost(d: DecodeStage, state: str) -> None:
    """What needs prefill is computed here, from what has come; what is complete needs no one. Its slots are free
    again, and the same instance may come back for them."""
    d.bring(ID, state)
    if state in ("receiving", "cut"):
        d.chunk(ID, 0)
    d.lose(d.prefill)
    steps = d.engine.num_steps
    finish(d)
    assert d.worker.counters["recomputed"] == (state in ("expected", "receiving", "cut"))
    if state in ("expected", "receiving", "cut"):
        assert outputs(d) == list(range(PARAMS.max_tokens))
        num_read = {"expected": 3, "receiving": 2, "cut": 2 - d.NUM_AHEAD}[state]
        assert d.engine.num_steps - steps == num_read + PARAMS.max_tokens - 1
    d.receiver.endpoint_gone(d.prefill.peer.instance)
    d.prefill.heard.clear()
    d.join(d.prefill)
    assert len(d.prefill.take(SlotCredit)[0].slots) == 8


@each_state
def test_router_connection_lost(d: DecodeStage, state: str) -> None:
    d.bring(ID, state)
    d.lose(d.router)
    assert d.num_held == 0
    assert d.state(ID) == ("unknown" if state == "unknown" else "finished")
    assert d.slots_are_back


@each_state
def test_knobs_and_heartbeats(d: DecodeStage, state: str) -> None:
    d.bring(ID, state)
    d.tell(d.router, SetKnobs(4, {"decode.kv_low": 0.3, "decode.kv_high": 0.4}))
    assert [load.rev for load in d.router.take(Load)] == [4]
    assert d.engine.scheduler.limits.kv_high == 0.4
    d.tell(d.router, Heartbeat(), AbortAck(ID))
    assert d.state(ID) == state
    assert d.worker.counters["unexpected"] == 0


@each_state
def test_what_is_not_for_decode(d: DecodeStage, state: str) -> None:
    """Counted, and nothing else."""
    d.bring(ID, state)
    d.tell(d.prefill, Grant(ID, 1, 0, 1.0), SlotCredit((0,)), Done(ID, "received"), Peers({}))
    assert d.worker.counters["unexpected"] == 4
    assert d.state(ID) == state


def test_all_kv_is_here_already(d: DecodeStage) -> None:
    """Resident from an earlier turn: the grant says so, and nothing but the last block is awaited."""
    d.bring(seq(9), "finished")
    d.expect(ID)
    d.ask(ID)
    assert [grant.num_resident_blocks for grant in d.prefill.take(Grant)] == [2]
    d.chunk(ID, 2, generation=2)
    d.token0(ID)
    finish(d)
    assert outputs(d) == list(range(PARAMS.max_tokens))


def test_a_grant_is_asked_by_nobody_else(d: DecodeStage) -> None:
    """A request of another prefill worker does not take a grant over."""
    d.bring(ID, "receiving")
    d.tell(d.router, GrantRequest(ID, len(PROMPT)))
    assert not d.router.take(Grant)


def test_a_cut(d: DecodeStage) -> None:
    """1. Granted, for the prompt; but prefill has run ahead: decode hears of 14 outputs. 2. It grants anew, for the KV
    of 13 of them too: a block more. 3. All of it is here: it goes on from the 14th, and repeats those before it, which
    the router may not have."""
    params = SamplingParams(max_tokens=20, temperature=0.0)
    d.tell(d.router, Decode(ID, PROMPT, params, prefill="prefill-0"))
    d.ask(ID)
    assert [grant.generation for grant in d.prefill.take(Grant)] == [1]
    d.outputs(ID, 0, 14)
    assert [grant.generation for grant in d.prefill.take(Grant)] == [2]
    assert d.num_held == 4
    d.chunk(ID, 0, generation=1)
    assert d.receiver.counters["received"] == 0
    for block in (3, 1, 0, 2):
        d.chunk(ID, block)
    assert [done.reason for done in d.prefill.take(Done)] == ["received"]
    steps = d.engine.num_steps
    finish(d)
    assert d.engine.num_steps - steps == 6
    assert outputs(d) == list(range(20))
    assert d.num_held == 0


def test_outputs_are_repeated_before_the_end_is_told(d: DecodeStage) -> None:
    """The outputs that prefill told end it by decode's own limits, and prefill is lost: the router, which lets go of a
    sequence with its Done, gets them before."""
    d.engine.scheduler.limits.max_len = len(PROMPT) + 3
    d.bring(ID, "receiving")
    d.outputs(ID, 0, 3)
    d.lose(d.prefill)
    assert [type(message) for message in d.router.heard if isinstance(message, Tokens | Done)] == [Tokens, Done]
    assert outputs(d) == [0, 1, 2]


def test_no_room_for_the_outputs(d: DecodeStage) -> None:
    """1. There are blocks for the prompt, none for what came after it: the grant is taken back, nothing is held. 2.
    There is room: granted for all of it. 3. Prefill has gone on meanwhile, tells the rest, and is granted once more."""
    params = SamplingParams(max_tokens=40, temperature=0.0)
    d.tell(d.router, Prefill(seq(2), [5] * 16 * 59, params))  # 59 of 63 blocks, and room to grow by three
    d.step()
    d.engine.scheduler.limits.kv_high = 1.0
    for _ in range(16):
        d.engine.scheduler._gate.lengths.add(1)  # it believes in short outputs
    d.tell(d.router, Decode(ID, PROMPT, params, prefill="prefill-0"))
    d.ask(ID)
    assert len(d.prefill.take(Grant)) == 1
    d.outputs(ID, 0, 30)
    assert not d.prefill.take(Grant)
    assert d.state(ID) == "expected"
    d.tell(d.router, Abort(seq(2)))
    d.step()
    assert [grant.generation for grant in d.prefill.take(Grant)] == [2]
    assert d.num_held == 5
    d.outputs(ID, 30, 34)
    assert [grant.generation for grant in d.prefill.take(Grant)] == [3]
    for block in range(5):
        d.chunk(ID, block)
    finish(d)
    assert sorted(outputs(d)) == list(range(40))


def test_outputs_that_do_not_follow(d: DecodeStage) -> None:
    """Repeated, or with a gap before them: they mean nothing."""
    d.bring(ID, "cut")
    d.outputs(ID, 0, 2)
    d.outputs(ID, 5, 6)
    assert not d.prefill.take(Grant)
    assert len(d.worker.ledger.get(ID).outputs) == d.NUM_AHEAD  # type: ignore[union-attr]
