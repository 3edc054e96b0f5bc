"""What goes over the wire: framing of streams, roles, finish reasons, usage."""

import asyncio
import json
from typing import Any

import pytest

from server.messages import Abort, Prefill
from tests.router.conftest import HELLO, Start

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
POOLS: list[dict[str, int]] = [{"prefill": 1, "decode": 1}, {"colocated": 1}]


@pytest.mark.parametrize("pools", POOLS, ids=["pd", "colocated"])
async def test_chat_is_the_same_streamed_or_not(start: Start, pools: dict[str, int]) -> None:
    cluster = await start(**pools)
    whole = (await cluster.chat()).json
    assert whole["object"] == "chat.completion"
    choice = whole["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": HELLO, "refusal": None, "annotations": []}
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None

    chunks = (await cluster.chat(stream=True, stream_options={"include_usage": True})).events
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == HELLO
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]


async def test_raw_bytes_of_a_chat_stream(start: Start) -> None:
    cluster = await start(colocated=1)
    answer = await cluster.chat(stream=True)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert b"\r" not in answer.body
    assert answer.body.endswith(b"\n\ndata: [DONE]\n\n")
    assert answer.body.count(b"[DONE]") == 1
    lines = answer.body.split(b"\n")
    assert all(line == b"" or line.startswith(b"data: ") for line in lines)

    chunks = answer.events
    assert {c["id"] for c in chunks} == {chunks[0]["id"]}
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert len({c["created"] for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("role" in c["choices"][0]["delta"] for c in chunks[1:])
    assert chunks[-1]["choices"][0]["delta"] == {}
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert not any("usage" in c for c in chunks)


async def test_nothing_goes_out_before_the_first_token(start: Start) -> None:
    """And then the role and the token in one write: a client that takes the first byte for the first token is right."""
    cluster = await start(colocated=1)
    cluster.colocated.stepwise = True
    reader, writer = await cluster.send("POST", "/v1/chat/completions", {**CHAT, "stream": True})
    await cluster.colocated.saw(Prefill)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.2)
    cluster.colocated.step()
    await reader.readuntil(b"\r\n\r\n")
    size = int(await reader.readline(), 16)
    first, second, end = (await reader.readexactly(size)).split(b"\n\n")
    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert json.loads(second.removeprefix(b"data: "))["choices"][0]["delta"] == {"content": "Hello"}
    assert end == b""
    writer.close()


async def test_line_separators_are_escaped(start: Start) -> None:
    cluster = await start(colocated=1)
    words = "a\u2028b\u2029c\u0085d"
    cluster.say(words)
    answer = await cluster.chat(stream=True)
    assert not any(sep in answer.body.decode() for sep in "\u2028\u2029\u0085")
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in answer.events) == words


async def test_completions_in_prompt_order(start: Start) -> None:
    cluster = await start(colocated=1)
    encode = cluster.text.tokenizer.encode
    cluster.colocated.reply = lambda prompt: [*encode(" after").ids, *prompt, 2]
    whole = (await cluster.complete(prompt=["one", "two"], n=2)).json
    assert whole["id"].startswith("cmpl-")
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in whole["choices"]] == [" afterone", " afterone", " aftertwo", " aftertwo"]
    prompt_tokens = sum(len(encode(p).ids) for p in ("one", "two"))
    assert whole["usage"]["prompt_tokens"] == prompt_tokens

    texts = dict.fromkeys(range(4), "")
    finished = []
    for chunk in (await cluster.complete(prompt=["one", "two"], n=2, stream=True)).events:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        finished += [choice["index"]] * (choice["finish_reason"] == "stop")
    assert list(texts.values()) == [c["text"] for c in whole["choices"]]
    assert sorted(finished) == [0, 1, 2, 3]


@pytest.mark.parametrize("form", ["str", "ids", "list of ids"])
async def test_prompt_forms(start: Start, form: str) -> None:
    cluster = await start(colocated=1)
    ids = cluster.text.tokenizer.encode("Once upon").ids
    prompt: Any = {"str": "Once upon", "ids": ids, "list of ids": [ids]}[form]
    answer = await cluster.complete(prompt=prompt)
    assert answer.json["choices"][0]["text"] == HELLO
    assert cluster.colocated.received[-1].prompt == ids  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(start: Start, stream: bool) -> None:
    cluster = await start(colocated=1)
    for max_tokens, expected in ((100, "Once" + HELLO), (0, "Once")):
        answer = await cluster.complete(echo=True, max_tokens=max_tokens, stream=stream)
        choices = [c["choices"][0] for c in answer.events] if stream else answer.json["choices"]
        assert "".join(c["text"] for c in choices) == expected
        if stream:
            assert choices[0]["text"] == "Once"


async def test_completion_length_rules(start: Start) -> None:
    cluster = await start(colocated=1)
    cluster.say("word " * 50)
    default = (await cluster.post("/v1/completions", {"prompt": "Once"})).json
    assert default["usage"]["completion_tokens"] == 16
    assert default["choices"][0]["finish_reason"] == "length"
    one = (await cluster.chat(max_tokens=20, max_completion_tokens=1)).json
    assert one["usage"]["completion_tokens"] == 1
    room = (await cluster.chat(max_tokens=10**9)).json
    assert room["choices"][0]["finish_reason"] == "stop"
    assert cluster.colocated.received[-1].params.max_tokens < cluster.text.max_len  # type: ignore[union-attr]


async def test_end_of_text_as_first_token(start: Start) -> None:
    cluster = await start(prefill=1, decode=1)
    cluster.say("")
    answer = (await cluster.chat()).json
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    chunks = (await cluster.chat(stream=True)).events
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_cuts_and_aborts(start: Start, stream: bool) -> None:
    cluster = await start(colocated=1)
    cluster.colocated.stepwise = True
    cluster.colocated.step(6)
    answer = await cluster.chat(stop=["How are"], stream=stream)
    choices = [c["choices"][0] for c in answer.events] if stream else answer.json["choices"]
    text = "".join(c["delta"].get("content", "") if stream else c["message"]["content"] for c in choices)
    assert text == "Hello, world! "
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == "How are"
    await cluster.colocated.saw(Abort)


async def test_stop_token_id(start: Start) -> None:
    cluster = await start(colocated=1)
    ids = cluster.say(HELLO)
    choice = (await cluster.chat(stop_token_ids=[ids[3]])).json["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == ids[3]
    assert choice["message"]["content"] == cluster.text.decode(ids[:3])
    kept = (await cluster.chat(stop_token_ids=[ids[3]], include_stop_str_in_output=True)).json["choices"][0]
    assert kept["message"]["content"] == cluster.text.decode(ids[:4])


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, None])
async def test_no_usage_unless_asked(start: Start, options: Any) -> None:
    cluster = await start(colocated=1)
    assert not any("usage" in c for c in (await cluster.chat(stream=True, stream_options=options)).events)


async def test_continuous_usage_grows(start: Start) -> None:
    cluster = await start(colocated=1)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = (await cluster.chat(stream=True, stream_options=options)).events
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(cluster.say(HELLO))


async def test_cached_tokens_from_either_worker(start: Start) -> None:
    cluster = await start(prefill=1, decode=1)
    cluster.decode.num_cached = 7
    usage = (await cluster.chat()).json["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 7}


async def test_chat_logprobs_line_up_with_the_text(start: Start) -> None:
    cluster = await start(colocated=1)
    words = "héllo 世界 🎉!"
    cluster.say(words)
    whole = (await cluster.chat(logprobs=True, top_logprobs=2)).json["choices"][0]
    content = whole["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == words
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    chunks = (await cluster.chat(logprobs=True, top_logprobs=2, stream=True)).events
    streamed = [e for c in chunks for e in (c["choices"][0].get("logprobs") or {"content": []})["content"]]
    assert streamed == content


async def test_completion_logprobs_have_equal_lengths(start: Start) -> None:
    cluster = await start(colocated=1)
    logprobs = (await cluster.complete(logprobs=1)).json["choices"][0]["logprobs"]
    assert len({len(logprobs[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}) == 1
    assert logprobs["text_offset"][0] == 0
    assert "".join(logprobs["tokens"]) == HELLO


async def test_token_ids(start: Start) -> None:
    cluster = await start(colocated=1)
    ids = cluster.say(HELLO)
    whole = (await cluster.complete(return_token_ids=True)).json["choices"][0]
    assert whole["token_ids"] == ids
    assert whole["prompt_token_ids"] == cluster.text.tokenizer.encode("Once").ids
    chunks = (await cluster.complete(return_token_ids=True, stream=True)).events
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", [])] == ids


async def test_prompt_equals_tokenize(start: Start) -> None:
    cluster = await start(colocated=1)
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    tokens = (await cluster.post("/tokenize", {"messages": messages})).json
    answer = (await cluster.chat(messages=messages)).json
    assert answer["usage"]["prompt_tokens"] == tokens["count"]
    assert cluster.colocated.received[-1].prompt == tokens["tokens"]  # type: ignore[union-attr]
    back = (await cluster.post("/detokenize", {"tokens": tokens["tokens"]})).json["prompt"]
    assert back.endswith("<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n")


async def test_seeds_differ_between_choices_and_repeat(start: Start) -> None:
    cluster = await start(colocated=1)
    await cluster.chat(seed=-5, n=2)
    await cluster.chat(seed=-5, n=2)
    seeds = [message.params.seed for message in cluster.colocated.received if hasattr(message, "params")]
    assert seeds[:2] == seeds[2:]
    assert len(set(seeds)) == 2


async def test_truncation(start: Start) -> None:
    cluster = await start(colocated=1)
    ids = list(range(100, 120))
    await cluster.complete(prompt=ids, truncate_prompt_tokens=5)
    assert cluster.colocated.received[-1].prompt == ids[-5:]  # type: ignore[union-attr]
    await cluster.complete(prompt=ids, truncate_prompt_tokens=5, truncation_side="right")
    assert cluster.colocated.received[-1].prompt == ids[:5]  # type: ignore[union-attr]


async def test_a_cut_prompt_is_echoed_as_cut(start: Start) -> None:
    cluster = await start(colocated=1)
    body = {"prompt": "one two three four", "truncate_prompt_tokens": 2, "echo": True, "max_tokens": 0}
    assert (await cluster.complete(**body)).json["choices"][0]["text"] == " three four"
    assert (await cluster.complete(**body, truncation_side="right")).json["choices"][0]["text"] == "one two"


async def test_continue_final_message_and_echo(start: Start) -> None:
    cluster = await start(colocated=1)
    messages = [{"role": "user", "content": "Say A"}, {"role": "assistant", "content": "A is"}]
    body = {"messages": messages, "continue_final_message": True, "echo": True}
    whole = (await cluster.chat(**body)).json["choices"][0]["message"]["content"]
    assert whole == "A is" + HELLO
    assert cluster.text.decode(cluster.colocated.received[-1].prompt).endswith("A is")  # type: ignore[union-attr]
    chunks = (await cluster.chat(**body, stream=True)).events
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == whole


async def test_template_variables_and_no_generation_prompt(start: Start) -> None:
    cluster = await start(colocated=1)
    plain = (await cluster.post("/tokenize", CHAT)).json["tokens"]
    answer = await cluster.chat(add_generation_prompt=False, chat_template_kwargs={"enable_thinking": False})
    assert answer.status == 200
    prompt = cluster.colocated.heard(Prefill)[-1].prompt
    assert plain[: len(prompt)] == prompt
    assert cluster.text.decode(plain[len(prompt) :], skip_special=False) == "<|im_start|>assistant\n"


async def test_chat_may_use_the_room_left(start: Start) -> None:
    cluster = await start(colocated=1, max_len=64)
    assert (await cluster.chat()).status == 200
    heard = cluster.colocated.heard(Prefill)[-1]
    assert heard.params.max_tokens == 64 - len(heard.prompt)


async def test_prompt_logprobs_of_a_chat(start: Start) -> None:
    cluster = await start(colocated=1)
    body = (await cluster.chat(prompt_logprobs=1)).json
    assert body["prompt_logprobs"][0] is None
    assert cluster.colocated.heard(Prefill)[-1].params.num_prompt_logprobs == 1


async def test_two_requests_of_one_name(start: Start) -> None:
    cluster = await start(prefill=1, decode=1)
    named = {"X-Request-Id": "twin"}
    answers = await asyncio.gather(*(cluster.chat(named, n=2) for _ in range(2)))
    assert [answer.status for answer in answers] == [200, 200]
    assert {answer.headers["x-request-id"] for answer in answers} == {"twin"}
    assert len({answer.json["id"] for answer in answers}) == 2


async def test_any_role_and_null_content_pass(start: Start) -> None:
    cluster = await start(colocated=1)
    messages = [{"role": "critic", "content": "boo"}, {"role": "assistant", "content": None}]
    assert (await cluster.chat(messages=messages)).status == 200


async def test_keepalive_comments_only_when_asked(start: Start) -> None:
    """With keepalive the response begins before the first token, and an error after that is an event."""
    cluster = await start(colocated=1, router={"keepalive_s": 0.05})
    cluster.colocated.stepwise = True
    reader, writer = await cluster.send(
        "POST", "/v1/completions", {"prompt": "Once", "stream": True, "max_tokens": 100}
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"200 OK" in head
    await reader.readuntil(b": \n\n")
    await cluster.colocated.stop()
    rest = await reader.read()
    writer.close()
    assert b"worker_lost" in rest
    assert rest.count(b"data: [DONE]") == 1


@pytest.mark.parametrize("pools", POOLS, ids=["pd", "colocated"])
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_choices_go_on_when_the_first_ends_before_its_second_token(
    start: Start, pools: dict[str, int], max_tokens: int
) -> None:
    """The others wait until it has read the prompt, which on a pair its second token tells; here there is none."""
    cluster = await start(**pools)
    whole = (await cluster.complete(n=3, max_tokens=max_tokens, echo=True)).json
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 3
    assert whole["usage"]["completion_tokens"] == 3 * max_tokens
