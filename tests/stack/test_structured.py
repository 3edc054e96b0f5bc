"""Structured output from a live stack: what is asked for is what comes, on either path, whatever the model would say.

The model here is random, so every byte that fits is the grammar's doing.
"""

import json
import re
from typing import Any

import httpx
import pytest

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GBNF = 'root ::= "yes" | "no" | item+\nitem ::= [a-c] " "'


def is_person(text: str) -> bool:
    person = json.loads(text)
    assert set(person) == {"name", "age", "tags"}
    return bool(re.fullmatch("[A-Z][a-z]{1,8}", person["name"])) and 0 <= person["age"] <= 130


# (fields, what the text must satisfy)
ROWS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": PERSON}}},
     is_person),
    ({"structured_outputs": {"json": PERSON}}, is_person),
    ({"guided_json": json.dumps(PERSON)}, is_person),
    ({"structured_outputs": {"choice": ["left", "rechts", "dünn \"q\""]}},
     lambda text: text in ("left", "rechts", "dünn \"q\"")),
    ({"guided_choice": ["a"]}, lambda text: text == "a"),
    ({"structured_outputs": {"regex": r"\d{4}-\d{2}-\d{2}"}}, lambda text: re.fullmatch(r"\d{4}-\d\d-\d\d", text)),
    ({"structured_outputs": {"regex": "[日本語]{3}"}}, lambda text: re.fullmatch("[日本語]{3}", text)),
    ({"guided_regex": "x"}, lambda text: text == "x"),
    ({"structured_outputs": {"grammar": GBNF}}, lambda text: re.fullmatch("yes|no|([abc] )+", text)),
    ({"structured_outputs": {"grammar": 'start: "a" | "b" /[0-9]{2}/'}}, lambda text: re.fullmatch(r"a|b\d\d", text)),
    ({"structured_outputs": {"regex": "ab"}, "ignore_eos": True, "min_tokens": 5}, lambda text: text == "ab"),
    ({"structured_outputs": {"regex": "ab"}, "logit_bias": {str(i): -100 for i in range(512)}},
     lambda text: text == "ab"),
]  # fmt: skip


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_output_fits(url: str, temperature: float) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        for fields, fits in ROWS:
            body = {"prompt": "Say:", "max_tokens": 300, "temperature": temperature, "seed": 3, **fields}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, (fields, answer.text)
            choice = answer.json()["choices"][0]
            if choice["finish_reason"] == "length":  # only where the grammar has no end of its own
                assert fields["structured_outputs"]["grammar"] == GBNF
                continue
            assert choice["finish_reason"] == "stop"
            assert fits(choice["text"]), (fields, choice["text"])


def test_json_object_parses_or_says_length(url: str) -> None:
    for seed in range(12):
        body = {"messages": [{"role": "user", "content": "json"}], "response_format": {"type": "json_object"},
                "max_tokens": 120, "temperature": 1.0, "seed": seed}  # fmt: skip
        choice = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
        else:
            assert choice["finish_reason"] == "length"


def test_a_cut_says_length(url: str) -> None:
    for max_tokens in (1, 2, 5):
        body = {"prompt": "x", "max_tokens": max_tokens, "structured_outputs": {"regex": "[a-z]{50}"}}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == max_tokens


def test_many_at_once_do_not_mix(url: str) -> None:
    body = {"prompt": ["one", "two"], "n": 4, "max_tokens": 60, "structured_outputs": {"json": PERSON}, "seed": 1}
    free = {"prompt": "one", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    alone = httpx.post(f"{url}/v1/completions", json=free, timeout=60).json()["choices"][0]["text"]
    with httpx.Client(base_url=url, timeout=60) as client:
        choices = client.post("/v1/completions", json=body).json()["choices"]
        assert client.post("/v1/completions", json=free).json()["choices"][0]["text"] == alone
    assert len(choices) == 8
    assert all(is_person(c["text"]) for c in choices if c["finish_reason"] == "stop")
    assert any(c["finish_reason"] == "stop" for c in choices)
