"""Chat outputs as OpenAI's JSON: messages, deltas, and tool calls found in the text.

1. With tools, all text of a choice goes through its `CallParser`, streamed or not: the same calls either way.
2. A stream's tool deltas come without empty content beside them; logprobs ride on whatever goes out next.
3. finish_reason is "tool_calls" when the model chose to call or had to; a named function ends as it ends.
"""

from dataclasses import dataclass, field
from typing import Any

from server.router.calls import CallDelta, CallParser, Style
from server.router.generate import Job, Output
from server.router.render import LOWEST_LOGPROB, Choice, Format
from server.router.text import Piece, Text
from server.router.tools import ToolUse


@dataclass(slots=True)
class Calls:
    """Of one choice: the parser, what it has found so far, and the text that is none of it."""

    parser: CallParser
    content: str = ""
    whole: list[dict[str, Any]] = field(default_factory=list)

    def feed(self, text: str) -> tuple[str, list[CallDelta]]:
        content, deltas = self.parser.feed(text)
        self.content += content
        for delta in deltas:
            if delta.id:
                function = {"name": delta.name, "arguments": ""}
                self.whole.append({"id": delta.id, "type": "function", "function": function})
            self.whole[delta.index]["function"]["arguments"] += delta.arguments
        return content, deltas

    def finish(self) -> str:
        content = self.parser.finish()
        self.content += content
        return content


class ChatFormat(Format):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, job: Job, text: Text, with_timing: bool, use: ToolUse | None = None, style: Style = "hermes"):
        super().__init__(job, text, with_timing)
        self._use = use
        self._style = style
        self._calls: dict[int, Calls] = {}

    def _calls_of(self, index: int) -> Calls | None:
        if self._use is None:
            return None
        if index not in self._calls:
            self._calls[index] = Calls(self._use.parser(self._style))
        return self._calls[index]

    @property
    def _is_plain(self) -> bool:
        return self._use is None and super()._is_plain

    def _contents(self, output: Output, choice: Choice) -> list[dict[str, Any]]:
        calls = self._calls_of(output.index)
        if calls is None:
            return super()._contents(output, choice)
        content, deltas = calls.feed(output.delta.text)
        if output.finish_reason:
            content += calls.finish()
        bodies: list[dict[str, Any]] = [{"content": content}] if content else []
        bodies += [{"tool_calls": [_delta_body(delta)]} for delta in deltas]
        parts = [self._delta(output.index, body) for body in bodies]
        if parts:
            self._attach(parts[0], choice)
        return parts

    def _finish(self, output: Output, choice: Choice) -> None:
        super()._finish(output, choice)
        calls = self._calls_of(output.index)
        if calls is not None:
            choice.finish_reason = self._reason(choice, calls)

    def _reason(self, choice: Choice, calls: Calls) -> str | None:
        has_called = calls.whole and self._use is not None and self._use.mode != "named"
        return "tool_calls" if has_called and choice.finish_reason == "stop" else choice.finish_reason

    def _extras(self) -> dict[str, Any]:
        if self._job.request.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": self._prompt_logprobs(0)}

    def _opening(self, index: int, choice: Choice) -> list[dict[str, Any]]:
        part = self._delta(index, {"role": "assistant", "content": ""})
        parts = [part]
        if self._job.request.return_token_ids:
            part["prompt_token_ids"] = self._prompt_ids(index)
        if choice.text:
            parts.append(self._delta(index, {"content": choice.text}))
        return parts

    def _content(self, index: int, choice: Choice, text: str) -> dict[str, Any]:
        part = self._delta(index, {"content": text})
        self._attach(part, choice)
        return part

    def _attach(self, part: dict[str, Any], choice: Choice) -> None:
        """What of a choice's tokens has not gone out yet."""
        if choice.pieces:
            part["logprobs"] = self._logprobs(choice.pieces)
        if choice.ids:
            part["token_ids"] = choice.ids
        choice.pieces, choice.ids = [], []

    def _last(self, index: int, choice: Choice) -> dict[str, Any]:
        part = {**self._delta(index, {}), "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        self._attach(part, choice)
        return part

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        wants_logprobs = self._job.request.num_logprobs >= 0
        message = self._message(index, choice)
        body = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.pieces) if wants_logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._job.request.return_token_ids:
            body |= {"prompt_token_ids": self._prompt_ids(index), "token_ids": choice.ids}
        return body

    def _message(self, index: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None, "annotations": []}
        calls = self._calls_of(index)
        if calls is not None:
            calls.feed(choice.text[choice.offset :])
            calls.finish()
            choice.finish_reason = self._reason(choice, calls)
            content = choice.text[: choice.offset] + calls.content
            message["content"] = content or (None if calls.whole else "")
            if calls.whole:
                message["tool_calls"] = calls.whole
        return message

    @staticmethod
    def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any]:
        return {"content": [self._content_logprob(piece) for piece in pieces], "refusal": None}

    def _content_logprob(self, piece: Piece) -> dict[str, Any]:
        top = [
            self._entry(token_id, logprob) for token_id, logprob in piece.token.top[: self._job.request.num_logprobs]
        ]
        return {**self._entry(piece.token.id, piece.token.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        shown, raw = self._piece(token_id)
        return {"token": shown, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(raw)}


def _delta_body(delta: CallDelta) -> dict[str, Any]:
    if not delta.id:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}
