"""/v1/responses: the request as a chat request, the answers kept for a next turn, and the endpoint's own rules.

1. `to_chat` turns input items into messages, the flat tool form into chat's, `text.format` into response_format.
2. A conversation goes on by previous_response_id: `Store` keeps the messages of the last answers, within bounds, each
   for the API key that it was made with.
"""

from collections import OrderedDict
from typing import Any

import msgspec

from server.router.errors import ApiError, bad_request
from server.router.openai import ChatRequest

MAX_STORED = 1000
MAX_STORED_BYTES = 64 * 2**20

Item = dict[str, Any]


class ResponsesRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    truncation: str | None = None


class Stored(msgspec.Struct, frozen=True):
    messages: list[Item]
    body: dict[str, Any]
    tenant: str
    size: int


class Store:
    """The last answers by id; the oldest leave first, when there are too many or too much of them. To another tenant
    than its own, an answer is not there."""

    def __init__(self, most: int = MAX_STORED, most_bytes: int = MAX_STORED_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._answers: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def add(self, tenant: str, messages: list[Item], body: dict[str, Any]) -> None:
        stored = Stored(messages, body, tenant, len(msgspec.json.encode((messages, body))))
        self._answers[body["id"]] = stored
        self._bytes += stored.size
        while self._answers and (len(self._answers) > self._most or self._bytes > self._most_bytes):
            self._bytes -= self._answers.popitem(last=False)[1].size

    def get(self, tenant: str, name: str) -> Stored:
        """Raises ApiError 404."""
        found = self._answers.get(name)
        if found is None or found.tenant != tenant:
            raise ApiError(404, "there is no such response, or it is not kept any more", code="not_found")
        return found

    def remove(self, tenant: str, name: str) -> None:
        """Raises ApiError 404."""
        self._bytes -= self.get(tenant, name).size
        del self._answers[name]


def to_chat(r: ResponsesRequest, store: Store, tenant: str = "") -> tuple[ChatRequest, list[Item]]:
    """The chat request, and the conversation that the answer is to be added to. Raises ApiError 400."""
    if r.background:
        raise bad_request("background", "background: not supported")
    if r.max_output_tokens is not None and r.max_output_tokens < 1:
        raise bad_request("max_output_tokens", "max_output_tokens: must be at least 1")
    earlier = _earlier(r.previous_response_id, store, tenant)
    conversation = earlier + _messages(r.input)
    head = [{"role": "system", "content": r.instructions}] if r.instructions else []
    form = (r.text or {}).get("format")
    if form is not None and not isinstance(form, dict):
        raise bad_request("text", "text.format: must be an object")
    chat = ChatRequest(
        messages=head + conversation,
        max_completion_tokens=r.max_output_tokens,
        temperature=r.temperature,
        top_p=r.top_p,
        presence_penalty=r.presence_penalty,
        frequency_penalty=r.frequency_penalty,
        seed=r.seed,
        stream=r.stream,
        response_format=form,
        tools=None if r.tools is None else [_tool(tool) for tool in r.tools],
        tool_choice=_choice(r.tool_choice),
        parallel_tool_calls=r.parallel_tool_calls,
    )
    return chat, conversation


def renamed(error: ApiError) -> ApiError:
    """A complaint about a field of the chat request, in this endpoint's words."""
    names = {"messages": "input", "response_format": "text", "max_completion_tokens": "max_output_tokens"}
    name = names.get(error.param or "")
    if name is None:
        return error
    message = error.message.replace(error.param or "", name, 1)
    return ApiError(error.status, message, kind=error.kind, param=name, code=error.error_code)


def _earlier(name: str | None, store: Store, tenant: str) -> list[Item]:
    if name is None:
        return []
    try:
        return list(store.get(tenant, name).messages)
    except ApiError as error:
        message = f"previous_response_id: {error.message}"
        raise bad_request("previous_response_id", message, "previous_response_not_found") from error


def _messages(given: str | list[Item] | None) -> list[Item]:
    if not given:
        raise bad_request("input", "input: must be a string or a list of items, not empty")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Item] = []
    for i, item in enumerate(given):
        _add(messages, i, item)
    return messages


def _add(messages: list[Item], i: int, item: Item) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        # Calls of one turn are one message in a chat.
        if messages and messages[-1].get("tool_calls"):
            messages[-1]["tool_calls"].append(call)
        elif messages and messages[-1]["role"] == "assistant":
            messages[-1] = {**messages[-1], "tool_calls": [call]}
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        content = _content(item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind != "reasoning":
        raise bad_request("input", f"input[{i}]: items of type {str(kind)[:40]!r} are not supported")


def _content(content: Any) -> Any:
    """output_text is what this endpoint calls the text of an earlier answer."""
    if not isinstance(content, list):
        return content
    return [{**p, "type": "text"} if isinstance(p, dict) and p.get("type") == "output_text" else p for p in content]


def _tool(tool: Any) -> Any:
    if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool:
        return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    return tool


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice
