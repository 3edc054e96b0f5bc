"""The contract, row by row, on live stacks of both kinds.

A row is a request and what its answer must be. Every row is asked whole and streamed: both must say the same, and the
stream's raw bytes must be what every stream's are (`exchange.check_stream`). The model is random; where a row needs a
text, a regex makes it say that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.stack.exchange import Result, ask, by_choice, check_stream, gathered, same, whole
from tests.stack.harness import eventually

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EOS, MAX_LEN = 2, 4096
A, B, Z, Q = 67, 68, 92, 83  # the tokens "a", "b", "z", "q"; "zq" is two of them

Body = dict[str, Any]
Check = Callable[[list[Result], Body], bool]


@dataclass
class Row:
    name: str
    path: str
    fields: Body
    holds: Check


def chat(name: str, holds: Check, **fields: Any) -> Row:
    messages = [{"role": "user", "content": "Say something."}]
    return Row(name, CHAT, {"messages": messages, "temperature": 0, "max_tokens": 12, **fields}, holds)


def completion(name: str, holds: Check, **fields: Any) -> Row:
    return Row(name, COMPLETIONS, {"prompt": "Once", "temperature": 0, "max_tokens": 12, **fields}, holds)


def says(text: str, **more: Any) -> Body:
    """Fields that make the model say `text`."""
    return {"structured_outputs": {"choice": [text]}, "max_tokens": 200, **more}


def ends(text: str, finish_reason: str, stop_reason: str | int | None = None, tokens: int | None = None) -> Check:
    def holds(results: list[Result], body: Body) -> bool:
        (result,) = results
        seen = (result.text, result.finish_reason, result.stop_reason)
        count = body["usage"]["completion_tokens"]
        return seen == (text, finish_reason, stop_reason) and tokens in (None, count)

    return holds


def counts(completion_tokens: int, finish_reason: str = "length") -> Check:
    return lambda results, body: (
        body["usage"]["completion_tokens"] == completion_tokens
        and {result.finish_reason for result in results} == {finish_reason}
    )


def logprobs_are_of(count: int) -> Check:
    def holds(results: list[Result], body: Body) -> bool:
        (result,) = results
        return len(result.logprobs) == count and all(p is not None and -9999 <= p <= 0 for p in result.logprobs)

    return holds


def bytes_are_the_text(results: list[Result], body: Body) -> bool:
    entries = body["choices"][0]["logprobs"]["content"]
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode() == results[0].text


def echoes(prompt: str) -> Check:
    def holds(results: list[Result], body: Body) -> bool:
        logprobs = body["choices"][0]["logprobs"]
        text, offsets = results[0].text, logprobs["text_offset"]
        pieces = [text[a:b] for a, b in zip(offsets, [*offsets[1:], len(text)], strict=True)]
        return (
            text.startswith(prompt)
            and logprobs["token_logprobs"][0] is None
            and logprobs["top_logprobs"][0] is None
            and all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
            and pieces == logprobs["tokens"]
        )

    return holds


def offsets_ascend(results: list[Result], body: Body) -> bool:
    """A character's text begins with the token that makes it whole; the ones before it begin there too."""
    offsets = body["choices"][0]["logprobs"]["text_offset"]
    return offsets == sorted(offsets) and results[0].text == "é日é" and offsets[-1] <= 2


FORCE_EOS = {"logit_bias": {str(EOS): 100}}
ONLY_A = {"allowed_token_ids": [A]}
ONLY_AB = {"allowed_token_ids": [A, B]}

ROWS = [
    # -- length
    chat("max_tokens=1 is one token", counts(1), max_tokens=1),
    chat("max_tokens=2 is two: the hand-over is in between", counts(2), max_tokens=2),
    completion("max_tokens absent is 16", counts(16), max_tokens=None, ignore_eos=True),
    chat("max_completion_tokens wins", counts(3), max_tokens=9, max_completion_tokens=3),
    completion("max_tokens beyond the room is clamped", counts(6), prompt=[A] * (MAX_LEN - 6), max_tokens=10**6,
               ignore_eos=True),
    # -- the end of text
    chat("EOS as the first token", ends("", "stop", None, 1), **FORCE_EOS),
    completion("EOS as the first token", ends("", "stop", None, 1), **FORCE_EOS),
    completion("EOS is ignored", counts(12), **FORCE_EOS, ignore_eos=True),
    completion("min_tokens puts EOS off", counts(4, "stop"), **FORCE_EOS, min_tokens=3),
    completion("a stop token as the first one", ends("", "stop", A, 1), **ONLY_A, stop_token_ids=[A]),
    completion("a stop token is put off by min_tokens", ends("aa", "stop", A, 3), **ONLY_A, stop_token_ids=[A],
               min_tokens=2),
    completion("a stop token's text, on demand", ends("a", "stop", A, 1), **ONLY_A, stop_token_ids=[A],
               include_stop_str_in_output=True),
    # -- stop strings
    completion("a stop string as the first token", ends("", "stop", "a", 1), **ONLY_A, stop="a"),
    completion("a stop string across tokens", ends("aa", "stop", "cde"), **says("aacdef"), stop=["zz", "cde"]),
    completion("with its text", ends("aacde", "stop", "cde"), **says("aacdef", include_stop_str_in_output=True),
               stop="cde"),
    completion("the earliest match wins", ends("x", "stop", "yz"), **says("xyzabc"), stop=["abc", "yz", "c"]),
    completion("what might have been a stop comes out", ends("abcX", "stop"), **says("abcX"), stop="abcd"),
    completion("also at a cut", ends("aaa", "length", None, 3), **ONLY_A, stop="aaaaaaaa", max_tokens=3),
    completion("the prompt does not count", ends("bc", "stop"), prompt="ab", **says("bc"), stop="abc"),
    completion("min_tokens puts a stop string off", ends("aaa", "stop", "a", 4), **ONLY_A, stop="a", min_tokens=3),
    # -- characters
    chat("whole characters only", ends("日本 é😀 ñ", "stop"), **says("日本 é😀 ñ")),
    chat("line ends within JSON", ends("a\u2028b\u2029c\u0085d", "stop"), **says("a\u2028b\u2029c\u0085d")),
    chat("leading blanks stay", ends("  two", "stop"), **says("  two")),
    chat("half a character is cut", ends("", "length", None, 2), **says("😀", max_tokens=2)),
    # -- choices
    completion("n choices, each whole", counts(36), n=3, temperature=1, seed=5, ignore_eos=True),
    completion("prompts times n", lambda results, _: len(results) == 6, prompt=["a", "b", "c"], n=2, temperature=1,
               seed=5),
    completion("token ids", counts(12), prompt=[[A, B], [B, A]], max_tokens=6, ignore_eos=True),
    # -- what may be sampled
    completion("allowed_token_ids", lambda r, _: set(r[0].text) == {"a"}, **ONLY_A),
    completion("logit_bias", lambda r, _: set(r[0].text) == {"b"}, logit_bias={str(B): 100}),
    completion("logit_bias the other way", lambda r, _: set(r[0].text) == {"b"}, **ONLY_AB, logit_bias={str(A): -100}),
    completion("repetition_penalty counts the prompt", lambda r, _: r[0].text == "b", **ONLY_AB, prompt=[A] * 9,
               repetition_penalty=1e6, max_tokens=1),
    completion("frequency_penalty counts token 0", lambda r, _: r[0].text[0] != r[0].text[1], **ONLY_AB,
               frequency_penalty=2, logit_bias={str(A): 1}, max_tokens=2, prompt=[A]),
    completion("bad_words", lambda r, _: set(r[0].text) == {"b"}, **ONLY_AB, bad_words=["a"]),
    completion("a bad word of two tokens", lambda r, _: "z" in r[0].text and "zq" not in r[0].text,
               allowed_token_ids=[Z, Q], bad_words=["zq"], temperature=1, seed=3, max_tokens=40),
    completion("presence_penalty counts token 0", lambda r, _: r[0].text[0] != r[0].text[1], **ONLY_AB,
               presence_penalty=2, logit_bias={str(A): 1}, max_tokens=2, prompt=[A]),
    # -- logprobs
    completion("logprobs of every token", logprobs_are_of(12), logprobs=2, ignore_eos=True),
    chat("logprobs of every token", logprobs_are_of(12), logprobs=True, top_logprobs=3, ignore_eos=True),
    chat("logprobs' bytes are the text", bytes_are_the_text, **says("é日x", logprobs=True)),
    completion("echo", lambda r, _: r[0].text.startswith("Once") and len(r[0].text) > 4, echo=True, ignore_eos=True),
    chat("echo alone", ends("The", "length", None, 0), echo=True, max_tokens=0, continue_final_message=True,
         messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "The"}]),
    completion("echo alone", ends("Once", "length", None, 0), echo=True, max_tokens=0),
    completion("echo with logprobs", echoes("Once upon a"), prompt="Once upon a", echo=True, logprobs=1, **ONLY_A),
    completion("echo with logprobs alone", echoes("Once upon"), prompt="Once upon", echo=True, logprobs=0,
               max_tokens=0),
    completion("echo with logprobs, of tokens that are parts of characters", offsets_ascend, prompt="é日é", echo=True,
               logprobs=0, max_tokens=0),
    # -- the rest
    completion("truncated on the left", lambda _, body: body["usage"]["prompt_tokens"] == 3, prompt="one two three",
               truncate_prompt_tokens=3),
    completion("truncated on the right", lambda _, body: body["usage"]["prompt_tokens"] == 3, prompt="one two three",
               truncate_prompt_tokens=3, truncation_side="right"),
    chat("a stop token as the first one", ends("", "stop", A, 1), **ONLY_A, stop_token_ids=[A]),
    chat("half a stop at the end of text", ends("xy", "stop"), **says("xy"), stop=["yz"]),
    completion("token ids in the answer", lambda r, body: len(r[0].ids or []) == body["usage"]["completion_tokens"],
               return_token_ids=True),
    chat("null is left out", counts(12), stop=None, logprobs=None, tools=None, seed=None, n=None, ignore_eos=True),
    chat("custom roles pass", counts(5), messages=[{"role": "critic", "content": "x"}], max_tokens=5, ignore_eos=True),
    chat("parts of text", counts(5), messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}],
         max_tokens=5, ignore_eos=True),
    chat("continue_final_message", counts(5), max_tokens=5, ignore_eos=True, continue_final_message=True,
         messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "The"}]),
]  # fmt: skip


def test_the_tokens_this_table_names(url: str) -> None:
    for text, tokens in (("a", [A]), ("b", [B]), ("zq", [Z, Q])):
        assert ask(url, "/tokenize", {"prompt": text}).body["tokens"] == tokens


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.path.split('/')[2]}: {row.name}")
def test_row(url: str, row: Row) -> None:
    exchange = ask(url, row.path, row.fields)
    assert exchange.status == 200, exchange.raw
    body = exchange.body
    results = whole(body)
    assert row.holds(results, body), body
    check_body(body, row.path)

    streamed = ask(url, row.path, {**row.fields, "stream_options": {"include_usage": True}}, stream=True)
    check_stream(streamed, row.path)
    *chunks, last = streamed.chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == body["usage"]["completion_tokens"]
    assert last["usage"]["prompt_tokens"] == body["usage"]["prompt_tokens"]
    assert same(gathered(chunks), results), (gathered(chunks), results)
    assert not any("usage" in chunk for chunk in chunks)
    if not any("\ufffd" in result.text for result in results):
        assert "\ufffd" not in streamed.raw.decode().replace("\\ufffd", "\ufffd") or "logprobs" in row.fields


def check_body(body: Body, path: str) -> None:
    assert body["object"] == ("chat.completion" if path == CHAT else "text_completion")
    assert body["model"] == "m"
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
    for choice in body["choices"]:
        assert {"finish_reason", "stop_reason", "logprobs"} <= set(choice)
        if path == CHAT:
            assert (choice["message"]["role"], choice["message"]["refusal"]) == ("assistant", None)


def test_no_usage_unless_asked(url: str) -> None:
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        streamed = ask(url, COMPLETIONS, {"prompt": "x", "max_tokens": 3, **options}, stream=True)
        assert all(chunk["choices"] and "usage" not in chunk for chunk in streamed.chunks)


def test_continuous_usage_only_grows(url: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"prompt": "x", "max_tokens": 9, "n": 2, "ignore_eos": True, "stream_options": options}
    streamed = ask(url, COMPLETIONS, fields, stream=True)
    seen = [chunk["usage"]["completion_tokens"] for chunk in streamed.chunks]
    assert seen == sorted(seen)
    assert seen[-1] == 18


def test_choices_interleave(url: str) -> None:
    fields = {"prompt": "x", "max_tokens": 60, "n": 2, "ignore_eos": True, "temperature": 1}
    order = [c["choices"][0]["index"] for c in ask(url, COMPLETIONS, fields, stream=True).chunks]
    assert order != sorted(order)


def test_same_seed_same_text(url: str) -> None:
    fields = {"prompt": "x", "max_tokens": 20, "temperature": 1.3, "seed": 11}
    texts = [whole(ask(url, COMPLETIONS, fields).body)[0].text for _ in range(2)]
    assert texts[0] == texts[1]
    other = whole(ask(url, COMPLETIONS, {**fields, "seed": 12}).body)[0].text
    assert other != texts[0]


def test_greedy_ignores_the_seed(url: str) -> None:
    fields = {"prompt": "x", "max_tokens": 20, "temperature": 0}
    assert len({whole(ask(url, COMPLETIONS, {**fields, "seed": seed}).body)[0].text for seed in (1, 2)}) == 1


def test_cached_tokens_are_the_true_hit(url: str) -> None:
    prompt = [A, B] * 40 + [B] * 7
    fields = {"prompt": prompt, "max_tokens": 2, "cache_salt": "of this test"}
    first, second = (ask(url, COMPLETIONS, fields).body["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 80, "whole blocks of 16, and never the last token"
    assert second["prompt_tokens"] == 87
    fields["cache_salt"] = "another"
    assert ask(url, COMPLETIONS, fields).body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_n_reads_the_prompt_once(url: str, request: pytest.FixtureRequest) -> None:
    kind = "pd" if "pd" in request.node.callspec.id else "colocated"
    stack = request.getfixturevalue(f"{kind}_stack")
    fields = {"prompt": [A, B, B] * 40, "max_tokens": 4, "n": 4, "cache_salt": "n", "ignore_eos": True}
    body = ask(url, COMPLETIONS, fields).body
    assert body["usage"]["prompt_tokens"] == 120
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    sequences = stack.admin(f"/admin/requests/{body['id']}")["sequences"]
    assert [s["cached_tokens"] for s in sequences] == [0, 112, 112, 112]
    if kind == "pd":
        sent = [s["kv_bytes"] for s in sequences]
        assert all(bytes_ < sent[0] / 4 for bytes_ in sent[1:]), "nor is its KV sent again"


def test_prompt_logprobs(url: str) -> None:
    fields = {"prompt": "Once upon a time", "max_tokens": 1, "temperature": 0}
    echoed = ask(url, COMPLETIONS, {**fields, "echo": True, "logprobs": 1}).body["choices"][0]["logprobs"]
    for _ in range(2):  # a prompt that has been read already has them all the same
        choice = ask(url, COMPLETIONS, {**fields, "prompt_logprobs": 1}).body["choices"][0]
        ids = ask(url, "/tokenize", {"prompt": fields["prompt"]}).body["tokens"]
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert len(others) == len(ids) - 1
        own = [entry[str(token)]["logprob"] for entry, token in zip(others, ids[1:], strict=True)]
        assert own == pytest.approx(echoed["token_logprobs"][1 : len(ids)], abs=1e-3)


def test_as_good_as_greedy(url: str) -> None:
    """Each of these leaves the most likely token only."""
    fields = {"prompt": "x", "max_tokens": 20, "seed": 3}
    greedy = whole(ask(url, COMPLETIONS, {**fields, "temperature": 0}).body)[0].text
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}):
        assert whole(ask(url, COMPLETIONS, {**fields, "temperature": 1.5, **narrow}).body)[0].text == greedy, narrow


def test_choices_differ(url: str) -> None:
    fields = {"prompt": "x", "max_tokens": 20, "temperature": 1, "seed": 3, "n": 4}
    assert len({result.text for result in whole(ask(url, COMPLETIONS, fields).body)}) == 4


def test_a_grammar_that_runs_into_a_limit(url: str) -> None:
    """After a token or two: an error, streamed or not, and no "stop" after half a text."""
    fields = {"prompt": "x", "max_tokens": 50, "structured_outputs": {"regex": "a{1000}{100}"}}
    exchange = ask(url, COMPLETIONS, fields)
    assert (exchange.status, exchange.body["error"]["code"]) == (400, "grammar_limit")
    *chunks, last = ask(url, COMPLETIONS, fields, stream=True).chunks
    assert last["error"] == exchange.body["error"]
    assert chunks, "it came after the first token"
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks)


def test_what_a_client_leaves_is_free_within_a_second(url: str, request: pytest.FixtureRequest) -> None:
    stack = request.getfixturevalue(f"{'pd' if 'pd' in request.node.callspec.id else 'colocated'}_stack")

    def held() -> dict[str, int]:
        loads = [worker["load"] for worker in stack.admin("/admin/state", url=url)["workers"]]
        return {key: sum(load[key] for load in loads) for key in ("running", "waiting", "blocks_used", "pushing")}

    fields = {"prompt": [A] * 600, "max_tokens": 3000, "ignore_eos": True, "n": 2, "stream": True}
    with httpx.stream("POST", f"{url}{COMPLETIONS}", json=fields, timeout=60) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        eventually(lambda: held()["blocks_used"], 10, "it is running")
    eventually(
        lambda: not any(held().values()), 1 + 2, "free; workers say so five times a second, and this box is slow"
    )


def test_prompt_tokens_are_those_of_tokenize(url: str) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi <|im_end|> é"}]
    tokens = ask(url, "/tokenize", {"messages": messages}).body
    usage = ask(url, CHAT, {"messages": messages, "max_tokens": 1}).body["usage"]
    assert usage["prompt_tokens"] == tokens["count"] == len(tokens["tokens"])


def test_refusals_reach_nobody(url: str) -> None:
    """The list is tests/router/test_errors.py; here: the same on a live stack, streamed or not, and it stays well."""
    for fields in ({"temperature": -1}, {"structured_outputs": {"regex": "("}}, {"prompt": [A] * MAX_LEN}):
        for stream in (False, True):
            exchange = ask(url, COMPLETIONS, {"prompt": "x", **fields}, stream=stream)
            assert exchange.status == 400
            assert set(exchange.body["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(f"{url}/health").status_code == 200


def test_by_choice_is_complete(url: str) -> None:
    fields = {"prompt": ["x", "y"], "n": 2, "max_tokens": 4, "temperature": 1}
    assert sorted(by_choice(ask(url, COMPLETIONS, fields, stream=True).chunks)) == [0, 1, 2, 3]
