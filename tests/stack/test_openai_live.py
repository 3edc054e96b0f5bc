"""The real OpenAI client against live stacks: what its helpers parse must be what the stack says."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

USER: Any = [{"role": "user", "content": "Book me a trip."}]


class Trip(BaseModel):
    """Bounded, so that a random model comes to its end."""

    city: Literal["Bern", "Zürich", "東京"]
    days: int = Field(ge=1, le=9)
    by: Literal["train", "plane"]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=60) as client:
        yield client


def test_parse(client: openai.OpenAI) -> None:
    done = client.chat.completions.parse(model="m", messages=USER, response_format=Trip, max_tokens=300)
    assert isinstance(done.choices[0].message.parsed, Trip)


def test_stream_helper_with_a_schema(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="m", messages=USER, response_format=Trip, max_tokens=300) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "chunk"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Trip)


def test_stream_helper_with_tools(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Trip, name="book")
    with client.chat.completions.stream(
        model="m", messages=USER, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=300
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Trip)
    assert final.choices[0].finish_reason == "tool_calls"


def test_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(model="m", input="hi", max_output_tokens=5)
    assert first.status in ("completed", "incomplete")
    second = client.responses.create(model="m", input="and?", previous_response_id=first.id, max_output_tokens=5)
    assert client.responses.retrieve(second.id).output_text == second.output_text
    parsed = client.responses.parse(model="m", input="book", text_format=Trip, max_output_tokens=300)
    assert isinstance(parsed.output_parsed, Trip)


def test_responses_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model="m", input="book", text_format=Trip, max_output_tokens=300) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert isinstance(final.output_parsed, Trip)


def test_responses_tools(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "book", "parameters": Trip.model_json_schema(), "strict": True}
    # Random weights close a string when they happen to: room enough that they nearly always do.
    more: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 3500}
    done = client.responses.create(model="m", input="book", **more)
    (call,) = done.output
    assert call.type == "function_call"
    Trip.model_validate(json.loads(call.arguments))
    answer: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "booked"}]
    after = client.responses.create(model="m", input=answer, previous_response_id=done.id, max_output_tokens=5)
    assert after.object == "response"


def test_logprobs_and_choices(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="m", messages=USER, n=2, logprobs=True, top_logprobs=2, max_tokens=5, seed=1
    )
    assert [choice.index for choice in done.choices] == [0, 1]
    for choice in done.choices:
        assert choice.logprobs is not None
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content or [])
