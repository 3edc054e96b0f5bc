"""Requests as OpenAI clients write them, read into typed structs and checked: 400 now or never.

1. `decode` reads the body; msgspec's complaint about a field becomes a 400 that names the field. Null is the same as
   left out; unknown fields are ignored.
2. `checks` looks at ranges and at what does not go together.
3. `sampling` turns a checked request into the token terms of `SamplingParams`.
"""

import re
from collections.abc import Mapping
from random import getrandbits
from typing import Any, TypeVar

import msgspec
import numpy as np

from server.router.errors import ApiError, bad_request
from server.sequence import SamplingParams

MAX_LOGPROBS = 20
COMPLETION_TOKENS = 16
INT64 = 2**63
MAX_DEPTH = 200  # of objects and lists in one another: templates and schemas recurse over them
_PLACE = re.compile(r" - at `\$\.?([A-Za-z0-9_]*)([^`]*)`$")

_STEPS = bytes.maketrans(b"[]{}", b"\x01\xff\x01\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

R = TypeVar("R", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Request(msgspec.Struct, kw_only=True):
    """What chat and completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def limit(self) -> int | None:
        """The output length asked for; None = as the endpoint has it."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int:
        """As SamplingParams has it: -1 = none."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int:
        """As SamplingParams has it: -1 = none."""
        asked = self.prompt_logprobs
        return -1 if asked is None else MAX_LOGPROBS if asked == -1 else asked


class CompletionRequest(Request, kw_only=True):
    prompt: msgspec.Raw = msgspec.Raw()
    suffix: str | None = None
    logprobs: int | None = None
    best_of: int | None = None

    @property
    def limit(self) -> int | None:
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int:
        return -1 if self.logprobs is None else MAX_LOGPROBS if self.logprobs == -1 else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int:
        return max(super().num_prompt_logprobs, self.num_logprobs if self.echo else -1)


class ChatRequest(Request, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int:
        if not self.logprobs:
            return -1
        return MAX_LOGPROBS if self.top_logprobs == -1 else self.top_logprobs or 0


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    tools: list[Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int] | None = None


def decode(body: bytes, kind: type[R]) -> R:
    """Raises ApiError 400."""
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deep(body):
        raise bad_request(
            None, f"the body is nested too deeply: more than {MAX_DEPTH} lists and objects in one another"
        )
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _misfit(error) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise bad_request(None, f"the body is not valid JSON: {error}") from error


def _is_deep(body: bytes) -> bool:
    """Of what is no JSON it says anything: the parser comes next."""
    no_escapes = body.replace(rb"\\", b"").replace(rb"\"", b"")
    brackets = b"".join(no_escapes.split(b'"')[::2]).translate(_STEPS, _NO_BRACKETS)  # every other part is a string
    depths = np.cumsum(np.frombuffer(brackets, np.int8), dtype=np.int32)
    return depths.size > 0 and int(depths.max()) > MAX_DEPTH


def _misfit(error: msgspec.ValidationError) -> ApiError:
    text = str(error)
    place = _PLACE.search(text)
    if place is None:
        return bad_request(None, text)
    what = text[: place.start()].replace(" | null", "")
    return bad_request(place[1], f"{place[1]}{place[2]}: {what}")


def read_prompts(raw: msgspec.Raw) -> list[str] | list[list[int]]:
    """A completion's prompt in any of its four forms. Which one is seen from its first characters, so that a list of
    token ids is read once, as ids."""
    start = bytes(raw).lstrip(b" \t\r\n[")[:1]
    depth = bytes(raw)[:64].split(start or b"]")[0].count(b"[")
    if not bytes(raw) or bytes(raw) == b"null":
        raise bad_request("prompt", "prompt: required")
    prompts: list[str] | list[list[int]]
    try:
        if depth == 0:
            prompts = [msgspec.json.decode(raw, type=str)]
        elif depth == 1 and start == b'"':
            prompts = msgspec.json.decode(raw, type=list[str])
        elif depth == 1:
            prompts = [msgspec.json.decode(raw, type=list[int])]
        else:
            prompts = msgspec.json.decode(raw, type=list[list[int]])
    except msgspec.ValidationError as error:
        message = "prompt: expected a string, a list of strings, a list of token ids, or a list of those"
        raise bad_request("prompt", f"{message} ({str(error).partition(' - at')[0]})") from error
    if not prompts or not all(prompts):
        raise bad_request("prompt", "prompt: must not be empty")
    return prompts


class Bounds(msgspec.Struct, frozen=True):
    """What the output is held to, found out while the request was prepared: it takes the tokenizer."""

    field: str = ""  # of the request that the grammar comes from
    grammar: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()


def sampling(
    r: Request, *, max_tokens: int, eos_ids: frozenset[int], vocab_size: int, seed: int, bounds: Bounds
) -> SamplingParams:
    """A checked request in token terms. `seed` is the choice's own: choice j of a request draws with seed + j."""
    # A grammar ends by itself, and nothing but an end of text may follow then: there is no ignoring it.
    ends = set(r.stop_token_ids or ()) | (frozenset() if r.ignore_eos and not bounds.grammar else eos_ids)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed % INT64,
        temperature=_or(r.temperature, 1.0),
        top_p=_or(r.top_p, 1.0),
        top_k=max(0, _or(r.top_k, 0)),
        min_p=_or(r.min_p, 0.0),
        presence_penalty=_or(r.presence_penalty, 0.0),
        frequency_penalty=_or(r.frequency_penalty, 0.0),
        repetition_penalty=_or(r.repetition_penalty, 1.0),
        min_tokens=min(_or(r.min_tokens, 0), max_tokens),
        stop_token_ids=tuple(sorted(ends)),
        logit_bias=read_bias(r.logit_bias, vocab_size),
        allowed_token_ids=tuple(r.allowed_token_ids or ()),
        num_logprobs=r.num_logprobs,
        num_prompt_logprobs=r.num_prompt_logprobs,
        bad_words=bounds.bad_words,
        grammar=bounds.grammar,
    )


def pick_seed(r: Request) -> int:
    return getrandbits(63) if r.seed is None else r.seed


V = TypeVar("V", int, float)


def _or(value: V | None, default: V) -> V:
    return default if value is None else value


def read_bias(bias: Mapping[str, float] | None, vocab_size: int) -> dict[int, float]:
    """Raises ApiError 400 for a key that is no token."""
    out = {}
    for key, value in (bias or {}).items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10 or int(key) >= vocab_size:
            raise bad_request("logit_bias", f"logit_bias: {key[:20]!r} is not a token id in [0, {vocab_size - 1}]")
        out[int(key)] = max(-100.0, min(100.0, value))
    return out
