"""Nothing that a client sends gives a 5xx."""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.router import openai, structured
from server.router.errors import ApiError
from server.router.prepare import Preparer
from server.router.responses import ResponsesRequest, Store, to_chat
from server.router.text import Text

KINDS = (openai.ChatRequest, openai.CompletionRequest, ResponsesRequest)
FIELDS = sorted({name for kind in KINDS for name in kind.__struct_fields__})
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400, 1e308, "", "a", "1"])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
KEYS = st.text(max_size=5) | st.sampled_from(
    ["type", "json", "regex", "choice", "grammar", "json_schema", "schema", "function", "name", "parameters", "format",
     "role", "content", "text", "tool_calls", "arguments", "properties", "$ref", "pattern", "enum", "json_object"]
)  # fmt: skip
VALUES = st.recursive(
    SCALARS | st.sampled_from(["function", "json_schema", "object", "string", "required", "(", "start: a", "user"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)


Reader = Callable[[bytes], None]


def readers(text: Text) -> list[Reader]:
    """All that is checked of a request before it takes a place in the queue, and what its fields become then."""
    prepare = Preparer(text)

    def chat(body: bytes) -> None:
        request = openai.decode(body, openai.ChatRequest)
        prepare.chat(request)
        sample(text, request)

    def completion(body: bytes) -> None:
        request = openai.decode(body, openai.CompletionRequest)
        prepare.completions(request)
        sample(text, request)

    def response(body: bytes) -> None:
        request, _ = to_chat(openai.decode(body, ResponsesRequest), Store())
        prepare.chat(request)
        sample(text, request)

    return [chat, completion, response]


def sample(text: Text, request: openai.Request) -> None:
    max_tokens = min(request.limit or 8, 8)
    field, grammar = structured.read(request)
    if grammar and (wrong := text.check_grammar_now(grammar)):
        raise structured.refused(field, wrong)
    bounds = openai.Bounds(field, grammar, text.spellings_now(request.bad_words or []))
    openai.sampling(request, max_tokens=max_tokens, eos_ids=frozenset((2,)), vocab_size=49152, seed=1, bounds=bounds)


def refusal(reader: Reader, body: bytes) -> ApiError | None:
    try:
        reader(body)
    except ApiError as error:
        return error
    return None


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=BODIES)
def test_a_request_is_good_or_400(text: Text, body: dict[str, Any]) -> None:
    for base in ({"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"}, {"input": "hi"}):
        for reader in readers(text):
            error = refusal(reader, json.dumps({**base, **body}).encode())
            assert error is None or (error.status == 400 and len(json.dumps(error.body)) < 1000)


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_400(text: Text, body: bytes) -> None:
    for reader in readers(text):
        error = refusal(reader, body)
        assert error is not None
        assert error.status == 400
