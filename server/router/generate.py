"""From a checked request to a stream of outputs: one coroutine owns a request and all its sequences.

1. `Generator.outputs` takes a place in the queue for each choice (429 when there is none) and prepares the job:
   template, tokens, lengths (400).
2. Each choice is one sequence: a route, an attempt, a decoder. Several choices run at once and interleave.
3. Whatever ends it (the last token, an error, the client gone) leaves through `finally`: the attempts abort what is
   left on the workers, the place is given back, records and metrics are written.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from random import getrandbits
from typing import Any

import msgspec

from server.metrics import RouterMetrics
from server.router import structured
from server.router.attempt import Attempt, Refused
from server.router.dispatch import Dispatcher, handle_of
from server.router.errors import ApiError, context_too_long
from server.router.openai import Bounds, Request, pick_seed, sampling
from server.router.stats import Stats
from server.router.text import Decoder, Delta, Text
from server.router.timing import Recent, Record
from server.sequence import SamplingParams, Token

logger = logging.getLogger(__name__)

LONG = 2000  # tokens


class Output(msgspec.Struct):
    """What choice `index` has to add. `finish_reason` comes once, last, without text."""

    index: int
    delta: Delta
    finish_reason: str | None = None
    stop_reason: str | int | None = None


Item = list[Output] | Exception | None  # of one choice among several; None: it is over


class Lead:
    """The first choice of a prompt. The others wait until it has read the prompt, then go the same way: they find its
    KV there, so a prompt is read once whatever n is."""

    def __init__(self) -> None:
        self.has_read = asyncio.Event()
        self.attempt: Attempt | None = None

    def saw(self, index: int) -> None:
        """Its token `index` is here. On a pair the KV is at the decode worker by its second one."""
        if index or self.attempt is None or self.attempt.route.prefill is None:
            self.has_read.set()


@dataclass(slots=True)
class Job:
    """One HTTP request for tokens. `prepare` fills in prompts and lengths."""

    request: Request
    id: str
    request_id: str
    endpoint: str
    model: str
    num_prompts: int = 1
    arrival: float = field(default_factory=time.perf_counter)
    created: int = field(default_factory=lambda: int(time.time()))
    prompts: list[list[int]] = field(default_factory=list)
    max_tokens: list[int] = field(default_factory=list)  # by prompt
    bounds: Bounds = field(default_factory=Bounds)
    prompt_logprobs: dict[int, tuple[Token, ...]] = field(default_factory=dict)  # by prompt, from its second token on
    echoes: list[str] = field(default_factory=list)  # by prompt, what comes before the output
    echo_offsets: list[list[int]] = field(default_factory=list)  # by prompt, where its tokens begin; with logprobs
    records: list[Record] = field(default_factory=list)  # by choice
    completion_tokens: int = 0
    tenant: str = ""  # whose key it came with
    traceparent: str = ""
    handle: str = ""  # of the conversation's last turn, if the client sent one
    attempts: list[Attempt] = field(default_factory=list)  # as they were begun
    on_sent: Callable[[int], None] = lambda index: None  # a choice is with the workers: time for what can be made now

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.request.num_choices

    @property
    def is_long(self) -> bool:
        """Whether its body is so much to write that the streams of others would notice."""
        tells_prompt = bool(self.echoes) or self.request.num_prompt_logprobs >= 0
        return self.completion_tokens + (self.prompt_tokens if tells_prompt else 0) > LONG

    @property
    def next_handle(self) -> str:
        """Names the worker that will hold this conversation's KV, for the next turn."""
        return handle_of(self.attempts[0].route.worker, self.tenant) if self.attempts else ""

    @property
    def salt(self) -> str:
        """Prefixes are shared by those who use the same key and salt, and nobody else. Prompt logprobs need every
        position computed, so such a prompt hits no cached prefix."""
        own = self.id if self.request.num_prompt_logprobs >= 0 else self.request.cache_salt
        return "/".join(filter(None, (self.tenant, own)))

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def cached_tokens(self) -> int:
        """Of each prompt's first choice: the others of an n > 1 find what the first has just read."""
        return sum(record.cached_tokens for record in self.records[:: self.request.num_choices])


def new_id(prefix: str, joint: str = "-") -> str:
    """Not to be met twice, and no secret."""
    return f"{prefix}{joint}{getrandbits(96):024x}"


class Generator:
    def __init__(
        self,
        text: Text,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        recent: Recent,
        stats: Stats,
        request_timeout_s: float,
    ) -> None:
        self._text = text
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._recent = recent
        self._stats = stats
        self._timeout_s = request_timeout_s

    async def outputs(self, job: Job, prepare: Callable[[Job], Awaitable[None]]) -> AsyncGenerator[list[Output], None]:
        """Raises ApiError. Close it to end the request."""
        dispatcher = self._dispatcher
        try:
            dispatcher.admit(job.num_sequences)
        except ApiError as error:
            self._stats.request_over(str(error.status))
            self._metrics.requests.labels(job.endpoint, str(error.status)).inc()
            raise
        begun: set[int] = set()
        status = "cancelled"
        try:
            await prepare(job)
            await dispatcher.some_route()
            self._begin(job)
            async with aclosing(self._choices(job)) as outputs:
                async for batch in outputs:
                    for index in {output.index for output in batch} - begun:
                        begun.add(index)
                        dispatcher.note_first_token()
                    yield batch
            status = "200"
        except ApiError as error:
            status = str(error.status)
            raise
        except Refused as error:
            status = "400"
            raise structured.refused(job.bounds.field, error.message, "grammar_limit") from error
        except Exception:
            status = "500"  # ours; "cancelled" is a client that left
            raise
        finally:
            dispatcher.leave(job.num_sequences, len(begun))
            self._end(job, status)

    def _begin(self, job: Job) -> None:
        job.records = [
            Record(
                arrival=job.arrival,
                request=job.request_id,
                traceparent=job.traceparent,
                endpoint=job.endpoint,
                stats=self._stats,
            )
            for _ in range(job.num_sequences)
        ]
        self._recent.add(job.id, job.request_id, job.records)

    def _choices(self, job: Job) -> AsyncGenerator[list[Output], None]:
        """The outputs of all of them, as they come."""
        seed = pick_seed(job.request)
        leads = [Lead() for _ in job.prompts]
        n = job.request.num_choices
        choices = [self._choice(job, index, seed, leads[index // n]) for index in range(len(job.records))]
        return choices[0] if len(choices) == 1 else _interleaved(choices)

    async def _choice(self, job: Job, index: int, seed: int, lead: Lead) -> AsyncGenerator[list[Output], None]:
        request, record = job.request, job.records[index]
        which, choice = divmod(index, request.num_choices)
        prompt, max_tokens = job.prompts[which], job.max_tokens[which]
        if choice:
            await lead.has_read.wait()
        params = self._params(job, which, choice, seed)
        if max_tokens == 0 and params.num_prompt_logprobs < 0:  # echo only: nothing for a worker to do
            record.prompt_tokens, record.reason = len(prompt), "length"
            lead.has_read.set()
            yield [Output(index, Delta(), "length")]
            return
        stop: str | int | None = None
        last_id = -1
        same = lead.attempt.plan if lead.attempt is not None else None
        pinned = self._dispatcher.pinned(job.handle, job.tenant)
        plan = self._dispatcher.choose(prompt, job.salt, pinned, same)
        attempt = self._dispatcher.open(plan, prompt, params, record, salt=job.salt, deadline_s=self._timeout_s)
        lead.attempt = lead.attempt or attempt
        async with attempt:
            decoder = self._decoder(request, prompt, params)  # while the worker reads the prompt
            job.attempts.append(attempt)
            job.on_sent(index)
            last: Delta | None = None
            while last is None and await attempt.more():
                batch: list[Output] = []
                while last is None and (token := attempt.next()) is not None:
                    if token.prompt:
                        job.prompt_logprobs[which] = token.prompt
                    if max_tokens == 0:
                        record.reason, last = "length", Delta()
                        break
                    lead.saw(record.output_tokens - 1)
                    last_id = token.id
                    delta = decoder.feed(token)
                    if delta.is_stopped:
                        stop, record.reason, last = delta.stop, "stop", delta
                    else:
                        batch.append(Output(index, delta))
                if batch:
                    yield batch
            if last is None:
                last = decoder.finish()
                if attempt.reason == "stop" and last_id in (request.stop_token_ids or ()):
                    stop = last_id
        lead.has_read.set()  # also where it was over before its second token
        # The workers are free of it before the client hears of the end.
        rest = [Output(index, last)] if last.text or last.ids or last.pieces else []
        yield [*rest, Output(index, Delta(), record.reason, stop)]

    def _params(self, job: Job, which: int, choice: int, seed: int) -> SamplingParams:
        params = sampling(
            job.request,
            max_tokens=job.max_tokens[which] or 1,  # a worker samples at least one token
            eos_ids=self._text.eos_ids,
            vocab_size=self._text.vocab_size,
            seed=seed + choice,
            bounds=job.bounds,
        )
        return msgspec.structs.replace(params, num_prompt_logprobs=-1) if choice else params

    def _decoder(self, request: Request, prompt: list[int], params: SamplingParams) -> Decoder:
        return Decoder(
            self._text,
            prompt,
            stops=request.stops,
            include_stop=bool(request.include_stop_str_in_output),
            skip_special=request.skip_special_tokens is not False,
            min_tokens=params.min_tokens,
            end_ids=frozenset(params.stop_token_ids),
            want_pieces=params.num_logprobs >= 0,
        )

    def _end(self, job: Job, status: str) -> None:
        metrics = self._metrics
        metrics.requests.labels(job.endpoint, status).inc()
        self._stats.request_over(status)
        for record in job.records:
            record.reason = record.reason or "aborted"
            if record.path:
                _observe(metrics, self._stats, record)
                self._dispatcher.observe(record)
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


async def _interleaved(choices: list[AsyncGenerator[list[Output], None]]) -> AsyncGenerator[list[Output], None]:
    """What several choices say, each from a task of its own. Ends with them, or with the first error of one."""
    # Bounded, so that choices wait for a client that does not read, as a single one does.
    queue: asyncio.Queue[Item] = asyncio.Queue(len(choices))
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


async def _pump(choice: AsyncGenerator[list[Output], None], queue: "asyncio.Queue[Item]") -> None:
    try:
        async with aclosing(choice) as outputs:
            async for batch in outputs:
                await queue.put(batch)
    except Exception as error:  # it is raised again where the queue is read
        await queue.put(error)
    else:
        await queue.put(None)


def _observe(metrics: RouterMetrics, stats: Stats, record: Record) -> None:
    """The sequence is over: into the counters since the start, and into the last minute."""
    metrics.sequences.labels(record.path, record.reason).inc()
    metrics.prompt_tokens.inc(record.prompt_tokens)
    metrics.output_tokens.inc(record.output_tokens)
    metrics.cached_tokens.inc(record.cached_tokens)
    stages = record.as_dict()
    seconds = _seconds(record, stages)
    for name, histogram in metrics.stages.items():
        if name in seconds:
            histogram.observe(seconds[name])
    for name in ("kv_bytes", "wire_bytes", "chunks", "resends"):
        getattr(metrics, name).inc(stages[name] or 0)
    if stages["cut"] is not None:
        metrics.cuts.inc()
        metrics.cut_tokens.inc(stages["cut"])
    metrics.overlapped_bytes.inc((stages["overlap"] or 0) * (stages["kv_bytes"] or 0))
    stats.sequence_over(
        prefill=record.prefill,
        decode=record.decode,
        prompt_tokens=record.prompt_tokens,
        read_tokens=record.prompt_tokens - record.cached_tokens,
        seconds=seconds,
        kv_bytes=stages["kv_bytes"] or 0,
        resends=stages["resends"] or 0,
    )


def _seconds(record: Record, stages: dict[str, Any]) -> dict[str, float]:
    """What is known of each stage."""
    seconds: dict[str, float] = {}
    if record.first:
        seconds["ttft"] = record.first - record.arrival
        seconds["e2e"] = record.last - record.arrival
        seconds["queue"] = record.sent - record.arrival
    if record.second:
        seconds["second_token"] = record.second - record.first
        seconds["tpot"] = (record.last - record.first) / (record.output_tokens - 1)
    for name in ("prefill_queue", "grant_wait", "transfer", "decode_queue"):
        if stages[f"{name}_ms"] is not None:
            seconds[name] = stages[f"{name}_ms"] / 1000
    if stages["prefill_end_ms"] is not None and stages["prefill_start_ms"] is not None:
        seconds["prefill"] = (stages["prefill_end_ms"] - stages["prefill_start_ms"]) / 1000
    if stages["first_chunk_ms"] is not None and stages["prefill_start_ms"] is not None:
        seconds["kv_transfer_first_chunk"] = max(0.0, (stages["first_chunk_ms"] - stages["prefill_start_ms"]) / 1000)
    return seconds


def lengths(job: Job, max_len: int, param: str) -> list[int]:
    """max_tokens for each prompt: as asked, clamped to the room left. Raises ApiError 400 where there is none."""
    asked = job.request.limit
    out = []
    for prompt in job.prompts:
        room = max_len - len(prompt)
        if room < (0 if asked == 0 and job.request.num_prompt_logprobs < 0 else 1):
            raise context_too_long(max_len, len(prompt), param)
        out.append(room if asked is None else min(asked, room))
    return out
