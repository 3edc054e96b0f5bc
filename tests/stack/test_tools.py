"""Tools on a live stack: forced calls come from a random model too, streamed or not, and fit their schema."""

import json
from typing import Any

import httpx
import pytest

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Bern", "Zürich"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
NOW = {"type": "function", "function": {"name": "now"}}
USER = [{"role": "user", "content": "How is the weather?"}]


def ask(url: str, **more: Any) -> dict[str, Any]:
    body = {"messages": USER, "tools": [WEATHER, NOW], "max_tokens": 400, "seed": 5, **more}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if not more.get("stream"):
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice
    return whole_of(answer.text)


def whole_of(stream: str) -> dict[str, Any]:
    """A stream put together as a client does, and what it promises of its deltas."""
    lines = stream.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    content, calls, reasons = "", [], []
    for chunk in (json.loads(line.removeprefix("data: ")) for line in lines[:-2]):
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        assert not ("tool_calls" in delta and "content" in delta), "no content beside a call"
        content += delta.get("content") or ""
        for part in delta.get("tool_calls", []):
            if part["index"] == len(calls):
                assert part["id"] and part["type"] == "function" and part["function"]["name"]
                calls.append({"id": part["id"], "type": "function", "function": {**part["function"]}})
            else:
                assert part["index"] == len(calls) - 1 and set(part) == {"index", "function"}
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    assert len(reasons) == 1
    message: dict[str, Any] = {"content": content or None, "tool_calls": calls}
    return {"message": message, "finish_reason": reasons[0]}


def check_weather(arguments: str) -> None:
    found = json.loads(arguments)
    assert set(found) == {"city", "days"}
    assert found["city"] in ("Bern", "Zürich")
    assert 1 <= found["days"] <= 9


@pytest.mark.parametrize("stream", [False, True])
def test_named(url: str, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = ask(url, tool_choice=named, stream=stream, temperature=1.2)
    assert choice["finish_reason"] == "stop"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert choice["message"]["content"] is None
    check_weather(call["function"]["arguments"])


@pytest.mark.parametrize("stream", [False, True])
def test_required(url: str, stream: bool) -> None:
    for seed in range(4):
        more = {"tool_choice": "required", "stream": stream, "temperature": 1.2, "seed": seed}
        choice = ask(url, parallel_tool_calls=False, **more)
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        if call["function"]["name"] == "get_weather":
            check_weather(call["function"]["arguments"])
        else:
            assert call["function"] == {"name": "now", "arguments": call["function"]["arguments"]}
            assert json.loads(call["function"]["arguments"]) == {}


def test_streamed_and_whole_agree(url: str) -> None:
    for more in ({"tool_choice": "required", "temperature": 0}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        whole, streamed = ask(url, **more), ask(url, stream=True, **more)
        assert whole["finish_reason"] == streamed["finish_reason"]
        assert (whole["message"]["content"] or None) == streamed["message"]["content"]
        calls = [c["function"] for c in whole["message"].get("tool_calls", [])]
        assert calls == [c["function"] for c in streamed["message"]["tool_calls"]]
        ids = [c["id"] for c in whole["message"].get("tool_calls", [])]
        assert len(set(ids)) == len(ids)


def test_length_is_not_hidden(url: str) -> None:
    choice = ask(url, tool_choice="required", max_tokens=8)
    assert choice["finish_reason"] == "length"


def test_round_trip(url: str) -> None:
    """The answer's message and a tool's result go back in as they came."""
    choice = ask(url, tool_choice="required", parallel_tool_calls=False)
    call = choice["message"]["tool_calls"][0]
    messages = [*USER, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
    again = ask(url, messages=messages, max_tokens=5)
    assert again["finish_reason"] in ("stop", "length", "tool_calls")
    with httpx.Client(base_url=url) as client:
        tokens = client.post("/tokenize", json={"messages": messages, "tools": [WEATHER, NOW]}).json()
        text = client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    assert call["function"]["name"] in text
    assert "sunny" in text
    assert "get_weather" in text
