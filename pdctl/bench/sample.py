"""One measured request, and how an answer's events become one."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdctl.bench.http1 import Answer


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    """What of an event matters here; everything else is passed over."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    pdctl: dict[str, Any] | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class Sample:
    """Times in seconds on the client's clock. `times` holds the moment of every event that brought tokens."""

    sent: float  # in an open loop: when it was due
    times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    record: dict[str, Any] = field(default_factory=dict)  # the server's stages, where it tells them
    error: str = ""

    @property
    def is_good(self) -> bool:
        return not self.error and bool(self.times)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def last(self) -> float:
        return self.times[-1] if self.times else self.sent

    @property
    def tpot(self) -> float | None:
        """None for one token."""
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Between events; the first is the hand-over gap, from the first token to the second."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


def from_answer(sent: float, answer: Answer) -> Sample:
    sample = Sample(sent)
    if answer.status != 200:
        sample.error = f"HTTP {answer.status}: {answer.body[:200].decode(errors='replace')}"
        return sample
    is_over = False
    for at, raw in answer.events:
        data = raw[5:].strip()
        if data == b"[DONE]":
            is_over = True
            break
        _take(sample, at, data)
        if sample.error:
            return sample
    if not is_over:
        sample.error = "the stream ended without [DONE]"
    elif not sample.times:
        sample.error = "the stream brought no token"
    return sample


def _take(sample: Sample, at: float, data: bytes) -> None:
    try:
        event = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        sample.error = f"an event is not as OpenAI's: {error}"
        return
    if event.error:
        sample.error = f"error in the stream: {event.error}"
        return
    if event.usage is not None:
        sample.prompt_tokens = event.usage.prompt_tokens
        sample.output_tokens = event.usage.completion_tokens
    if event.pdctl:
        sample.record = event.pdctl
    for choice in event.choices[:1]:
        if _brings_token(choice):
            sample.times.append(at)
            sample.ids += choice.token_ids or ()


def _brings_token(choice: _Choice) -> bool:
    """Ids say it exactly. Text is what other servers send, and a token may have none."""
    if choice.token_ids is not None:
        return bool(choice.token_ids)
    delta = choice.delta
    return bool(choice.text or (delta and (delta.content or delta.reasoning_content)))
