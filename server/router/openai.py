"""Requests as OpenAI clients write them, read into typed structs and checked: 400 now or never.

1. `decode` reads the body; msgspec's complaint about a field becomes a 400 that names the field.
2. `check_*` looks at ranges and at what does not go together. Null is the same as left out; unknown fields are ignored.
3. `sampling` turns a checked request into the token terms of `SamplingParams`.
"""

import math
import re
import secrets
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from server.router.errors import ApiError, bad_request
from server.sequence import SamplingParams

MAX_N = 128
MAX_CHOICES = 1024
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
COMPLETION_TOKENS = 16
_INT64 = 2**63
_PLACE = re.compile(r" - at `\$\.?([A-Za-z0-9_]*)([^`]*)`$")

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
    # Not served yet: a value is refused by name, so that nobody takes free text for structured.
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


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int] | None = None


def decode(body: bytes, kind: type[R]) -> R:
    """Raises ApiError 400."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _misfit(error) from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise bad_request(None, f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise bad_request(None, "the body is nested too deeply") from error


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


# checks


def _number(name: str, value: float | None, low: float, high: float, *, open_low: bool = False) -> None:
    if value is None:
        return
    is_low = value <= low if open_low else value < low
    if not math.isfinite(value) or is_low or value > high:
        left, right = ("(" if open_low else "["), ("]" if math.isfinite(high) else ")")
        raise bad_request(name, f"{name}: must be in {left}{low:g}, {high:g}{right}, got {value:.6g}")


def check_common(request: Request, vocab_size: int) -> None:
    """Raises ApiError 400 with `param` set to the field."""
    r = request
    _number("temperature", r.temperature, 0, math.inf)
    _number("top_p", r.top_p, 0, 1, open_low=True)
    _number("min_p", r.min_p, 0, 1)
    _number("presence_penalty", r.presence_penalty, -2, 2)
    _number("frequency_penalty", r.frequency_penalty, -2, 2)
    _number("repetition_penalty", r.repetition_penalty, 0, math.inf, open_low=True)
    _number("top_k", r.top_k, -1, 2**31)
    _number("n", r.n, 1, MAX_N)
    _number("min_tokens", r.min_tokens, 0, 2**31)
    _number("seed", r.seed, -_INT64, _INT64 - 1)
    if r.seed is not None and not -_INT64 <= r.seed < _INT64:  # floats are too coarse for the very edge
        raise bad_request("seed", "seed: must fit into 64 bits")
    _check_stops(r)
    check_ids("stop_token_ids", r.stop_token_ids or [], vocab_size)
    check_ids("allowed_token_ids", r.allowed_token_ids or [], vocab_size)
    if r.allowed_token_ids == []:
        raise bad_request("allowed_token_ids", "allowed_token_ids: must not be empty")
    _bias(r.logit_bias, vocab_size)
    if r.stream_options is not None and not r.stream:
        raise bad_request("stream_options", "stream_options: only with stream=true")
    if r.truncate_prompt_tokens is not None and (r.truncate_prompt_tokens < -1 or r.truncate_prompt_tokens == 0):
        raise bad_request("truncate_prompt_tokens", "truncate_prompt_tokens: must be -1 or at least 1")
    if r.truncation_side not in (None, "left", "right"):
        raise bad_request("truncation_side", "truncation_side: must be left or right")
    _check_unserved(r)


def _check_stops(r: Request) -> None:
    if len(r.stops) > MAX_STOPS:
        raise bad_request("stop", f"stop: at most {MAX_STOPS} strings")
    for stop in r.stops:
        if not stop or len(stop) > MAX_STOP_CHARS:
            raise bad_request("stop", f"stop: each string must have 1 to {MAX_STOP_CHARS} characters")


def check_ids(name: str, ids: list[int], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise bad_request(name, f"{name}: token ids must be in [0, {vocab_size - 1}]")


def check_prompts(prompts: list[str] | list[list[int]], n: int, vocab_size: int) -> None:
    if len(prompts) * n > MAX_CHOICES:
        raise bad_request("prompt", f"prompt: prompts times n must be at most {MAX_CHOICES}")
    for ids in prompts:
        if isinstance(ids, list):
            check_ids("prompt", ids, vocab_size)


def _bias(bias: Mapping[str, float] | None, vocab_size: int) -> dict[int, float]:
    out = {}
    for key, value in (bias or {}).items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10 or int(key) >= vocab_size:
            raise bad_request("logit_bias", f"logit_bias: {key[:20]!r} is not a token id in [0, {vocab_size - 1}]")
        out[int(key)] = max(-100.0, min(100.0, value))
    return out


def _check_unserved(r: Request) -> None:
    if r.response_format is not None and r.response_format.get("type") != "text":
        raise bad_request("response_format", "response_format: only {'type': 'text'} is served")
    for name in ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if getattr(r, name):
            raise bad_request(name, f"{name}: structured output is not served")
    if r.bad_words:
        raise bad_request("bad_words", "bad_words: not served; use logit_bias")
    if r.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs", "prompt_logprobs: not served")


def check_completion(r: CompletionRequest) -> None:
    _number("logprobs", r.logprobs, -1, MAX_LOGPROBS)
    _number("max_tokens", r.max_tokens, 0 if r.echo else 1, math.inf)
    if r.suffix:
        raise bad_request("suffix", "suffix: not supported by this model")
    if r.best_of is not None and r.best_of != r.num_choices:
        raise bad_request("best_of", "best_of: only equal to n")
    if r.echo and r.logprobs is not None:
        raise bad_request("logprobs", "logprobs: not served together with echo")
    _check_min_tokens(r)


def check_chat(r: ChatRequest) -> None:
    _number("max_completion_tokens", r.max_completion_tokens, 1, math.inf)
    _number("max_tokens", r.max_tokens, 1 if r.max_completion_tokens is None else -math.inf, math.inf)
    _number("top_logprobs", r.top_logprobs, -1, MAX_LOGPROBS)
    if r.top_logprobs is not None and r.top_logprobs != 0 and not r.logprobs:
        raise bad_request("top_logprobs", "top_logprobs: only with logprobs=true")
    if r.chat_template is not None:
        raise bad_request("chat_template", "chat_template: this server does not take one from requests")
    if r.tools:
        raise bad_request("tools", "tools: not served")
    if r.tool_choice is not None and r.tool_choice != "none":
        raise bad_request("tool_choice", "tool_choice: only with tools")
    _check_min_tokens(r)


def _check_min_tokens(r: Request) -> None:
    if r.min_tokens and r.limit is not None and r.min_tokens > r.limit:
        raise bad_request("min_tokens", f"min_tokens: {r.min_tokens} is more than max_tokens, {r.limit}")


def read_messages(messages: list[dict[str, Any]] | None, *, resume: bool, generation: bool | None) -> list[Any]:
    """Messages as a template wants them: content as one string."""
    if not messages:
        raise bad_request("messages", "messages: must be a list of at least one message")
    if resume and generation:
        raise bad_request("continue_final_message", "continue_final_message: not with add_generation_prompt")
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(i: int, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise bad_request("messages", f"messages[{i}].role: must be a string")
    return {**message, "content": _content(i, message.get("content"))}


def _content(i: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request("messages", f"messages[{i}].content: must be a string, null or a list of parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "refusal") or not isinstance(part.get("text", part.get("refusal")), str):
            raise bad_request("messages", f"messages[{i}].content: this model takes text parts only")
        texts.append(part.get("text", part.get("refusal")))
    return "\n".join(texts)


def sampling(r: Request, *, max_tokens: int, eos_ids: frozenset[int], vocab_size: int, seed: int) -> SamplingParams:
    """A checked request in token terms. `seed` is the choice's own: choice j of a request draws with seed + j."""
    ends = set(r.stop_token_ids or ()) | (frozenset() if r.ignore_eos else eos_ids)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed % _INT64,
        temperature=_or(r.temperature, 1.0),
        top_p=_or(r.top_p, 1.0),
        top_k=max(0, _or(r.top_k, 0)),
        min_p=_or(r.min_p, 0.0),
        presence_penalty=_or(r.presence_penalty, 0.0),
        frequency_penalty=_or(r.frequency_penalty, 0.0),
        repetition_penalty=_or(r.repetition_penalty, 1.0),
        min_tokens=min(_or(r.min_tokens, 0), max_tokens),
        stop_token_ids=tuple(sorted(ends)),
        logit_bias=_bias(r.logit_bias, vocab_size),
        allowed_token_ids=tuple(r.allowed_token_ids or ()),
        num_logprobs=r.num_logprobs,
    )


def pick_seed(r: Request) -> int:
    return secrets.randbelow(_INT64) if r.seed is None else r.seed


V = TypeVar("V", int, float)


def _or(value: V | None, default: V) -> V:
    return default if value is None else value
