"""/v1/responses: the order of events, what is kept for a next turn, and the endpoint's own refusals."""

import json
from pathlib import Path
from typing import Any

from server.messages import Prefill
from tests.router.conftest import HELLO, Answer, Cluster, Start
from tests.router.test_errors import check_error

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


async def respond(cluster: Cluster, **body: Any) -> Answer:
    return await cluster.post("/v1/responses", {"input": "hi", **body})


def events_of(answer: Answer) -> list[dict[str, Any]]:
    *lines, done, end = answer.body.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    events = []
    for line in lines:
        name, data = line.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    return events


def prompt_of(cluster: Cluster) -> str:
    return cluster.text.decode(cluster.colocated.heard(Prefill)[-1].prompt, skip_special=False)


async def test_whole(start: Start) -> None:
    cluster = await start(colocated=1)
    body = (await respond(cluster, instructions="Be brief.", metadata={"k": "v"})).json
    assert (body["object"], body["status"], body["error"]) == ("response", "completed", None)
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"][0]["text"] == HELLO
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert "<|im_start|>system\nBe brief." in prompt_of(cluster)


async def test_stream_has_the_same_answer(start: Start) -> None:
    cluster = await start(colocated=1)
    whole = (await respond(cluster)).json
    events = events_of(await respond(cluster, stream=True))
    names = [e["type"].removeprefix("response.") for e in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert "".join(e["delta"] for e in events if e["type"].endswith("text.delta")) == HELLO
    last = events[-1]["response"]
    assert events[0]["response"]["output"] == []
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert last["usage"] == whole["usage"]


async def test_cut_by_max_output_tokens(start: Start) -> None:
    cluster = await start(colocated=1)
    body = (await respond(cluster, max_output_tokens=2)).json
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert events_of(await respond(cluster, max_output_tokens=2, stream=True))[-1]["type"] == "response.incomplete"


async def test_next_turn(start: Start) -> None:
    cluster = await start(colocated=1)
    first = (await respond(cluster, instructions="Be brief.")).json
    second = (await respond(cluster, input="and?", previous_response_id=first["id"])).json
    prompt = prompt_of(cluster)
    assert f"assistant\n{HELLO}<|im_end|>" in prompt
    assert prompt.index("user\nhi") < prompt.index(HELLO) < prompt.index("user\nand?")
    assert "Be brief." not in prompt, "instructions are for one answer"
    assert (await cluster.request("GET", f"/v1/responses/{second['id']}")).json == second
    assert (await cluster.request("DELETE", f"/v1/responses/{second['id']}")).json["deleted"]
    check_error(await cluster.request("GET", f"/v1/responses/{second['id']}"), 404)
    unkept = (await respond(cluster, store=False)).json
    error = check_error(await respond(cluster, previous_response_id=unkept["id"]), 400)
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


async def test_an_answer_belongs_to_its_key(start: Start, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ours\ntheirs\n")
    cluster = await start(colocated=1, router={"api_key_file": str(tmp_path / "keys")})
    ours, theirs = {"Authorization": "Bearer ours"}, {"Authorization": "Bearer theirs"}
    kept = (await cluster.post("/v1/responses", {"input": "hi"}, ours)).json
    path, follow = f"/v1/responses/{kept['id']}", {"input": "and?", "previous_response_id": kept["id"]}
    # To another key it looks as if there were none.
    for method in ("GET", "DELETE"):
        error = check_error(await cluster.request(method, path, headers=theirs), 404)
        assert error == check_error(await cluster.request(method, "/v1/responses/resp_none", headers=theirs), 404)
    for stream in (False, True):
        error = check_error(await cluster.post("/v1/responses", {**follow, "stream": stream}, theirs), 400)
        assert error["code"] == "previous_response_not_found"
    # To its own it is there, still.
    assert (await cluster.request("GET", path, headers=ours)).json == kept
    assert (await cluster.post("/v1/responses", follow, ours)).status == 200
    assert (await cluster.request("DELETE", path, headers=ours)).json["deleted"]


async def test_items(start: Start) -> None:
    cluster = await start(colocated=1)
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "six"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "seven"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 8}'},
        {"type": "function_call_output", "call_id": "c", "output": "nine"},
    ]
    assert (await respond(cluster, input=items, tools=[TOOL])).status == 200
    prompt = prompt_of(cluster)
    assert prompt.index("six") < prompt.index("seven") < prompt.index('{"a": 8}') < prompt.index("nine")


async def test_calls(start: Start) -> None:
    cluster = await start(colocated=1)
    cluster.say('<tool_call>\n{"name": "f", "arguments": {"a": 5}}\n</tool_call>')
    body = (await respond(cluster, tools=[TOOL])).json
    (item,) = body["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "f", '{"a": 5}')
    events = events_of(await respond(cluster, tools=[TOOL], stream=True))
    names = [e["type"].removeprefix("response.") for e in events]
    assert names[2] == "output_item.added"
    assert names[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert "".join(e["delta"] for e in events if e["type"].endswith("arguments.delta")) == '{"a": 5}'
    after = (await respond(cluster, previous_response_id=body["id"], tools=[TOOL], input=[
        {"type": "function_call_output", "call_id": item["call_id"], "output": "fine"}])).status  # fmt: skip
    assert after == 200
    assert '{"name": "f", "arguments": {"a": 5}}' in prompt_of(cluster)


async def test_refusals(start: Start) -> None:
    cluster = await start(colocated=1)
    rows: list[tuple[str, dict[str, Any]]] = [
        ("input", {"input": ""}),
        ("input", {"input": []}),
        ("input", {"input": None}),
        ("input", {"input": 5}),
        ("input", {"input": [{"type": "video"}]}),
        ("input", {"input": [{"role": 5, "content": "x"}]}),
        ("input", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        ("input", {"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}),
        ("background", {"background": True}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("temperature", {"temperature": -1}),
        ("text", {"text": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}}),
        ("text", {"text": {"format": 5}}),
        ("tools", {"tools": [{"type": "web_search"}]}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}),
        ("previous_response_id", {"previous_response_id": "resp_none"}),
    ]
    for param, bad in rows:
        for stream in (False, True):
            error = check_error(await respond(cluster, stream=stream, **bad), 400)
            assert error["param"] == param, (bad, error)
    assert not cluster.colocated.received
    check_error(await respond(cluster, model="other"), 404)


async def test_an_error_on_the_way(start: Start) -> None:
    cluster = await start(prefill=1, decode=1, router={"request_timeout": 0.3})
    cluster.decode.is_silent = True
    events = events_of(await respond(cluster, stream=True))
    assert events[-1]["type"] == "error"
    assert events[-1]["code"] == "request_timeout"
