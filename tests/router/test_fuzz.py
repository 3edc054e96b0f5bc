"""Nothing that a client sends gives a 5xx."""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.router import checks, openai
from server.router.errors import ApiError

FIELDS = sorted({*openai.ChatRequest.__struct_fields__, *openai.CompletionRequest.__struct_fields__})
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400, 1e308, "", "a", "1"])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)


def read_chat(body: bytes) -> None:
    chat = openai.decode(body, openai.ChatRequest)
    checks.check_common(chat, 49152)
    checks.check_chat(chat)
    checks.read_messages(chat.messages, resume=bool(chat.continue_final_message), generation=chat.add_generation_prompt)
    checks.read_kwargs(chat.chat_template_kwargs)
    sample(chat)


def read_completion(body: bytes) -> None:
    request = openai.decode(body, openai.CompletionRequest)
    checks.check_common(request, 49152)
    checks.check_completion(request)
    checks.check_prompts(openai.read_prompts(request.prompt), request.num_choices, 49152)
    sample(request)


def sample(request: openai.Request) -> None:
    max_tokens = min(request.limit or 8, 8)
    openai.sampling(request, max_tokens=max_tokens, eos_ids=frozenset((2,)), vocab_size=49152, seed=1)


def refusal(reader: Callable[[bytes], None], body: bytes) -> ApiError | None:
    try:
        reader(body)
    except ApiError as error:
        return error
    return None


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=BODIES)
def test_a_request_is_good_or_400(body: dict[str, Any]) -> None:
    for base in ({"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"}):
        for reader in (read_chat, read_completion):
            error = refusal(reader, json.dumps({**base, **body}).encode())
            assert error is None or (error.status == 400 and len(json.dumps(error.body)) < 1000)


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_400(body: bytes) -> None:
    for reader in (read_chat, read_completion):
        error = refusal(reader, body)
        assert error is not None
        assert error.status == 400
