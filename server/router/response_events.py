"""Outputs as the Responses API tells them: items that open, grow and close, each event with its number.

created, in_progress
  message:  output_item.added, content_part.added, output_text.delta ..., output_text.done, content_part.done,
            output_item.done
  call:     output_item.added, function_call_arguments.delta ..., function_call_arguments.done, output_item.done
completed | incomplete

A whole body is what the last event of the stream carries: it is made by the same steps.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from server.router.calls import CallDelta, CallParser, Style
from server.router.errors import ApiError
from server.router.generate import Job, Output, new_id
from server.router.render import Format, event
from server.router.responses import ResponsesRequest, renamed
from server.router.text import Text
from server.router.tools import ToolUse

Done = Callable[[dict[str, Any]], None]


class ResponseFormat(Format):
    object = "response"

    def __init__(
        self, job: Job, text: Text, with_timing: bool, asked: ResponsesRequest, use: ToolUse | None, style: Style
    ) -> None:
        super().__init__(job, text, with_timing)
        self._asked = asked
        self._parser: CallParser | None = use.parser(style) if use else None
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item that grows
        self._status = "in_progress"
        self.on_done: Done = lambda _: None

    def get_ready(self, index: int) -> None:
        """No two of its events are alike: each has a number."""

    def chunks(self, output: Output) -> bytes:
        events: list[dict[str, Any]] = []
        if not self._number:
            events += [self._whole_event("response.created"), self._whole_event("response.in_progress")]
        self._take(output, events)
        return b"".join(b"event: %s\n%s" % (each["type"].encode(), event(each)) for each in events)

    def usage_chunk(self) -> bytes:
        return b""

    def error_event(self, error: ApiError) -> bytes:
        inner = renamed(error).body["error"]
        body = self._event("error", code=inner["code"], message=inner["message"], param=inner["param"])
        return b"event: error\n" + event(body)

    def add(self, output: Output) -> None:
        self._take(output, [])

    def body(self) -> bytes:
        return msgspec.json.encode(self._response())

    def as_message(self) -> dict[str, Any]:
        """The answer as a chat's next message."""
        texts = [item["content"][0]["text"] for item in self._items if item["type"] == "message"]
        calls = [
            {"id": i["call_id"], "type": "function", "function": {"name": i["name"], "arguments": i["arguments"]}}
            for i in self._items
            if i["type"] == "function_call"
        ]
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        return {**message, "tool_calls": calls} if calls else message

    # steps

    def _take(self, output: Output, events: list[dict[str, Any]]) -> None:
        text, calls = output.delta.text, list[CallDelta]()
        if self._parser is not None:
            text, calls = self._parser.feed(text)
            text += self._parser.finish() if output.finish_reason else ""
        if text:
            self._grow(text, events)
        for call in calls:
            self._call(call, events)
        if output.finish_reason:
            self._end(output.finish_reason, events)

    def _grow(self, text: str, events: list[dict[str, Any]]) -> None:
        if self._open is None or self._open["type"] != "message":
            self._open_message(events)
        assert self._open is not None
        self._open["content"][0]["text"] += text
        events.append(self._part_event("response.output_text.delta", delta=text, logprobs=[]))

    def _open_message(self, events: list[dict[str, Any]]) -> None:
        item: dict[str, Any] = {
            "id": new_id("msg", "_"),
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        self._begin(item, events)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"] = [part]
        events.append(self._part_event("response.content_part.added", part=dict(part)))

    def _call(self, call: CallDelta, events: list[dict[str, Any]]) -> None:
        if call.id:
            item = {"id": new_id("fc", "_"), "type": "function_call", "status": "in_progress"}
            self._begin({**item, "call_id": call.id, "name": call.name, "arguments": ""}, events)
        if call.arguments and self._open is not None:
            self._open["arguments"] += call.arguments
            events.append(self._item_event("response.function_call_arguments.delta", delta=call.arguments))

    def _begin(self, item: dict[str, Any], events: list[dict[str, Any]]) -> None:
        self._close(events)
        self._open = item
        self._items.append(item)
        shown = {**item, "content": []} if item["type"] == "message" else dict(item)
        events.append(self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown))

    def _close(self, events: list[dict[str, Any]], status: str = "completed") -> None:
        item = self._open
        if item is None:
            return
        if item["type"] == "message":
            part = item["content"][0]
            events.append(self._part_event("response.output_text.done", text=part["text"], logprobs=[]))
            events.append(self._part_event("response.content_part.done", part=dict(part)))
        else:
            more = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._item_event("response.function_call_arguments.done", **more))
        item["status"] = status
        events.append(self._event("response.output_item.done", output_index=len(self._items) - 1, item=_copy(item)))
        self._open = None

    def _end(self, reason: str, events: list[dict[str, Any]]) -> None:
        if not self._items:
            self._open_message(events)
        self._status = "incomplete" if reason == "length" else "completed"
        self._close(events, self._status)
        events.append(self._whole_event(f"response.{self._status}"))
        self.on_done(self._response())

    # events

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}

    def _whole_event(self, kind: str) -> dict[str, Any]:
        return self._event(kind, response=self._response())

    def _item_event(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **more)

    def _part_event(self, kind: str, **more: Any) -> dict[str, Any]:
        return self._item_event(kind, content_index=0, **more)

    def _response(self) -> dict[str, Any]:
        asked, job = self._asked, self._job
        is_over = self._status != "in_progress"
        body: dict[str, Any] = {
            "id": job.id,
            "object": "response",
            "created_at": job.created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "metadata": asked.metadata or {},
            "model": job.model,
            "output": [_copy(item) for item in self._items],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": asked.previous_response_id,
            "presence_penalty": asked.presence_penalty or 0.0,
            "frequency_penalty": asked.frequency_penalty or 0.0,
            "prompt_cache_key": asked.prompt_cache_key,
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "top_logprobs": 0,
            "reasoning": {"effort": None, "summary": None},
            "store": asked.store is not False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": asked.text or {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": [_full(tool) for tool in asked.tools or []],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            "user": asked.user,
        }
        if is_over:
            self._add_timing(body)
        return body

    def _usage(self) -> dict[str, Any]:
        job = self._job
        return {
            "input_tokens": job.prompt_tokens,
            "input_tokens_details": {"cached_tokens": job.cached_tokens},
            "output_tokens": job.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": job.prompt_tokens + job.completion_tokens,
        }


def _full(tool: dict[str, Any]) -> dict[str, Any]:
    """With all of its keys, as this endpoint shows a tool."""
    return {"type": "function", "description": None, "parameters": None, "strict": None, **tool}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now: an event is encoded before the item grows, a stored body is not."""
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)
