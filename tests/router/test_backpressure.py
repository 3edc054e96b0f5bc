"""A client that does not read its stream: the worker is told to pause, and to go on when it reads. Clients that are too
many: each is told when to come back."""

from types import SimpleNamespace

import pytest

from server.config import Config
from server.messages import Abort, Card, Decode, Pause, Resume
from server.router import dispatch
from server.router.errors import ApiError
from server.router.workers import Workers
from server.wire import Identity
from tests.router.conftest import Start, read_answer, until

NUM_TOKENS = 7000  # more than sockets hold, several events a segment


@pytest.mark.parametrize("pools", [{"prefill": 1, "decode": 1}, {"colocated": 1}], ids=["pd", "colocated"])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_does_not_read_pauses_its_sequences(start: Start, pools: dict[str, int], n: int) -> None:
    cluster = await start(**pools, send_buffer=4096)
    [word] = cluster.text.tokenizer.encode(" a").ids
    for fake in cluster.fakes.values():
        fake.reply = lambda prompt: [word] * NUM_TOKENS
    worker = cluster.fakes.get("decode-0") or cluster.colocated
    # 1. All tokens are written at once; the client asks for them and reads none.
    body = {"prompt": "Once", "max_tokens": NUM_TOKENS, "stream": True, "n": n}
    reader, writer = await cluster.send("POST", "/v1/completions", body)
    inboxes = cluster.stack.workers.all[worker.name].open
    await until(lambda: len(inboxes) == n and all(inbox.is_paused for inbox in inboxes.values()))
    paused = set(inboxes)
    assert {pause.id for pause in await worker.saw(Pause, n)} == paused
    # 2. It reads: each goes on, and every token comes, once.
    answer = await read_answer(reader)
    writer.close()
    assert {resume.id for resume in await worker.saw(Resume, n)} == paused
    texts = dict.fromkeys(range(n), "")
    for event in answer.events:
        [choice] = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(n), " a" * NUM_TOKENS)
    assert len(worker.heard(Pause)) == len(worker.heard(Resume))


async def test_decode_is_told_too_when_it_takes_over(start: Start) -> None:
    """Prefill, which decodes while decode is full, was told and did not heed it. Decode is the next to say tokens."""
    cluster = await start(prefill=1, decode=1, send_buffer=4096)
    [word] = cluster.text.tokenizer.encode(" a").ids
    for fake in cluster.fakes.values():
        fake.reply = lambda prompt: [word] * NUM_TOKENS
        fake.stepwise = True
    cluster.prefill.runs_ahead = True
    body = {"prompt": "Once", "max_tokens": NUM_TOKENS, "stream": True}
    _, writer = await cluster.send("POST", "/v1/completions", body)
    await cluster.decode.saw(Decode)
    cluster.prefill.step(NUM_TOKENS - 1)
    (pause,) = await cluster.prefill.saw(Pause)
    assert not cluster.decode.heard(Pause)
    cluster.decode.step(1)
    assert await cluster.decode.saw(Pause) == [pause]
    writer.close()


async def test_a_client_that_leaves_without_reading_has_its_sequence_aborted(start: Start) -> None:
    cluster = await start(colocated=1, send_buffer=4096)
    [word] = cluster.text.tokenizer.encode(" a").ids
    cluster.colocated.reply = lambda prompt: [word] * NUM_TOKENS
    worker = cluster.colocated
    body = {"prompt": "Once", "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}
    worker.stepwise = True
    _, writer = await cluster.send("POST", "/v1/completions", body)
    worker.step(NUM_TOKENS - 1)
    pause = (await worker.saw(Pause))[0]
    writer.transport.abort()
    assert [abort.id for abort in await worker.saw(Abort)] == [pause.id]


async def test_a_client_that_reads_is_never_paused(start: Start) -> None:
    cluster = await start(colocated=1)
    [word] = cluster.text.tokenizer.encode(" a").ids
    cluster.colocated.reply = lambda prompt: [word] * NUM_TOKENS
    for stream in (True, False):
        answer = await cluster.complete(max_tokens=NUM_TOKENS, stream=stream)
        assert answer.status == 200
    assert not cluster.colocated.heard(Pause)


def test_retry_after_is_how_long_the_queue_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. After an hour of silence 50 come at once: who is refused then may try again soon. 2. Two seconds later 20 have
    their first token: the other 30 take three more. 3. No token for a long while: the most that is ever said. 4. The
    queue empties, an hour passes: as at first, whatever there was before."""
    now = 1000.0
    monkeypatch.setattr(dispatch, "time", SimpleNamespace(monotonic=lambda: now))
    config = Config.model_validate({"colocated": {"workers": 1}, "router": {"queue_high": 50}})
    me = Identity("router", "router", "1")
    queue = dispatch.Dispatcher(Workers({}, {}, me=me, secret=b"", card=Card({})), config, 4096)

    def retry_after() -> int | None:
        queue.waiting = max(queue.waiting, 50)  # as if those that began had been followed by others
        with pytest.raises(ApiError) as refused:
            queue.admit(1)
        return refused.value.retry_after_s

    for _ in range(2):
        queue.admit(50)
        now += 0.3
        assert retry_after() == 1
        now += 1.7
        for _ in range(20):
            queue.note_first_token()
        assert queue.waiting == 30
        assert queue._retry_after_s() == 3
        now += 100
        assert retry_after() == dispatch.MAX_RETRY_AFTER_S
        queue.leave(queue.in_flight, queue.running)
        assert not queue.in_flight
        now += 3600
