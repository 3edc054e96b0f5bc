"""From a checked request to a stream of outputs: one coroutine owns a request and all its sequences.

1. `Generator.outputs` takes a place in the queue (429 when there is none) and prepares the job: template, tokens,
   lengths (400).
2. Each choice is one sequence: a route, an attempt, a decoder. Several choices run at once and interleave.
3. Whatever ends it (the last token, an error, the client gone) leaves through `finally`: the attempts abort what is
   left on the workers, the place is given back, records and metrics are written.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from server.metrics import RouterMetrics
from server.router.dispatch import Dispatcher
from server.router.errors import ApiError, context_too_long
from server.router.openai import Bounds, Request, pick_seed, sampling
from server.router.text import Decoder, Delta, Text
from server.router.timing import Recent, Record

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Output:
    """What choice `index` has to add. `finish_reason` comes once, last, without text."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class Job:
    """One HTTP request for tokens. `prepare` fills in prompts and lengths."""

    request: Request
    id: str
    request_id: str
    endpoint: str
    model: str
    arrival: float = field(default_factory=time.perf_counter)
    created: int = field(default_factory=lambda: int(time.time()))
    prompts: list[list[int]] = field(default_factory=list)
    max_tokens: list[int] = field(default_factory=list)  # by prompt
    bounds: Bounds = Bounds()
    echoes: list[str] = field(default_factory=list)  # by prompt, what comes before the output
    records: list[Record] = field(default_factory=list)  # by choice
    completion_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def cached_tokens(self) -> int:
        """Of each prompt's first choice: the others of an n > 1 find what the first has just read."""
        return sum(record.cached_tokens for record in self.records[:: self.request.num_choices])


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


class Generator:
    def __init__(
        self, text: Text, dispatcher: Dispatcher, metrics: RouterMetrics, recent: Recent, request_timeout_s: float
    ) -> None:
        self._text = text
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._recent = recent
        self._timeout_s = request_timeout_s

    async def outputs(self, job: Job, prepare: Callable[[Job], Awaitable[None]]) -> AsyncGenerator[Output, None]:
        """Raises ApiError. Close it to end the request."""
        dispatcher = self._dispatcher
        dispatcher.admit()
        has_first = False
        status = "cancelled"
        try:
            await prepare(job)
            self._begin(job)
            async with aclosing(self._choices(job)) as outputs:
                async for output in outputs:
                    if not has_first:
                        has_first = True
                        dispatcher.note_first_token()
                    job.completion_tokens += len(output.delta.ids)
                    yield output
            status = "200"
        except ApiError as error:
            status = str(error.status)
            raise
        finally:
            dispatcher.leave(has_first=has_first)
            self._end(job, status)

    def _begin(self, job: Job) -> None:
        count = len(job.prompts) * job.request.num_choices
        job.records = [Record(arrival=job.arrival, request=job.request_id) for _ in range(count)]
        self._recent.add(job.id, job.request_id, job.records)

    async def _choices(self, job: Job) -> AsyncGenerator[Output, None]:
        seed = pick_seed(job.request)
        choices = [self._choice(job, index, seed) for index in range(len(job.records))]
        if len(choices) == 1:
            async with aclosing(choices[0]) as outputs:
                async for output in outputs:
                    yield output
            return
        queue: asyncio.Queue[Output | Exception | None] = asyncio.Queue()
        tasks = [asyncio.create_task(_pump(choice, queue)) for choice in choices]
        try:
            ended = 0
            while ended < len(tasks):
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    ended += 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _choice(self, job: Job, index: int, seed: int) -> AsyncGenerator[Output, None]:
        request, record = job.request, job.records[index]
        which, choice = divmod(index, request.num_choices)
        prompt, max_tokens = job.prompts[which], job.max_tokens[which]
        if max_tokens == 0:  # echo only: nothing for a worker to do
            record.prompt_tokens, record.reason = len(prompt), "length"
            yield Output(index, Delta(), "length")
            return
        params = sampling(
            request,
            max_tokens=max_tokens,
            eos_ids=self._text.eos_ids,
            vocab_size=self._text.vocab_size,
            seed=seed + choice,
            bounds=job.bounds,
        )
        decoder = Decoder(
            self._text,
            prompt,
            stops=request.stops,
            include_stop=bool(request.include_stop_str_in_output),
            skip_special=request.skip_special_tokens is not False,
            min_tokens=params.min_tokens,
            end_ids=frozenset(params.stop_token_ids),
            want_pieces=params.num_logprobs >= 0,
        )
        stop: str | int | None = None
        last_id = -1
        route = self._dispatcher.choose(len(prompt))
        attempt = self._dispatcher.open(
            route, prompt, params, record, salt=request.cache_salt or "", deadline_s=self._timeout_s
        )
        async with attempt:
            while (token := await attempt.next()) is not None:
                last_id = token.id
                delta = decoder.feed(token)
                if delta.is_stopped:
                    stop, record.reason = delta.stop, "stop"
                    break
                yield Output(index, delta)
            else:
                delta = decoder.finish()
                if attempt.reason == "stop" and last_id in (request.stop_token_ids or ()):
                    stop = last_id
        # The workers are free of it before the client hears of the end.
        if delta.text or delta.ids or delta.pieces:
            yield Output(index, delta)
        yield Output(index, Delta(), record.reason, stop)

    def _end(self, job: Job, status: str) -> None:
        metrics = self._metrics
        metrics.requests.labels(job.endpoint, status).inc()
        for record in job.records:
            if record.path:
                _observe(metrics, record)
        first = job.records[0] if job.records else Record(arrival=job.arrival)
        fields = {
            "id": job.id,
            "status": status,
            "path": first.path or "-",
            "workers": ">".join(filter(None, (first.prefill, first.decode))) or "-",
            "ttft_ms": round((first.first - first.arrival) * 1000, 1) if first.first else None,
            "total_ms": round((time.perf_counter() - job.arrival) * 1000, 1),
            "prompt_tokens": job.prompt_tokens,
            "output_tokens": job.completion_tokens,
        }
        logger.info("%s", job.endpoint, extra={"fields": fields})


async def _pump(choice: AsyncGenerator[Output, None], queue: "asyncio.Queue[Output | Exception | None]") -> None:
    try:
        async with aclosing(choice) as outputs:
            async for output in outputs:
                queue.put_nowait(output)
    except Exception as error:  # it is raised again where the queue is read
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)


def _observe(metrics: RouterMetrics, record: Record) -> None:
    metrics.sequences.labels(record.path, record.reason or "aborted").inc()
    metrics.prompt_tokens.inc(record.prompt_tokens)
    metrics.output_tokens.inc(record.output_tokens)
    metrics.cached_tokens.inc(record.cached_tokens)
    seconds = metrics.stages
    if record.first:
        seconds["ttft"].observe(record.first - record.arrival)
        seconds["e2e"].observe(record.last - record.arrival)
        seconds["queue"].observe(record.sent - record.arrival)
    if record.second:
        seconds["second_token"].observe(record.second - record.first)
        seconds["tpot"].observe((record.last - record.first) / (record.output_tokens - 1))
    stages = record.as_dict()
    for name in ("prefill_queue", "grant_wait", "transfer", "decode_queue"):
        if stages[f"{name}_ms"] is not None:
            seconds[name].observe(stages[f"{name}_ms"] / 1000)
    for name in ("kv_bytes", "wire_bytes", "resends"):
        getattr(metrics, name).inc(stages[name] or 0)


def lengths(job: Job, max_len: int, param: str) -> list[int]:
    """max_tokens for each prompt: as asked, clamped to the room left. Raises ApiError 400 where there is none."""
    asked = job.request.limit
    out = []
    for prompt in job.prompts:
        room = max_len - len(prompt)
        if room < (0 if asked == 0 else 1):
            raise context_too_long(max_len, len(prompt), param)
        out.append(room if asked is None else min(asked, room))
    return out
