"""Sequences and their workers: who is told what, who may be lost when, and what a probe proves."""

import asyncio
import contextlib
import re
from typing import Any

import msgspec
import pytest

from server.messages import Abort, AbortAck, Decode, Done, GrantRequest, NotResident, Prefill, SeqToken, Tokens
from server.router.worker import Inbox
from server.sequence import SeqId
from tests.router.conftest import HELLO, Cluster, Start, until
from tests.router.fake_worker import FakeWorker
from tests.router.test_admin import ADMIN
from tests.router.test_errors import check_error


async def read_until(reader: asyncio.StreamReader, words: bytes) -> bytes:
    async with asyncio.timeout(5):
        return await reader.readuntil(words)


async def begin_stream(cluster: Cluster, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    payload = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **body}
    return await cluster.send("POST", "/v1/chat/completions", payload)


async def nothing_open(cluster: Cluster) -> None:
    """Once no request is in flight no worker has an open sequence, and no place in the queue is taken."""
    async with asyncio.timeout(5):
        await cluster.stack.dispatcher.idle.wait()
    for worker in cluster.stack.workers.all.values():
        assert not worker.open
        assert worker.prompt_tokens == 0
    assert cluster.stack.dispatcher.waiting == cluster.stack.dispatcher.running == 0


async def test_pd_tells_both_at_once(start: Start) -> None:
    cluster = await start(prefill=1, decode=1)
    await cluster.chat()
    (prefill,) = await cluster.prefill.saw(Prefill)
    (decode,) = await cluster.decode.saw(Decode)
    assert prefill.id == decode.id
    assert prefill.prompt == decode.prompt
    assert prefill.params == decode.params
    assert (prefill.decode, decode.prefill) == ("decode-0", "prefill-0")
    assert prefill.params.stop_token_ids == (2,)
    await nothing_open(cluster)


@pytest.mark.parametrize("repeats", [True, False])
async def test_each_index_is_taken_once(start: Start, repeats: bool) -> None:
    """Token 0 comes from prefill, from decode, or from both, in either order."""
    cluster = await start(prefill=1, decode=1)
    cluster.decode.token0_to_router = repeats
    ids = cluster.say(HELLO)
    answer = (await cluster.chat(return_token_ids=True)).json
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["choices"][0]["message"]["content"] == HELLO


async def test_decode_runs_ahead_of_token_0(start: Start) -> None:
    cluster = await start(prefill=1, decode=1)
    cluster.prefill.stepwise = True
    cluster.decode.token0_to_router = False
    task = asyncio.create_task(cluster.chat())
    await cluster.prefill.saw(Prefill)
    cluster.prefill.step()
    assert (await task).json["choices"][0]["message"]["content"] == HELLO


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 2])
async def test_disconnect_aborts_both_workers(start: Start, stream: bool, tokens: int) -> None:
    cluster = await start(prefill=1, decode=1)
    cluster.prefill.stepwise = cluster.decode.stepwise = True
    reader, writer = await begin_stream(cluster, stream=stream)
    await cluster.prefill.saw(Prefill)
    cluster.decode.step(tokens)
    if stream and tokens:
        await read_until(reader, b'"content":"Hello"')
    writer.close()
    for fake in (cluster.prefill, cluster.decode):
        (abort,) = await fake.saw(Abort)
        assert abort.id == cluster.prefill.heard(Prefill)[0].id
    await nothing_open(cluster)


async def test_disconnect_with_several_choices(start: Start) -> None:
    cluster = await start(colocated=1)
    cluster.colocated.stepwise = True
    _, writer = await begin_stream(cluster, n=3)
    await cluster.colocated.saw(Prefill, 1)
    cluster.colocated.step(1)  # the prompt is read: now the others may come
    await cluster.colocated.saw(Prefill, 3)
    writer.close()
    await cluster.colocated.saw(Abort, 3)
    await nothing_open(cluster)


async def test_several_choices_wait_until_the_prompt_is_read(start: Start) -> None:
    cluster = await start(colocated=2)
    workers = list(cluster.fakes.values())
    for worker in workers:
        worker.stepwise = True
    _, writer = await begin_stream(cluster, n=3)
    async with asyncio.timeout(5):
        while not any(worker.heard(Prefill) for worker in workers):
            await asyncio.sleep(0.001)
    first = next(worker for worker in workers if worker.heard(Prefill))
    assert len(first.heard(Prefill)) == 1
    first.step(1)
    await first.saw(Prefill, 3)  # all on the worker that has read it
    writer.close()
    await first.saw(Abort, 3)
    await nothing_open(cluster)


async def test_finished_prefill_is_not_aborted(start: Start) -> None:
    cluster = await start(prefill=1, decode=1)
    cluster.decode.stepwise = True
    reader, writer = await begin_stream(cluster)
    await read_until(reader, b'"content":"Hello"')
    writer.close()
    await cluster.decode.saw(Abort)
    assert not cluster.prefill.heard(Abort)


async def test_decode_lost_before_the_first_token(start: Start) -> None:
    """There is no other decode worker: prefill, which can do it too, has the whole of it, as another attempt."""
    cluster = await start(prefill=1, decode=1)
    cluster.prefill.stepwise = cluster.decode.stepwise = True
    task = asyncio.create_task(cluster.chat(stream=True))
    (first,) = await cluster.prefill.saw(Prefill)
    await cluster.decode.saw(Decode)
    await cluster.decode.stop()
    _, again = await cluster.prefill.saw(Prefill, 2)
    assert (again.decode, again.output) == ("", [])
    assert (again.id.seq, again.id.attempt) == (first.id.seq, first.id.attempt + 1)
    assert [abort.id for abort in await cluster.prefill.saw(Abort)] == [first.id]
    cluster.prefill.step(100)
    assert (await task).status == 200
    await nothing_open(cluster)


async def test_nobody_left_to_begin_again(start: Start) -> None:
    cluster = await start(prefill=1, decode=1)
    cluster.prefill.stepwise = cluster.decode.stepwise = True
    task = asyncio.create_task(cluster.chat(stream=True))
    await cluster.prefill.saw(Prefill)
    await cluster.prefill.stop()
    await cluster.decode.saw(Prefill)
    await cluster.decode.stop()
    error = check_error(await task, 503)
    assert error["code"] == "worker_lost"
    await nothing_open(cluster)


@pytest.mark.parametrize("how", ["lost", "error"])
async def test_decode_goes_on_alone_when_prefill_fails(start: Start, how: str) -> None:
    # 1. A request is on its way through both workers; nobody has said a token.
    cluster = await start(prefill=1, decode=1)
    cluster.prefill.stepwise = how == "lost"
    cluster.prefill.error = "" if how == "lost" else "no connection to decode-0"
    cluster.decode.stepwise = True
    task = asyncio.create_task(cluster.chat())
    await cluster.decode.saw(Decode)
    # 2. Prefill fails: decode is asked for the whole of the same sequence.
    if how == "lost":
        await cluster.prefill.saw(Prefill)
        await cluster.prefill.stop()
    (asked,) = await cluster.decode.saw(Prefill)
    assert asked.decode == ""
    # 3. The client gets its answer and never knows.
    cluster.decode.step(200)
    answer = await task
    assert answer.status == 200
    assert answer.json["choices"][0]["message"]["content"] == HELLO
    await nothing_open(cluster)


async def test_decode_lost_after_the_first_token(start: Start) -> None:
    """1. A stream has some tokens. 2. Its decode worker dies, and with it the KV. 3. Prefill begins again behind those
    that there are: the client sees each token once."""
    cluster = await start(prefill=1, decode=1)
    ids = cluster.say(HELLO)
    cluster.decode.stepwise = True
    reader, writer = await begin_stream(cluster)
    head = await read_until(reader, b'"content":"Hello"')
    cluster.decode.step(3)
    head += await read_until(reader, b'"content":","')
    await cluster.decode.stop()
    _, again = await cluster.prefill.saw(Prefill, 2)
    assert (again.decode, again.output) == ("", ids[: len(again.output)])
    assert len(again.output) >= 2
    whole = head + await reader.read()
    writer.close()
    assert "".join(re.findall(r'"content":"([^"]*)"', whole.decode())) == HELLO
    assert b"error" not in whole
    record = (await cluster.request("GET", "/admin/requests", headers=ADMIN)).json["requests"][0]
    assert (record["path"], record["decode"], record["output_tokens"]) == ("colocated", "prefill-0", len(ids))
    await nothing_open(cluster)


async def test_it_is_begun_again_once(start: Start) -> None:
    """A request that ends its workers does not go through all of them."""
    cluster = await start(colocated=3)
    for fake in cluster.fakes.values():
        fake.stepwise = True
    reader, writer = await begin_stream(cluster)
    killed: list[str] = []
    for _ in range(2):
        await until(lambda: any(fake.heard(Prefill) for name, fake in cluster.fakes.items() if name not in killed))
        name = next(name for name, fake in cluster.fakes.items() if name not in killed and fake.heard(Prefill))
        await cluster.fakes[name].stop()
        killed.append(name)
    rest = await reader.read()
    writer.close()
    assert b'"code":"worker_lost"' in rest
    (left,) = (fake for name, fake in cluster.fakes.items() if name not in killed)
    assert not left.heard(Prefill)
    await nothing_open(cluster)


def holder(cluster: Cluster) -> tuple[FakeWorker, FakeWorker]:
    """(the decode worker that has the sequence, the other one)."""
    both = (cluster.fakes["decode-0"], cluster.fakes["decode-1"])
    return both if both[0].heard(Decode) else (both[1], both[0])


@pytest.mark.parametrize("has_first", [False, True])
async def test_lost_decode_worker_is_replaced(start: Start, has_first: bool) -> None:
    # 1. A request is with prefill and one of two decode workers; its first token is out, or not yet.
    cluster = await start(prefill=1, decode=2)
    ids = cluster.say(HELLO)
    for fake in cluster.fakes.values():
        fake.stepwise = True
    task = asyncio.create_task(cluster.chat(return_token_ids=True, headers={"x-pdctl-timing": "1"}))
    (first,) = await cluster.prefill.saw(Prefill)
    await until(lambda: any(cluster.fakes[f"decode-{i}"].heard(Decode) for i in range(2)))
    lost_one, other = holder(cluster)
    if has_first:
        cluster.prefill.step()
        await until(lambda: cluster.stack.dispatcher.running == 1 or not cluster.stack.workers.all["prefill-0"].open)
    # 2. That decode worker dies: prefill is told of the other one, and that one of the sequence. Same id, same prompt.
    await lost_one.stop()
    _, again = await cluster.prefill.saw(Prefill, 2)
    (decode,) = await other.saw(Decode)
    assert (again.id, again.prompt, again.decode) == (first.id, first.prompt, other.name)
    assert (decode.id, decode.prefill) == (first.id, "prefill-0")
    # 3. The answer is whole, and says who gave it.
    cluster.prefill.step(2)
    other.step(200)
    answer = (await task).json
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["pdctl"]["decode"] == other.name
    await nothing_open(cluster)


async def test_decode_worker_lost_with_the_only_copy(start: Start) -> None:
    """Its second token says that prefill has let go: another decode worker begins again, behind the tokens so far.
    Prefill is told anyway."""
    cluster = await start(prefill=1, decode=2)
    ids = cluster.say(HELLO)
    for name in ("decode-0", "decode-1"):
        cluster.fakes[name].stepwise = True
    reader, writer = await begin_stream(cluster)
    await read_until(reader, b'"content":"Hello"')
    lost_one, other = holder(cluster)
    lost_one.step(3)
    await read_until(reader, b'"content":","')
    await lost_one.stop()
    (again,) = await other.saw(Prefill)
    assert again.decode == ""
    assert again.output == ids[: len(again.output)]
    assert len(again.output) >= 2
    other.step(100)
    rest = await reader.read()
    writer.close()
    assert b'"finish_reason":"stop"' in rest
    assert not other.heard(Decode)
    await cluster.prefill.saw(Abort)
    await nothing_open(cluster)


@pytest.mark.parametrize("how", ["lost", "error", "ends"])
async def test_prefill_that_runs_ahead(start: Start, how: str) -> None:
    """Decode has no room yet: prefill says more than token 0. 1. It is lost, or fails: decode goes on alone, behind
    what the client has. 2. Or it comes to the end: so does the sequence, and decode is told."""
    cluster = await start(prefill=1, decode=1)
    ids = cluster.say(HELLO)
    cluster.prefill.stepwise = cluster.decode.stepwise = True
    cluster.prefill.runs_ahead = True
    cluster.prefill.stages = {"ahead": 0.25}
    reader, writer = await begin_stream(cluster)
    (asked,) = await cluster.prefill.saw(Prefill)
    cluster.prefill.step(3)
    await read_until(reader, b'"content":","')
    if how == "ends":
        cluster.prefill.step(100)
        assert [abort.id for abort in await cluster.decode.saw(Abort)] == [asked.id]
    else:
        if how == "lost":
            await cluster.prefill.stop()
        else:
            cluster.prefill.say(Done(asked.id, "error", message="decode-0 was lost"))
        (alone,) = await cluster.decode.saw(Prefill)
        assert (alone.id, alone.decode) == (asked.id, "")
        assert alone.output == ids[: len(alone.output)]
        assert len(alone.output) >= 2
        cluster.decode.step(100)
    rest = await reader.read()
    writer.close()
    assert b'"finish_reason":"stop"' in rest
    assert b'"error"' not in rest
    record = (await cluster.request("GET", "/admin/requests", headers=ADMIN)).json["requests"][0]
    assert (record["path"], record["output_tokens"]) == ("colocated", len(ids))
    await nothing_open(cluster)


async def test_decode_that_began_with_other_tokens(start: Start) -> None:
    """1. Prefill has run ahead, and the client has some tokens, when it falls silent. 2. Decode begins by itself, knows
    none of them, and its own are other ones. 3. It is told what the client has: what follows is of one piece."""
    cluster = await start(prefill=1, decode=1)
    ids = cluster.say(HELLO)
    cluster.prefill.stepwise = cluster.decode.stepwise = True
    cluster.prefill.runs_ahead = cluster.decode.goes_wrong = True
    reader, writer = await begin_stream(cluster, return_token_ids=True)
    (asked,) = await cluster.prefill.saw(Prefill)
    cluster.prefill.step(3)
    head = await read_until(reader, b'"content":","')
    cluster.decode.step(1)
    (anew,) = await cluster.decode.saw(Prefill)
    assert (anew.id, anew.decode) == (SeqId(asked.id.router, asked.id.seq, asked.id.attempt + 1), "")
    assert anew.output == ids[: len(anew.output)]
    assert len(anew.output) >= 2
    for fake in (cluster.prefill, cluster.decode):
        assert [abort.id for abort in await fake.saw(Abort)] == [asked.id]
    cluster.decode.step(100)
    whole = (head + await reader.read()).decode()
    writer.close()
    said = [int(id) for part in re.findall(r'"token_ids":\[([^]]*)\]', whole) for id in part.split(",") if id]
    assert said == ids
    assert '"error"' not in whole
    record = (await cluster.request("GET", "/admin/requests", headers=ADMIN)).json["requests"][0]
    assert (record["path"], record["decode"], record["output_tokens"]) == ("colocated", "decode-0", len(ids))
    await nothing_open(cluster)


async def test_the_record_of_a_cut(start: Start) -> None:
    cluster = await start(prefill=1, decode=1)
    cluster.prefill.stages = {"ahead": 0.25, "cut": 1.0}
    record = (await cluster.chat(headers={"x-pdctl-timing": "1"})).json["pdctl"]
    assert (record["path"], record["cut"]) == ("pd", 1)
    assert record["ahead_ms"] == pytest.approx(record["queue_ms"] + 250)
    text = (await cluster.request("GET", "/metrics")).body.decode()
    assert "pdctl_cuts_total 1.0" in text
    assert "pdctl_cut_tokens_total 1.0" in text


async def test_prefill_lost_after_hand_over_is_not_missed(start: Start) -> None:
    cluster = await start(prefill=1, decode=1)
    cluster.decode.stepwise = True
    reader, writer = await begin_stream(cluster)
    await read_until(reader, b'"content":"Hello"')
    await cluster.prefill.stop()
    await lost(cluster, "prefill-0")
    cluster.decode.step(100)
    rest = await reader.read()
    writer.close()
    assert b'"finish_reason":"stop"' in rest
    assert b"error" not in rest


async def lost(cluster: Cluster, name: str) -> None:
    workers = cluster.stack.workers
    await until(lambda: not workers.all[name].is_connected)


async def test_lost_prefill_leaves_decode_serving_alone(start: Start) -> None:
    cluster = await start(prefill=1, decode=1)
    await cluster.prefill.stop()
    await lost(cluster, "prefill-0")
    assert (await cluster.chat(headers={"x-pdctl-timing": "1"})).json["pdctl"]["path"] == "colocated"
    assert cluster.decode.heard(Prefill)[0].decode == ""


async def timed(cluster: Cluster) -> dict[str, Any]:
    """The stage record of one more request."""
    answer = await cluster.chat(headers={"x-pdctl-timing": "1"})
    assert answer.status == 200
    return dict(answer.json["pdctl"])


async def test_lost_decode_leaves_prefill_serving_alone(start: Start) -> None:
    """Every prompt crosses here. 1 The only decode worker dies: prefill does the next prompt whole, and nobody waits.
    2 It is back, and a probe went through: prompts cross again."""
    cluster = await start(prefill=1, decode=1, router={"worker_wait": 0})
    assert (await timed(cluster))["path"] == "pd"
    await cluster.decode.stop()
    await lost(cluster, "decode-0")
    alone = await timed(cluster)
    assert (alone["path"], alone["decode"], alone["prefill"]) == ("colocated", "prefill-0", None)
    assert cluster.prefill.heard(Prefill)[-1].decode == ""
    assert (await cluster.request("GET", "/readyz")).status == 200
    cluster.decode.restart()
    await cluster.decode.start()
    dispatcher = cluster.stack.dispatcher
    await until(lambda: dispatcher.is_proven(dispatcher.routes[0]))
    assert (await timed(cluster))["path"] == "pd"


async def test_a_new_prefill_worker_stands_in_for_decode(start: Start) -> None:
    """1 The only decode worker is gone for good. 2 Prefill restarts: no pair proves it any more. 3 It is probed alone,
    and answers. 4 Decode comes after all: prompts cross."""
    cluster = await start(prefill=1, decode=1)
    dispatcher = cluster.stack.dispatcher
    await cluster.decode.stop()
    await lost(cluster, "decode-0")
    await cluster.prefill.stop()
    await lost(cluster, "prefill-0")
    assert not dispatcher.can_serve
    cluster.prefill.restart()
    await cluster.prefill.start()
    assert (await timed(cluster))["decode"] == "prefill-0"
    cluster.decode.restart()
    await cluster.decode.start()
    await until(lambda: dispatcher.is_proven(dispatcher.routes[0]))
    assert (await timed(cluster))["path"] == "pd"


async def test_a_stand_in_leaves_places_for_what_is_to_cross(start: Start) -> None:
    """1 The only decode worker dies; half of prefill's sixteen places are taken by whole sequences. 2 The next prompt
    waits, though prefill could take it. 3 Decode is back and proven beside them: it crosses. 4 All are answered."""
    cluster = await start(prefill=1, decode=1)
    prefill = cluster.stack.workers.all["prefill-0"]
    await cluster.decode.stop()
    await lost(cluster, "decode-0")
    cluster.prefill.stepwise = True
    whole = [asyncio.create_task(cluster.chat()) for _ in range(8)]
    await until(lambda: len(prefill.open) == 8)
    late = asyncio.create_task(timed(cluster))
    await until(lambda: cluster.stack.dispatcher.waiting == 9)
    for channel in cluster.prefill._channels:
        channel.send(cluster.prefill.load)  # what waits looks again
    cluster.decode.restart()
    await cluster.decode.start()
    await until(lambda: cluster.stack.dispatcher.is_proven(cluster.stack.dispatcher.routes[0]))
    assert (await late)["path"] == "pd"
    cluster.prefill.step(1000)
    assert [(await answer).status for answer in whole] == [200] * 8


async def test_nobody_overtakes_who_waits_for_a_place(start: Start) -> None:
    """1 The stand-in is full, at half of its four places; one request waits. 2 A place is free, and another request
    comes before the first has heard of it: it waits, too. 3 The worker reports: both go."""
    cluster = await start(prefill=1, decode=1)
    dispatcher, prefill = cluster.stack.dispatcher, cluster.stack.workers.all["prefill-0"]
    await cluster.decode.stop()
    await lost(cluster, "decode-0")
    dispatcher.use_knobs({"prefill.max_seqs": 4})
    streams = [SeqId("test", n, 0) for n in range(2)]
    for stream in streams:
        prefill.attach(stream, Inbox())
    first = asyncio.create_task(dispatcher.some_route())
    await until(dispatcher._line.locked)
    prefill.detach(streams[0])
    second = asyncio.create_task(dispatcher.some_route())
    await asyncio.sleep(0)
    assert not first.done()
    assert not second.done()
    for channel in cluster.prefill._channels:
        channel.send(cluster.prefill.load)
    await asyncio.gather(first, second)


async def test_a_stand_in_that_is_full_takes_more_after_a_while(start: Start) -> None:
    """Better late than 503, and at once where nobody is coming back."""
    cluster = await start(prefill=1, decode=1, router={"worker_wait": 0.1})
    prefill = cluster.stack.workers.all["prefill-0"]
    cluster.stack.workers.drain(cluster.stack.workers.all["decode-0"], True)
    cluster.prefill.stepwise = True
    answers = [asyncio.create_task(cluster.chat()) for _ in range(10)]
    await until(lambda: len(prefill.open) == 10)
    cluster.stack.workers.drain(cluster.stack.workers.all["decode-0"], False)
    await cluster.decode.stop()
    await lost(cluster, "decode-0")
    answers += [asyncio.create_task(cluster.chat())]
    await until(lambda: len(prefill.open) == 11)
    cluster.prefill.step(1000)
    assert {(await answer).status for answer in answers} == {200}


async def test_requests_wait_for_a_worker_that_comes_back(start: Start) -> None:
    """1 the only worker dies, 2 a request and a stream wait in the queue, 3 it is back, 4 both are answered."""
    cluster = await start(colocated=1)
    await cluster.colocated.stop()
    await lost(cluster, "colocated-0")
    asked = [asyncio.create_task(cluster.chat(stream=stream)) for stream in (False, True)]
    await until(lambda: cluster.stack.dispatcher.waiting == 2)
    assert (await cluster.request("GET", "/readyz")).status == 503
    assert (await cluster.request("GET", "/health")).status == 503
    cluster.colocated.restart()
    await cluster.colocated.start()
    assert [(await answer).status for answer in asked] == [200, 200]


async def test_the_wait_for_a_worker_has_an_end(start: Start) -> None:
    cluster = await start(colocated=1, router={"worker_wait": 0.1, "queue_high": 1})
    await cluster.colocated.stop()
    await lost(cluster, "colocated-0")
    waiting = asyncio.create_task(cluster.chat())
    await until(lambda: cluster.stack.dispatcher.waiting == 1)
    too_many = await cluster.chat()
    assert (too_many.status, (await waiting).status) == (429, 503)
    assert all("retry-after" in answer.headers for answer in (too_many, await waiting))


async def test_nobody_waits_for_a_drained_worker(start: Start) -> None:
    cluster = await start(colocated=1)
    cluster.stack.workers.drain(cluster.stack.workers.all["colocated-0"], True)
    assert check_error(await cluster.chat(), 503)["code"] == "no_worker"


async def test_no_worker_left(start: Start) -> None:
    cluster = await start(colocated=1, router={"worker_wait": 0})
    await cluster.colocated.stop()
    await lost(cluster, "colocated-0")
    answer = await cluster.chat()
    assert check_error(answer, 503)["code"] == "no_worker"
    assert "retry-after" in answer.headers
    assert (await cluster.request("GET", "/readyz")).status == 503
    assert (await cluster.request("GET", "/startupz")).status == 200


async def test_restarted_worker_is_proven_again(start: Start) -> None:
    cluster = await start(colocated=1)
    dispatcher = cluster.stack.dispatcher
    before = dispatcher.routes[0].instances
    await cluster.colocated.stop()
    await lost(cluster, "colocated-0")
    cluster.colocated.restart()
    await cluster.colocated.start()
    await until(lambda: dispatcher.can_serve)
    assert dispatcher.routes[0].instances != before
    assert (await cluster.chat()).status == 200


async def test_ready_means_every_pair(start: Start) -> None:
    cluster = await start(prefill=2, decode=2, colocated=1)
    detail = cluster.stack.prober.detail
    assert set(detail) == {
        "prefill-0>decode-0",
        "prefill-0>decode-1",
        "prefill-1>decode-0",
        "prefill-1>decode-1",
        "colocated-0",
    }
    assert all(times["total_ms"] >= times["first_token_ms"] > 0 for times in detail.values())


async def test_a_missing_worker_keeps_it_starting(start: Start) -> None:
    cluster = await start(prefill=1, decode=1, wait=False, fakes_up=False)
    await cluster.prefill.start()
    await until(lambda: cluster.stack.workers.all["prefill-0"].is_connected)
    assert not cluster.stack.prober.started.is_set()
    await cluster.decode.start()
    async with asyncio.timeout(5):
        await cluster.stack.prober.started.wait()


async def test_refused_handshake_is_told(start: Start) -> None:
    cluster = await start(colocated=1, wait=False, fakes_up=False)
    cluster.colocated._secret = b"another"
    await cluster.colocated.start()
    worker = cluster.stack.workers.all["colocated-0"]
    await until(lambda: worker.state == "refused")
    assert "secret" in worker.reason
    assert "colocated-0 refuses the router" in (await cluster.stack.prober.failed).message


@pytest.mark.parametrize(
    ("pools", "threshold", "path", "worker"),
    [
        ({"prefill": 1, "decode": 1}, 0, "pd", "decode-0"),
        ({"prefill": 1, "decode": 1}, 500, "colocated", "decode-0"),
        ({"prefill": 1, "decode": 1, "colocated": 1}, 500, "colocated", "colocated-0"),
        ({"prefill": 1, "decode": 1, "colocated": 1}, 0, "pd", "decode-0"),
        ({"prefill": 1, "decode": 1}, "auto", "colocated", "decode-0"),
    ],
)
async def test_path(start: Start, pools: dict[str, int], threshold: Any, path: str, worker: str) -> None:
    cluster = await start(**pools, hybrid={"threshold_tokens": threshold})
    record = (await cluster.chat(headers={"x-pdctl-timing": "1"})).json["pdctl"]
    assert (record["path"], record["decode"]) == (path, worker)


async def test_round_robin_and_least_loaded(start: Start) -> None:
    cluster = await start(colocated=2, router={"policy": "round-robin"})
    for _ in range(4):
        await cluster.chat()
    assert [len(fake.heard(Prefill)) for fake in cluster.fakes.values()] == [2, 2]

    cluster = await start(colocated=2, router={"policy": "least-loaded"})
    busy, free = cluster.fakes.values()
    busy.stepwise = free.stepwise = True
    tasks = [asyncio.create_task(cluster.chat()) for _ in range(2)]
    await asyncio.gather(busy.saw(Prefill), free.saw(Prefill))
    busy.step(100)
    free.step(100)
    await asyncio.gather(*tasks)


async def test_silent_worker_is_lost(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from server.router import worker as connection
    from tests.router import fake_worker

    async def mute(*_: object) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    cluster = await start(colocated=1, wait=False, fakes_up=False)
    monkeypatch.setattr(connection, "SILENT_S", 0.1)
    monkeypatch.setattr(fake_worker.FakeWorker, "_heartbeats", mute)
    await cluster.colocated.start()
    worker = cluster.stack.workers.all["colocated-0"]
    await until(lambda: worker.reason == "fell silent")


async def test_drain_and_resume(start: Start) -> None:
    cluster = await start(prefill=1, decode=2)
    first, second = cluster.fakes["decode-0"], cluster.fakes["decode-1"]
    first.stepwise = True
    state = cluster.stack.workers.all["decode-0"]
    cluster.stack.workers.drain(cluster.stack.workers.all["decode-1"], True)
    asking = asyncio.create_task(cluster.chat())  # stays open there
    await first.saw(Decode)
    cluster.stack.workers.drain(cluster.stack.workers.all["decode-1"], False)
    answer = await cluster.post("/admin/workers/decode-0/drain", {}, ADMIN)
    assert (answer.json["state"], answer.json["open"]) == ("draining", 1)
    for _ in range(3):
        await cluster.chat()
    assert len(first.heard(Decode)) == 1
    first.step(100)
    assert (await asking).status == 200
    assert state.shown_state == "drained"

    assert (await cluster.post("/admin/workers/decode-1/drain", {}, ADMIN)).status == 200
    assert (await timed(cluster))["decode"] == "prefill-0"  # nobody is left to hand it to
    assert (await cluster.post("/admin/workers/prefill-0/drain", {}, ADMIN)).status == 200
    assert check_error(await cluster.chat(), 503)["code"] == "no_worker"
    assert (await cluster.post("/admin/workers/prefill-0/resume", {}, ADMIN)).json["state"] == "connected"
    assert (await cluster.post("/admin/workers/decode-1/resume", {}, ADMIN)).json["state"] == "connected"
    count = len(second.heard(Decode))
    assert (await cluster.chat()).status == 200
    assert len(second.heard(Decode)) == count + 1
    assert (await cluster.post("/admin/workers/decode-9/drain", {}, ADMIN)).status == 404


async def test_a_prefill_worker_that_still_pushes_is_not_drained(start: Start) -> None:
    cluster = await start(prefill=1, decode=1)
    state = cluster.stack.workers.all["prefill-0"]
    # 1. Its last sequence is handed over; what it said of its load before knows nothing of that.
    assert (await cluster.chat()).status == 200
    await nothing_open(cluster)
    answer = await cluster.post("/admin/workers/prefill-0/drain", {}, ADMIN)
    assert (answer.json["state"], answer.json["open"]) == ("draining", 0)
    assert (await cluster.request("DELETE", "/admin/workers/prefill-0", headers=ADMIN)).status == 409
    # 2. Now it does, and the KV is still on its way.
    before = state.load
    cluster.prefill.say(msgspec.structs.replace(cluster.prefill.load, pushing=1))
    await until(lambda: state.load is not before)
    assert state.shown_state == "draining"
    # 3. It has arrived.
    cluster.prefill.say(cluster.prefill.load)
    await until(lambda: state.shown_state == "drained")
    assert (await cluster.request("DELETE", "/admin/workers/prefill-0", headers=ADMIN)).status == 200


async def test_a_worker_more_and_one_less(start: Start) -> None:
    cluster = await start(prefill=1, decode=2)
    late = cluster.fakes["decode-1"]
    workers = cluster.stack.workers
    assert (await cluster.request("DELETE", "/admin/workers/decode-1", headers=ADMIN)).status == 409
    workers.drain(workers.all["decode-1"], True)
    assert (await cluster.request("DELETE", "/admin/workers/decode-1", headers=ADMIN)).json["state"] == "removed"
    assert [route.name for route in cluster.stack.dispatcher.routes] == ["prefill-0>decode-0"]
    for _ in range(3):
        assert (await cluster.chat()).status == 200
    assert not late.heard(Decode)

    new = {"name": "decode-1", "role": "decode", "address": late.address}
    assert (await cluster.post("/admin/workers", new, ADMIN)).status == 200
    known = workers.all["decode-1"]
    assert (await cluster.post("/admin/workers", new, ADMIN)).status == 200
    assert workers.all["decode-1"] is known
    assert (await cluster.post("/admin/workers", {**new, "address": "unix:elsewhere"}, ADMIN)).status == 409
    dispatcher = cluster.stack.dispatcher
    await until(lambda: len(dispatcher.routes) == 2 and all(map(dispatcher.is_proven, dispatcher.routes)))
    for _ in range(4):
        assert (await cluster.chat()).status == 200
    assert late.heard(Decode)


async def test_a_worker_that_is_away_has_no_figures(start: Start) -> None:
    """Those of an incarnation that is gone would be taken for the new one's."""
    cluster = await start(prefill=1, decode=1)

    async def decode() -> dict[str, Any]:
        workers = (await cluster.request("GET", "/admin/state", headers=ADMIN)).json["workers"]
        return next(worker for worker in workers if worker["name"] == "decode-0")

    assert (await decode())["load"]["blocks_total"] == 100
    await cluster.decode.stop()
    await until(lambda: not cluster.stack.workers.all["decode-0"].is_connected)
    found = await decode()
    assert (found["load"], found["load_age_s"], found["heartbeat"]) == (None, None, None)
    await cluster.decode.start()
    await until(lambda: cluster.stack.workers.all["decode-0"].load is not None)
    assert (await decode())["load"]["blocks_total"] == 100
    assert (await decode())["pid"] == 4242


async def test_what_no_request_waits_for(start: Start) -> None:
    """1. Words about a sequence that nobody has, and messages that are for others: passed over, the latter counted.
    2. The connection stays, and the next request is served."""
    cluster = await start(prefill=1, decode=1)
    worker = cluster.stack.workers.all["decode-0"]
    nobody = SeqId("another", 1, 0)
    for channel in cluster.decode._channels:
        channel.send(Tokens((SeqToken(nobody, 0, cluster.decode.token(5)),)))
        channel.send(Done(nobody, "length"))
        channel.send(NotResident(nobody))
        channel.send(AbortAck(nobody))
        channel.send(GrantRequest(nobody, 10))
    await until(lambda: worker.unexpected == 1)
    assert worker.is_connected
    assert (await cluster.chat()).json["choices"][0]["message"]["content"] == HELLO
    await nothing_open(cluster)
