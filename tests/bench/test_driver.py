"""The load generator: when it sends, what it counts, and that its stamps are those of an independent client."""

import asyncio
import time
from statistics import fmean, median

import pytest
from openai import AsyncOpenAI

from pdctl.bench.driver import Driver, Run, Server
from pdctl.bench.loads import Loop, Shape, endless, items
from tests.bench.fake_server import running


async def drive(url: str, loop: Loop, count: int, *, shape: Shape | None = None, limit_s: float = 0.0) -> Run:
    async with Driver(Server(url, "key", "fake", timeout_s=20)) as driver:
        return await driver.run(items(shape or Shape(20, 8), loop, count, seed=1), loop, limit_s=limit_s)


async def test_closed_loop_counts_what_came() -> None:
    async with running() as fake:
        run = await drive(fake.url, Loop(concurrency=3), 9)
    assert (len(run.samples), run.dropped) == (6, 3)
    assert all(s.is_good and s.output_tokens == 8 and s.prompt_tokens == 20 and len(s.times) == 8 for s in run.samples)
    assert fake.num_connections == 3, "a user keeps its connection"
    body = fake.requests[0]
    assert (body["max_tokens"], body["ignore_eos"], len(body["prompt"])) == (8, True, 20)


async def test_never_more_at_once_than_users() -> None:
    async with running(first_s=0.02) as fake:
        run = await drive(fake.url, Loop(concurrency=2), 8)
    spans = sorted((s.sent, s.last) for s in run.samples)
    assert max(sum(a <= t < b for a, b in spans) for t, _ in spans) <= 2


async def test_users_are_at_work_until_the_last_one_ended() -> None:
    """Two users and three requests after the first wave: whoever has none left goes on with others."""
    loop, shape = Loop(concurrency=2), Shape(20, 8)
    async with running(first_s=0.1) as fake, Driver(Server(fake.url, "key", "fake", timeout_s=20)) as driver:
        load, more = items(shape, loop, 5, seed=1), endless(shape, loop, seed=2)
        run = await driver.run(load, loop, more=more)
    assert (len(run.samples), run.dropped) == (3, 2)
    assert len(fake.requests) >= 6, "one more while the third was answered"
    each = fmean(s.last - s.sent for s in run.samples)
    assert run.num_done / run.seconds == pytest.approx(2 / each, rel=0.3), "two at a time"


async def test_a_limit_ends_a_cell_after_two_each() -> None:
    async with running() as fake:
        run = await drive(fake.url, Loop(concurrency=2), 1000, limit_s=0.01)
    assert len(run.samples) == 2


async def test_one_user_alone_has_no_first_wave() -> None:
    """All users start at once only where there are several: of one alone every request counts, one at the least."""
    async with running() as fake:
        whole = await drive(fake.url, Loop(concurrency=1), 3)
        short = await drive(fake.url, Loop(concurrency=1), 3, limit_s=0.001)
    assert (len(whole.samples), whole.dropped, whole.num_done) == (3, 0, 3)
    assert (len(short.samples), short.dropped) == (1, 0)
    assert whole.seconds == pytest.approx(sum(s.last - s.sent for s in whole.samples), rel=0.1)


async def test_open_loop_keeps_its_moments() -> None:
    async with running(first_s=0.2) as fake:
        run = await drive(fake.url, Loop(rate=50.0), 50)
    load = items(Shape(20, 8), Loop(rate=50.0), 50, seed=1)[run.dropped :]
    offsets = [s.sent - item.at for s, item in zip(run.samples, load, strict=True)]
    assert max(offsets) - min(offsets) < 1e-6, "TTFT counts from the moment it was due"
    assert sorted(run.lags)[25] < 0.05


async def test_conversation_sends_what_was_said() -> None:
    async with running(first_s=0.0, gap_s=0.0) as fake:
        await drive(fake.url, Loop(concurrency=1), 2, shape=Shape(20, 8, turns=3))
    prompts = [r["prompt"] for r in fake.requests]
    assert [len(p) for p in prompts[:3]] == [20, 48, 76]
    assert prompts[1][:28] == prompts[0] + [5] * 8


async def test_failures_are_samples() -> None:
    async with running(fails_every=2) as fake:
        run = await drive(fake.url, Loop(concurrency=1), 7)
    assert [s.is_good for s in run.samples].count(False) == 3
    assert any("no luck" in s.error for s in run.samples)


async def test_nobody_there() -> None:
    async with Driver(Server("http://127.0.0.1:9", "key", "fake")) as driver:
        assert "cannot be reached" in (await driver.send([1], 1)).error


async def test_half_an_answer_is_an_error() -> None:
    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nda")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(rude, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Driver(Server(f"http://127.0.0.1:{port}", "key", "fake")) as driver:
        assert "ended early" in (await driver.send([1], 1)).error


async def test_agrees_with_the_openai_client() -> None:
    """TTFT and TPOT within 3 % of a plain timing loop around the openai package.

    Both ask one server at the same moment, so that a busy machine delays both alike.
    """
    theirs: list[tuple[float, float]] = []
    ours: list[tuple[float, float]] = []
    async with running(first_s=0.5, gap_s=0.03) as fake:
        client = AsyncOpenAI(base_url=f"{fake.url}/v1", api_key="key")
        async with client, Driver(Server(fake.url, "key", "fake")) as driver:
            for _ in range(6):
                answer, sample = await asyncio.gather(by_openai(client, 10), driver.send([7] * 20, 10))
                theirs.append(answer)
                assert sample.tpot is not None
                ours.append((sample.ttft, sample.tpot))
    for index in range(2):
        mine, others = (median(pair[index] for pair in pairs[1:]) for pairs in (ours, theirs))
        assert mine == pytest.approx(others, rel=0.03)


async def by_openai(client: AsyncOpenAI, count: int) -> tuple[float, float]:
    sent, times = time.perf_counter(), []
    stream = await client.completions.create(model="fake", prompt="x" * 20, max_tokens=count, stream=True)
    async for event in stream:
        if event.choices and event.choices[0].text:
            times.append(time.perf_counter())  # noqa: PERF401  # it reads as a timing loop
    return times[0] - sent, (times[-1] - times[0]) / (count - 1)


async def test_light_enough_for_many_streams() -> None:
    """64 streams at once: the stamps stay where the server's clock put them."""
    async with running(first_s=0.1, gap_s=0.02) as fake:
        run = await drive(fake.url, Loop(concurrency=64), 128, shape=Shape(16, 20))
    assert fmean(s.tpot or 0 for s in run.samples) == pytest.approx(0.02, rel=0.15)
