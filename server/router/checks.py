"""What a well-formed request may still get wrong: ranges, and fields that do not go together.

Each check raises ApiError 400 with `param` set to the field. Nothing here changes a request; `read_messages` gives the
messages as a template wants them.
"""

import json
import math
from collections.abc import Collection
from typing import Any

from server.router.errors import bad_request
from server.router.openai import (
    INT64,
    MAX_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    Request,
    read_bias,
)

MAX_N = 128
MAX_CHOICES = 1024
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_IDS = 4096  # every step of the sequence looks at each of them
# What apply_chat_template takes for itself; a template's own variables are free.
_NO_KWARGS = frozenset(("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "return_dict"))
_NO_KWARGS |= {"add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask", "tokenizer_kwargs"}
_NO_KWARGS |= {"padding", "truncation", "max_length", "return_tensors"}


def read_calls(i: int, calls: Any) -> list[dict[str, Any]]:
    """An earlier turn's tool calls, arguments as objects: so templates want them."""
    if not isinstance(calls, list):
        raise bad_request("messages", f"messages[{i}].tool_calls: must be a list")
    return [_call(i, call) for call in calls]


def _call(i: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request("messages", f"messages[{i}].tool_calls: each needs function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
            json.dumps(arguments, ensure_ascii=False).encode()  # no text holds the halves of a surrogate pair alone
        except ValueError as error:
            raise bad_request("messages", f"messages[{i}].tool_calls: arguments must be JSON") from error
        except RecursionError as error:
            raise bad_request("messages", f"messages[{i}].tool_calls: arguments are nested too deeply") from error
    shaped = {"name": function["name"], "arguments": {} if arguments is None else arguments}
    return {"id": call.get("id"), "type": "function", "function": shaped}


def _number(name: str, value: float | None, low: float, high: float, *, open_low: bool = False) -> None:
    """The value is not repeated in the message: an int from JSON may have thousands of digits."""
    if value is None:
        return
    is_low = value <= low if open_low else value < low
    if is_low or value > high or value == math.inf:
        left, right = ("(" if open_low else "["), ("]" if math.isfinite(high) else ")")
        raise bad_request(name, f"{name}: must be in {left}{low:g}, {high:g}{right}")


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
    if r.seed is not None and not -INT64 <= r.seed < INT64:
        raise bad_request("seed", "seed: must fit into 64 bits")
    _check_stops(r)
    for name, ids in (("stop_token_ids", r.stop_token_ids), ("allowed_token_ids", r.allowed_token_ids)):
        _check_count(name, ids or ())
        check_ids(name, ids or [], vocab_size)
    _check_count("logit_bias", r.logit_bias or ())
    if r.allowed_token_ids == []:
        raise bad_request("allowed_token_ids", "allowed_token_ids: must not be empty")
    read_bias(r.logit_bias, vocab_size)
    if r.stream_options is not None and not r.stream:
        raise bad_request("stream_options", "stream_options: only with stream=true")
    if r.truncate_prompt_tokens is not None and (r.truncate_prompt_tokens < -1 or r.truncate_prompt_tokens == 0):
        raise bad_request("truncate_prompt_tokens", "truncate_prompt_tokens: must be -1 or at least 1")
    if r.truncation_side not in (None, "left", "right"):
        raise bad_request("truncation_side", "truncation_side: must be left or right")
    _check_bad_words(r)
    _number("prompt_logprobs", r.prompt_logprobs, -1, MAX_LOGPROBS)
    if r.prompt_logprobs is not None and r.stream:
        raise bad_request("prompt_logprobs", "prompt_logprobs: not with stream=true")


def _check_stops(r: Request) -> None:
    if len(r.stops) > MAX_STOPS:
        raise bad_request("stop", f"stop: at most {MAX_STOPS} strings")
    for stop in r.stops:
        if not stop or len(stop) > MAX_STOP_CHARS:
            raise bad_request("stop", f"stop: each string must have 1 to {MAX_STOP_CHARS} characters")


def _check_count(name: str, entries: Collection[Any]) -> None:
    if len(entries) > MAX_IDS:
        raise bad_request(name, f"{name}: at most {MAX_IDS} entries")


def check_ids(name: str, ids: list[int], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise bad_request(name, f"{name}: token ids must be in [0, {vocab_size - 1}]")


def check_prompts(prompts: list[str] | list[list[int]], n: int, vocab_size: int) -> None:
    if len(prompts) * n > MAX_CHOICES:
        raise bad_request("prompt", f"prompt: prompts times n must be at most {MAX_CHOICES}")
    for ids in prompts:
        if isinstance(ids, list):
            check_ids("prompt", ids, vocab_size)


def _check_bad_words(r: Request) -> None:
    words = r.bad_words or []
    if len(words) > MAX_STOPS:
        raise bad_request("bad_words", f"bad_words: at most {MAX_STOPS} strings")
    if not all(0 < len(word) <= MAX_STOP_CHARS for word in words):
        raise bad_request("bad_words", f"bad_words: each string must have 1 to {MAX_STOP_CHARS} characters")


def check_completion(r: CompletionRequest) -> None:
    _number("logprobs", r.logprobs, -1, MAX_LOGPROBS)
    _number("max_tokens", r.max_tokens, 0 if r.echo else 1, math.inf)
    if r.suffix:
        raise bad_request("suffix", "suffix: not supported by this model")
    if r.best_of is not None and r.best_of != r.num_choices:
        raise bad_request("best_of", "best_of: only equal to n")
    _check_min_tokens(r)


def check_chat(r: ChatRequest) -> None:
    least = 0 if r.echo else 1
    _number("max_completion_tokens", r.max_completion_tokens, least, math.inf)
    _number("max_tokens", r.max_tokens, least if r.max_completion_tokens is None else -math.inf, math.inf)
    _number("top_logprobs", r.top_logprobs, -1, MAX_LOGPROBS)
    if r.top_logprobs is not None and r.top_logprobs != 0 and not r.logprobs:
        raise bad_request("top_logprobs", "top_logprobs: only with logprobs=true")
    if r.chat_template is not None:
        raise bad_request("chat_template", "chat_template: this server does not take one from requests")
    _check_min_tokens(r)


def _check_min_tokens(r: Request) -> None:
    if r.min_tokens and r.limit is not None and r.min_tokens > r.limit:
        raise bad_request("min_tokens", "min_tokens: more than max_tokens")


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
    shaped = {**message, "content": _content(i, message.get("content"))}
    if message.get("tool_calls") is not None:
        shaped["tool_calls"] = read_calls(i, message["tool_calls"])
    return shaped


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


def read_kwargs(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """A template's own variables. The tokenizer's arguments are not among them: one of them is another template."""
    for name in kwargs or {}:
        if name in _NO_KWARGS:
            raise bad_request("chat_template_kwargs", f"chat_template_kwargs: {name} is not a template's variable")
    return kwargs or {}
