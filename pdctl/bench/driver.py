"""Sends a load to one server and brings back the samples.

closed   `concurrency` users, each sends its next request when its last one ended. The first wave (one request a user)
         is dropped: all of them start at once, which no later ones do (a user alone has none). Who has nothing left to
         send while others wait for their last answer sends more of the same, which is not counted: all of it was
         measured with so many users.
open     requests leave at their moments, whatever is still under way. The first tenth is dropped.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdctl.bench.http1 import BrokenOff, Pool
from pdctl.bench.loads import Item, Loop
from pdctl.bench.sample import Sample, from_answer

_encode = msgspec.json.encode


@dataclass(slots=True)
class Server:
    """Where to send. `model` is the name in the body."""

    url: str
    key: str
    model: str
    timeout_s: float = 600.0


@dataclass(slots=True)
class Run:
    """What came of one load. `since` and `until` bound the time in which requests that end count for their rate: of a
    closed loop from the end of its first wave, so that as much is begun before it and ended in it as the other way."""

    samples: list[Sample]
    since: float
    until: float
    dropped: int = 0
    lags: list[float] = field(default_factory=list)  # how late an open loop sent
    others: list[float] = field(default_factory=list)  # ends of good requests that are no samples

    @property
    def num_done(self) -> int:
        ends = [*(s.last for s in self.samples if s.is_good), *self.others]
        return sum(self.since < end <= self.until for end in ends)

    @property
    def seconds(self) -> float:
        return max(1e-9, self.until - self.since)


class Driver:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._pool = Pool(server.url, server.key)

    async def __aenter__(self) -> "Driver":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pool.close()

    async def send(self, prompt: list[int], output: int) -> Sample:
        return await self.post("/v1/completions", self._body(prompt, output))

    async def post(self, path: str, body: dict[str, Any]) -> Sample:
        """Never raises for what the server does: a failed request is a sample with an error."""
        encoded = _encode(body)
        sent = time.perf_counter()
        try:
            async with asyncio.timeout(self._server.timeout_s):
                answer = await self._pool.post(path, encoded, "x-pdctl-timing: 1\r\n")
        except BrokenOff as error:
            return Sample(sent, error=str(error))
        except TimeoutError:
            return Sample(sent, error=f"no end after {self._server.timeout_s:g} s")
        return from_answer(sent, answer)

    def _body(self, prompt: list[int], output: int) -> dict[str, Any]:
        return {
            "model": self._server.model,
            "prompt": prompt,
            "max_tokens": output,
            "min_tokens": output,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }

    async def run(
        self,
        items: list[Item],
        loop: Loop,
        *,
        more: Iterable[Item] = (),
        limit_s: float = 0.0,
        tell: Callable[[int], None] = lambda n: None,
    ) -> Run:
        """`more`: what a closed loop goes on with until all of `items` ended. `limit_s`: no new one of these is sent
        after that, once every user has one that counts. `tell` hears how many ended."""
        if loop.is_open:
            return await self._open(items, tell)
        await self._pool.open(loop.concurrency)
        return await self._closed(items, iter(more), loop, limit_s, tell)

    async def _closed(
        self, items: list[Item], more: Iterator[Item], loop: Loop, limit_s: float, tell: Callable[[int], None]
    ) -> Run:
        queue = iter(items)
        samples: list[Sample] = []
        first_wave: list[Sample] = []
        after: list[Sample] = []
        begun = time.perf_counter()
        stops = begun + limit_s if limit_s else float("inf")
        num_uncounted = 1 if loop.first_wave else 0  # of each user

        async def user(number: int) -> None:
            num_sent = 0
            while (time.perf_counter() < stops or num_sent <= num_uncounted) and (
                item := next(queue, None)
            ) is not None:
                for sample in await self._turns(item):
                    (samples if num_sent >= num_uncounted else first_wave).append(sample)
                    num_sent += 1
                    tell(len(samples) + len(first_wave))

        async def go_on(mine: asyncio.Task[None]) -> None:
            await mine
            for item in more:
                after.extend(await self._turns(item))

        counted = [asyncio.create_task(user(n)) for n in range(loop.concurrency)]
        fillers = [asyncio.create_task(go_on(task)) for task in counted]
        try:
            await asyncio.gather(*counted)
        finally:
            for task in (*counted, *fillers):
                task.cancel()
            await asyncio.gather(*fillers, return_exceptions=True)
        since, until = (max((s.last for s in seen), default=begun) for seen in (first_wave, samples))
        if until <= since:  # too few to tell; what there is
            since = min((s.sent for s in samples), default=begun)
        others = [s.last for s in (*first_wave, *after) if s.is_good]
        return Run(samples, since, until, len(first_wave), others=others)

    async def _turns(self, item: Item) -> list[Sample]:
        """A conversation: each further turn sends all that was said, then something new."""
        samples = [await self.send(item.prompt, item.output)]
        said = item.prompt
        for more in item.then:
            if not samples[-1].is_good:
                break
            said = said + samples[-1].ids + more
            samples.append(await self.send(said, item.output))
        return samples

    async def _open(self, items: list[Item], tell: Callable[[int], None]) -> Run:
        begun = time.perf_counter() + 0.05
        tasks: list[asyncio.Task[Sample]] = []
        lags: list[float] = []
        num_done = 0

        def ended(_: asyncio.Task[Sample]) -> None:
            nonlocal num_done
            num_done += 1
            tell(num_done)

        for item in items:
            await _until(begun + item.at)
            lags.append(time.perf_counter() - begun - item.at)
            task = asyncio.create_task(self._due(item, begun + item.at))
            task.add_done_callback(ended)
            tasks.append(task)
        samples = list(await asyncio.gather(*tasks))
        dropped = len(samples) // 10
        kept = samples[dropped:]
        since, until = min(s.sent for s in kept), max(s.last for s in kept)
        return Run(kept, since, until, dropped, lags)

    async def _due(self, item: Item, due: float) -> Sample:
        """TTFT counts from the moment it was due: a client that is late must not make the server look early."""
        sample = await self.send(item.prompt, item.output)
        sample.sent = due
        return sample


async def _until(moment: float) -> None:
    """Sleeps, for the timer of a loop may be a millisecond late, and yields the rest of the way."""
    while (left := moment - time.perf_counter()) > 0:  # noqa: ASYNC110  # the clock has no event
        await asyncio.sleep(left - 0.001 if left > 0.002 else 0)
