"""The 400 list of the contract, and the other refusals: object body, the field's name, small, and never a 5xx."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from server.messages import Abort, Prefill
from tests.router.conftest import Answer, Start

USER = [{"role": "user", "content": "hi"}]
LONE_SURROGATE = {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}

# (field, value) or (field, whole body); the field is what `param` must say.
COMMON: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.1}),
    ("min_p", {"min_p": 1.5}),
    ("min_p", {"min_p": -0.5}),
    ("top_k", {"top_k": -2}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": -2.5}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("n", {"n": 0}),
    ("n", {"n": 10**6}),
    ("n", {"n": 1.5}),
    ("seed", {"seed": 2**63}),
    ("seed", {"seed": -(2**63) - 1}),
    ("seed", {"seed": 10**30}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": ["a", ""]}),
    ("stop", {"stop": [1]}),
    ("stop_token_ids", {"stop_token_ids": [10**7]}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("allowed_token_ids", {"allowed_token_ids": [10**7]}),
    ("logit_bias", {"logit_bias": {"x": 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {"99999999": 1}}),
    ("logit_bias", {"logit_bias": {"5": "x"}}),
    ("logit_bias", {"logit_bias": {str(i): 1 for i in range(5000)}}),
    ("allowed_token_ids", {"allowed_token_ids": [5] * 5000}),
    ("stop_token_ids", {"stop_token_ids": [5] * 5000}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": "many"}),
    ("max_tokens", {"max_tokens": True}),
    ("min_tokens", {"min_tokens": 5, "max_tokens": 2}),
    ("min_tokens", {"min_tokens": -1}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream": True, "stream_options": 1}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
    ("response_format", {"response_format": {"type": "xml"}}),
    ("structured_outputs", {"structured_outputs": {"regex": "(a"}}),
    ("structured_outputs", {"structured_outputs": {}}),
    ("structured_outputs", {"structured_outputs": {"regex": ""}}),
    ("structured_outputs", {"structured_outputs": {"grammar": "start: nowhere"}}),
    ("structured_outputs", {"structured_outputs": {"grammar": "root ::= nowhere"}}),
    ("structured_outputs", {"structured_outputs": {"choice": []}}),
    ("structured_outputs", {"structured_outputs": {"choice": ["a", 1]}}),
    ("structured_outputs", {"structured_outputs": {"json": {"type": "nonsense"}}}),
    ("structured_outputs", {"structured_outputs": {"json": "{"}}),
    ("structured_outputs", {"structured_outputs": {"json": {"type": "object"}, "regex": "a"}}),
    ("structured_outputs", {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}),
    ("response_format", {"response_format": {"type": "json_schema"}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}}),
    (
        "response_format",
        {"response_format": {"type": "json_schema", "json_schema": {"strict": True, "schema": {"not": {}}}}},
    ),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}}),
    ("structured_outputs", {"structured_outputs": {"json": False}}),
    ("structured_outputs", {"structured_outputs": {"json": '{"a":' * 5000}}),
    ("structured_outputs", {"structured_outputs": {"regex": "(" * 5000 + "a" + ")" * 5000}}),
    ("structured_outputs", {"structured_outputs": {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}}),
    ("guided_regex", {"guided_regex": "(a"}),
    ("guided_choice", {"guided_choice": "ab"}),
    ("guided_json", {"guided_json": [1]}),
    ("guided_grammar", {"guided_grammar": 5}),
    ("guided_grammar", {"guided_grammar": "#" * 70_000}),
    ("bad_words", {"bad_words": [""]}),
    ("bad_words", {"bad_words": "ab"}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": -2}),
    ("model", {"model": 5}),
]
CHAT: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages", {"messages": "hi"}),
    ("messages", {"messages": USER * 10_000}),
    ("messages", {"messages": [5]}),
    ("messages", {"messages": [{"content": "hi"}]}),
    ("messages", {"messages": [{"role": 5, "content": "hi"}]}),
    ("messages", {"messages": [{"role": "user", "content": 5}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": -2}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("logprobs", {"logprobs": 5}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("continue_final_message", {"add_generation_prompt": True, "continue_final_message": True}),
    ("chat_template", {"chat_template": "{{ 1 }}"}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
    ("chat_template_kwargs", {"chat_template_kwargs": 5}),
    ("tools", {"tools": [5]}),
    ("tools", {"tools": [{"type": "function", "function": {}}]}),
    ("tools", {"tools": [{"type": "browser", "function": {"name": "f"}}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}] * 2}),
    (
        "tools",
        {
            "tool_choice": "required",
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "odd"}}}}}
            ],
        },
    ),
    (
        "tool_choice",
        {
            "tool_choice": {"type": "function", "function": {"name": "g"}},
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
    ),
    ("tool_choice", {"tool_choice": "sometimes", "tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("messages", {"messages": [{"role": "assistant", "tool_calls": 5}]}),
    ("messages", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}),
    ("messages", {"messages": [{"role": "assistant", "tool_calls": [LONE_SURROGATE]}]}),
    ("tool_choice", {"tool_choice": "auto"}),
]
COMPLETION: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": ["a", ""]}),
    ("prompt", {"prompt": ["a", 1]}),
    ("prompt", {"prompt": [1, "a"]}),
    ("prompt", {"prompt": [10**7]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": {"a": 1}}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": 5}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -2}),
    ("suffix", {"suffix": "x"}),
]
BROKEN = [
    b"",
    b"{",
    b"[]",
    b"5",
    b"null",
    b'"text"',
    b'{"messages": NaN}',
    b"\xff\xfe",
    b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"messages":[{"role":"user","content":"\\ud800"}]}',
    b'{"prompt":"\\ud800"}',
]


def check_error(answer: Answer, status: int) -> dict[str, Any]:
    assert answer.status == status, answer.body
    assert len(answer.body) < 1000
    error: dict[str, Any] = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] is None or isinstance(error["code"], str)
    assert not any(word in error["message"] for word in ("Traceback", " at 0x", "/work", "/root"))
    return error


async def test_every_bad_field_is_named(start: Start) -> None:
    """One server for the whole table: a row costs a millisecond then."""
    cluster = await start(colocated=1)
    rows = [("/v1/chat/completions", {"messages": USER}, row) for row in COMMON + CHAT]
    rows += [("/v1/completions", {"prompt": "hi"}, row) for row in COMMON + COMPLETION]
    for path, base, (param, bad) in rows:
        for stream in ({}, {"stream": True}) if "stream_options" not in bad and "stream" not in bad else ({},):
            error = check_error(await cluster.post(path, {**base, **stream, **bad}), 400)
            assert error["param"] == param, (path, bad, error)
            assert param in error["message"]
    assert not cluster.colocated.received, "none of them reached a worker"


async def test_broken_bodies(start: Start) -> None:
    cluster = await start(colocated=1)
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        for body in BROKEN:
            check_error(await cluster.post(path, body), 400)
    infinite = b'{"temperature":1e999,"messages":[{"role":"user","content":"a"}]}'
    assert check_error(await cluster.post("/v1/chat/completions", infinite), 400)["param"] == "temperature"


async def test_null_is_left_out_and_unknown_is_ignored(start: Start) -> None:
    cluster = await start(colocated=1)
    fields = [name for name, _ in COMMON + CHAT if name != "messages"]
    answer = await cluster.chat(**dict.fromkeys(fields), not_a_field={"a": 1})
    assert answer.status == 200
    assert (await cluster.chat(tools=[])).status == 200
    fields = [name for name, _ in COMMON + COMPLETION if name != "prompt"]
    assert (await cluster.complete(**{**dict.fromkeys(fields), "max_tokens": None})).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_context_length(start: Start, stream: bool) -> None:
    cluster = await start(colocated=1, max_len=32)
    for prompt, said in (([5] * 32, "contains 32 tokens"), ("word " * 33, "tokens"), ("x" * 10**6, "at least")):
        answer = await cluster.complete(prompt=prompt, stream=stream)
        error = check_error(answer, 400)
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 32 tokens" in error["message"]
        assert said in error["message"]
    assert (await cluster.complete(prompt=[5] * 31, stream=stream)).status == 200
    assert (await cluster.complete(prompt=[5] * 40, stream=stream, truncate_prompt_tokens=-1)).status == 200


async def test_model_not_found_lists_names(start: Start) -> None:
    cluster = await start(colocated=1, model={"served_name": ["one", "two"]})
    error = check_error(await cluster.chat(model="three"), 404)
    assert error["code"] == "model_not_found"
    assert "one, two" in error["message"]
    assert (await cluster.chat(model="two")).json["model"] == "two"
    check_error(await cluster.request("GET", "/v1/models/three"), 404)
    assert (await cluster.request("GET", "/v1/models/one")).json["id"] == "one"


async def test_unknown_paths_and_methods(start: Start) -> None:
    cluster = await start(colocated=1)
    check_error(await cluster.request("GET", "/nowhere"), 404)
    for method, path, allowed in (
        ("GET", "/v1/completions", {"POST"}),
        ("TRACE", "/version", {"GET", "HEAD"}),
    ):
        answer = await cluster.request(method, path)
        check_error(answer, 405)
        assert set(answer.headers["allow"].split(", ")) == allowed


async def test_api_key(start: Start, tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("# ours\nfirst\nsecond\n")
    cluster = await start(colocated=1, router={"api_key_file": str(key_file)})
    for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic first"}, {"Authorization": "Bearer"}):
        error = check_error(await cluster.chat(headers=headers), 401)
        assert error["code"] == "invalid_api_key"
    check_error(await cluster.request("GET", "/v1/models"), 401)
    for headers in ({"Authorization": "bearer first"}, {"Authorization": "Bearer second"}, {"X-Api-Key": "first"}):
        assert (await cluster.chat(headers=headers)).status == 200
    assert (await cluster.request("GET", "/health")).status == 200
    assert (await cluster.request("OPTIONS", "/v1/models")).status != 401


async def test_body_too_large(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from server.router import http

    monkeypatch.setattr(http, "MAX_BODY", 1000)
    cluster = await start(colocated=1)
    check_error(await cluster.post("/v1/completions", {"prompt": "x" * 2000}), 413)


async def test_request_id_is_echoed_or_made(start: Start) -> None:
    cluster = await start(colocated=1)
    assert (await cluster.chat(headers={"X-Request-Id": "mine"})).headers["x-request-id"] == "mine"
    assert (await cluster.chat(headers={"X-Request-Id": "a b"})).headers["x-request-id"] != "a b"
    assert (await cluster.request("GET", "/nowhere")).headers["x-request-id"]


async def test_queue_over_its_mark(start: Start) -> None:
    cluster = await start(colocated=1, router={"queue_high": 1})
    cluster.colocated.stepwise = True
    first = asyncio.create_task(cluster.chat())
    await cluster.colocated.saw(Prefill)
    answer = await cluster.chat(stream=True)
    error = check_error(answer, 429)
    assert error["type"] == "rate_limit_error"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    text = (await cluster.request("GET", "/metrics")).body.decode()
    assert 'pdctl_requests_total{endpoint="/v1/chat/completions",status="429"} 1.0' in text
    cluster.colocated.step(100)
    assert (await first).status == 200
    assert (await cluster.chat()).status == 200


async def test_every_choice_counts_in_the_queue(start: Start) -> None:
    cluster = await start(colocated=1, router={"queue_high": 4})
    cluster.colocated.stepwise = True
    dispatcher = cluster.stack.dispatcher
    # 1. Under the mark a request gets in whole, however large it is.
    large = asyncio.create_task(cluster.complete(prompt=["a", "b", "c"], n=2, max_tokens=2))
    await cluster.colocated.saw(Prefill, 3)
    assert (dispatcher.waiting, dispatcher.running) == (6, 0)
    check_error(await cluster.complete(), 429)
    # 2. Each has its place until its own first token.
    cluster.colocated.step(3)
    await cluster.colocated.saw(Prefill, 6)
    assert (dispatcher.waiting, dispatcher.running) == (3, 3)
    small = asyncio.create_task(cluster.complete(max_tokens=2))
    cluster.colocated.step(100)
    assert [(await task).status for task in (large, small)] == [200, 200]
    assert dispatcher.in_flight == 0


async def test_time_limit_before_and_after_the_first_token(start: Start) -> None:
    cluster = await start(prefill=1, decode=1, router={"request_timeout": 0.2})
    cluster.prefill.is_silent = cluster.decode.is_silent = True
    for stream in (False, True):
        check_error(await cluster.chat(stream=stream), 504)
    for fake in cluster.fakes.values():
        assert len(await fake.saw(Abort, 2)) == 2
    cluster.prefill.is_silent = False
    events = (await cluster.chat(stream=True)).events
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["error"]["code"] == "request_timeout"


async def test_starting_and_draining(start: Start) -> None:
    cluster = await start(colocated=1, wait=False, fakes_up=False)
    answer = await cluster.chat()
    assert check_error(answer, 503)["code"] == "starting"
    assert "retry-after" in answer.headers
    assert (await cluster.request("GET", "/readyz")).status == 503
    assert (await cluster.request("GET", "/startupz")).status == 503
    health = await cluster.request("GET", "/health")
    assert (health.status, health.body) == (503, b"")
    assert (await cluster.request("GET", "/livez")).status == 200
    assert (await cluster.request("GET", "/v1/models")).status == 200

    await cluster.colocated.start()
    async with asyncio.timeout(10):
        await cluster.stack.prober.started.wait()
    assert (await cluster.chat()).status == 200
    assert (await cluster.request("GET", "/readyz")).status == 200

    cluster.stack.health.is_draining = True
    assert check_error(await cluster.chat(), 503)["code"] == "draining"
    assert (await cluster.request("GET", "/readyz")).status == 503


@pytest.mark.parametrize("pools", [{"prefill": 1, "decode": 1}, {"colocated": 1}], ids=["pd", "colocated"])
async def test_worker_error(start: Start, pools: dict[str, int]) -> None:
    cluster = await start(**pools)
    for fake in cluster.fakes.values():
        fake.error = "out of memory"
    error = check_error(await cluster.chat(stream=True), 500)
    assert error["message"] == "out of memory"


@pytest.mark.parametrize("pools", [{"prefill": 1, "decode": 1}, {"colocated": 1}], ids=["pd", "colocated"])
async def test_a_grammar_that_runs_into_a_limit(start: Start, pools: dict[str, int]) -> None:
    """It is the request's fault, and nobody takes the cut text for a whole one."""
    cluster = await start(**pools)
    last = list(cluster.fakes.values())[-1]
    last.error, last.error_reason, last.error_at = "too many items", "refused", 2
    form = {"response_format": {"type": "json_object"}}
    error = check_error(await cluster.chat(**form), 400)
    assert (error["param"], error["code"]) == ("response_format", "grammar_limit")
    assert "too many items" in error["message"]
    *chunks, event = (await cluster.chat(stream=True, **form)).events
    assert event["error"] == error
    assert not any(c["choices"][0]["finish_reason"] for c in chunks)


async def test_internal_error_tells_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await start(colocated=1)

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(cluster.stack.text, "encode_chat", broken)
    error = check_error(await cluster.chat(), 500)
    assert error["message"] == "internal error"


async def test_tokenizer_endpoints(start: Start) -> None:
    cluster = await start(colocated=1)
    tokens = (await cluster.post("/tokenize", {"prompt": "Hello", "return_token_strs": True})).json
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    check_error(await cluster.post("/tokenize", {}), 400)
    check_error(await cluster.post("/detokenize", {}), 400)
    check_error(await cluster.post("/detokenize", {"tokens": [10**7]}), 400)
    assert (await cluster.post("/detokenize", {"tokens": []})).json == {"prompt": ""}


async def test_texts_without_end(start: Start) -> None:
    """What is only counted, cut, or turned back into text is bounded by what the model could read."""
    cluster = await start(colocated=1, max_len=32)
    long = "x" * 10**5
    for path, body in (
        ("/tokenize", {"prompt": long}),
        ("/tokenize", {"messages": [{"role": "user", "content": long}]}),
        ("/detokenize", {"tokens": [5] * 33}),
        ("/v1/completions", {"prompt": long, "truncate_prompt_tokens": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}], "truncate_prompt_tokens": 5}),
    ):
        assert check_error(await cluster.post(path, body), 400)["code"] == "context_length_exceeded"
    # More tokens than the model takes may be counted; that needs no model.
    assert (await cluster.post("/tokenize", {"prompt": "word " * 100})).json["count"] > 32
    assert (await cluster.post("/detokenize", {"tokens": [5] * 32})).status == 200


MESSAGE = '{"role": "user", "content": "x", "z": %s}'


@pytest.mark.parametrize("value", ["[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900])
@pytest.mark.parametrize("body", ['{"messages": %s}', f'{{"messages": [{MESSAGE}]}}', '{"z": %s}'])
async def test_nesting_is_what_is_wrong(start: Start, value: str, body: str) -> None:
    """Not the field that it is found in; brackets within a text are none."""
    cluster = await start(colocated=1)
    answer = await cluster.request("POST", "/v1/chat/completions", (body % value).encode())
    assert answer.status == 400
    error = answer.json["error"]
    assert "nested too deeply" in error["message"] and error["param"] is None
    text = "[{" * 400 + chr(92) + '"'
    messages = [{"role": "user", "content": text}]
    answer = await cluster.request("POST", "/tokenize", json.dumps({"messages": messages}).encode())
    assert answer.status == 200 and answer.json["count"] > 100
