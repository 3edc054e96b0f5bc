"""Outputs as OpenAI's JSON: whole bodies and stream chunks of chat and of completions.

1. A `Format` sees every output of a request in order and makes the chunks for it, or adds it to the choices of a body.
2. First chunk of a chat choice: the role, in one write with the first token. Last: an empty delta with finish_reason.
3. Usage is counted by the job; the stage record rides on the body, or on the last JSON chunk.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from server.router.errors import ApiError
from server.router.generate import Job, Output
from server.router.text import Piece, Text
from server.sequence import Token

LOWEST_LOGPROB = -9999.0
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
_BLANK = "\0"  # stands for a text, and is none
# Line iterators of some clients split at these, within a JSON string too.
_LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _json(data) + b"\n\n"


def _json(data: Any) -> bytes:
    body = _encode(data)
    for raw, escaped in _LINE_ENDS:
        if raw in body:
            body = body.replace(raw, escaped)
    return body


@dataclass(slots=True)
class Choice:
    """One choice so far. What is not sent yet (tokens without text) waits in `pieces` and `ids`."""

    text: str = ""
    offset: int = 0  # of the output within the text: the length of an echo
    pieces: list[Piece] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    is_begun: bool = False
    opening: bytes = b""  # the events that come before the text, of a choice that was made ready
    frame: tuple[bytes, bytes] | None = None  # what is before and after the text in each event that has nothing else


class Format:
    """Base of both. `with_timing` adds the stage record of the first choice."""

    object = ""
    chunk_object = ""

    def __init__(self, job: Job, text: Text, with_timing: bool) -> None:
        self._job = job
        self._text = text
        self._with_timing = with_timing
        self._choices: list[Choice] = []
        self._skip_special = job.request.skip_special_tokens is not False

    # streamed

    def get_ready(self, index: int) -> None:
        """Makes what the events of a choice have in common, while a worker reads the prompt: the first one is waited
        for."""
        choice = self._choice(index)
        if self._is_plain:
            before, after = event(self._chunk(self._content(index, Choice(), _BLANK))).split(_encode(_BLANK))
            choice.opening = b"".join(event(self._chunk(part)) for part in self._opening(index, choice))
            choice.frame = before, after

    def chunks(self, output: Output) -> bytes:
        """The events for `output`, b"" when it has nothing to say yet."""
        choice = self._choice(output.index)
        if choice.frame is not None and not output.finish_reason:
            opening, choice.opening, choice.is_begun = choice.opening, b"", True
            text = output.delta.text
            return opening + _json(text).join(choice.frame) if text else opening
        choice.pieces += output.delta.pieces
        if self._job.request.return_token_ids:
            choice.ids += output.delta.ids
        parts = [] if choice.is_begun else self._opening(output.index, choice)
        choice.is_begun = True
        parts += self._contents(output, choice)
        if output.finish_reason:
            self._finish(output, choice)
            parts.append(self._last(output.index, choice))
        if not parts:
            return b""
        chunks = [self._chunk(part) for part in parts]
        if self._is_over and not self._job.request.include_usage:
            self._add_timing(chunks[-1])
        return b"".join(event(chunk) for chunk in chunks)

    def _contents(self, output: Output, choice: Choice) -> list[dict[str, Any]]:
        """What `output` adds to a stream."""
        if not (output.delta.text or choice.pieces or choice.ids):
            return []
        part = self._content(output.index, choice, output.delta.text)
        choice.pieces, choice.ids = [], []
        return [part]

    @property
    def _is_plain(self) -> bool:
        """Whether two events of a choice differ in their text alone."""
        request = self._job.request
        return not (request.continuous_usage or request.return_token_ids or request.num_logprobs >= 0)

    def _finish(self, output: Output, choice: Choice) -> None:
        choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason

    def usage_chunk(self) -> bytes:
        """The extra last chunk, when it was asked for."""
        if not self._job.request.include_usage:
            return b""
        chunk = {**self._head(self.chunk_object), "choices": [], "usage": self.usage()}
        self._add_timing(chunk)
        return event(chunk)

    def error_event(self, error: ApiError) -> bytes:
        """What a stream says that cannot go on."""
        return event(error.body)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head(self.chunk_object), "choices": [choice]}
        if self._job.request.continuous_usage:
            chunk["usage"] = self.usage()
        return chunk

    @property
    def _is_over(self) -> bool:
        return len(self._choices) > 0 and all(choice.finish_reason for choice in self._choices)

    # whole

    def add(self, output: Output) -> None:
        choice = self._choice(output.index)
        choice.text += output.delta.text
        choice.pieces += output.delta.pieces
        choice.ids += output.delta.ids
        if output.finish_reason:
            self._finish(output, choice)

    def body(self) -> bytes:
        body = {
            **self._head(self.object),
            "choices": [self._whole(index, choice) for index, choice in enumerate(self._choices)],
            "usage": self.usage(),
            **self._extras(),
        }
        self._add_timing(body)
        return _encode(body)

    def _extras(self) -> dict[str, Any]:
        """What else a body has."""
        return {}

    # shared

    def usage(self) -> dict[str, Any]:
        job = self._job
        return {
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": job.completion_tokens,
            "total_tokens": job.prompt_tokens + job.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": job.cached_tokens},
        }

    def _choice(self, index: int) -> Choice:
        if not self._choices:
            self._choices = [self._new_choice(i) for i in range(len(self._job.records))]
        return self._choices[index]

    def _new_choice(self, index: int) -> Choice:
        echo = self._echo(index)
        return Choice(text=echo, offset=len(echo))

    def _which(self, index: int) -> int:
        """The prompt of a choice."""
        return index // self._job.request.num_choices

    def _echo(self, index: int) -> str:
        return self._job.echoes[self._which(index)] if self._job.echoes else ""

    def _prompt_ids(self, index: int) -> list[int]:
        return self._job.prompts[self._which(index)]

    def _prompt_logprobs(self, index: int) -> list[dict[str, Any] | None]:
        """As vLLM has it: one entry a prompt token, by id, the first one null."""
        count = self._job.request.num_prompt_logprobs
        return [None, *(self._by_id(token, count) for token in self._job.prompt_logprobs.get(self._which(index), ()))]

    def _by_id(self, token: Token, count: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for rank, (i, value) in enumerate((*token.top[:count], (token.id, token.logprob)), 1):
            entry = {"logprob": max(value, LOWEST_LOGPROB), "rank": rank if rank <= len(token.top) else None}
            out.setdefault(str(i), {**entry, "decoded_token": self._piece(i)[0]})
        return out

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._job.id, "object": kind, "created": self._job.created, "model": self._job.model}

    def _add_timing(self, body: dict[str, Any]) -> None:
        if self._with_timing and self._job.records:
            body["pdctl"] = self._job.records[0].as_dict()

    def _piece(self, token_id: int) -> tuple[str, bytes]:
        raw = self._text.piece(token_id)
        shown = raw.decode(errors="replace")
        # A special token that the text leaves out adds no bytes to it.
        return shown, b"" if self._skip_special and self._text.is_special(token_id) else raw

    def _opening(self, index: int, choice: Choice) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _content(self, index: int, choice: Choice, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _last(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError


class CompletionFormat(Format):
    object = "text_completion"
    chunk_object = "text_completion"

    def _opening(self, index: int, choice: Choice) -> list[dict[str, Any]]:
        part = self._part(index, choice.text)
        if choice.text and self._job.request.num_logprobs >= 0:
            part["logprobs"] = self._echoed(index, choice)
        if self._job.request.return_token_ids:
            part["prompt_token_ids"] = self._prompt_ids(index)
        return [part] if choice.text or self._job.request.return_token_ids else []

    def _content(self, index: int, choice: Choice, text: str) -> dict[str, Any]:
        part = self._part(index, text)
        if choice.pieces:
            part["logprobs"] = self._logprobs(choice)
        if choice.ids:
            part["token_ids"] = choice.ids
        return part

    def _last(self, index: int, choice: Choice) -> dict[str, Any]:
        return {**self._part(index, ""), "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        body = {
            **self._part(index, choice.text),
            "logprobs": self._all_logprobs(index, choice) if self._job.request.num_logprobs >= 0 else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._job.request.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_logprobs(index)
        if self._job.request.return_token_ids:
            body |= {"prompt_token_ids": self._prompt_ids(index), "token_ids": choice.ids}
        return body

    @staticmethod
    def _part(index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        tokens = [piece.token for piece in choice.pieces]
        return {
            "tokens": [self._piece(token.id)[0] for token in tokens],
            "token_logprobs": [max(token.logprob, LOWEST_LOGPROB) for token in tokens],
            "top_logprobs": [self._top(token.id, token.logprob, token.top) for token in tokens],
            "text_offset": [choice.offset + piece.offset for piece in choice.pieces],
        }

    def _all_logprobs(self, index: int, choice: Choice) -> dict[str, Any]:
        own = self._logprobs(choice)
        if not choice.offset:
            return own
        return {key: part + own[key] for key, part in self._echoed(index, choice).items()}

    def _echoed(self, index: int, choice: Choice) -> dict[str, list[Any]]:
        """Of the prompt's tokens; nothing says how likely the first one was."""
        ids = self._prompt_ids(index)
        known = self._job.prompt_logprobs.get(self._which(index), ())
        return {
            "tokens": [self._piece(i)[0] for i in ids],
            "token_logprobs": [None, *(max(token.logprob, LOWEST_LOGPROB) for token in known)],
            "top_logprobs": [None, *(self._top(token.id, token.logprob, token.top) for token in known)],
            "text_offset": self._job.echo_offsets[self._which(index)],
        }

    def _top(self, token_id: int, logprob: float, top: tuple[tuple[int, float], ...]) -> dict[str, float]:
        """Most likely first; the sampled token's own is always among them."""
        out: dict[str, float] = {}
        for i, value in (*top[: self._job.request.num_logprobs], (token_id, logprob)):
            out.setdefault(self._piece(i)[0], max(value, LOWEST_LOGPROB))
        return out
