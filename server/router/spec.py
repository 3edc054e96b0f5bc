"""/openapi.json: small and hand-written; what a request may hold, in the words of OpenAPI 3.1."""

from typing import Any

_STRING = {"type": ["string", "null"]}
_INT = {"type": ["integer", "null"]}
_NUMBER = {"type": ["number", "null"]}
_BOOL = {"type": ["boolean", "null"]}
_TOKEN = {"type": "integer", "minimum": 0}
_IDS = {"type": ["array", "null"], "items": _TOKEN, "maxItems": 4096}
_SHARE = {**_NUMBER, "minimum": 0, "maximum": 1}
_PENALTY = {**_NUMBER, "minimum": -2, "maximum": 2}
_COUNT = {**_INT, "minimum": 1}
_LOGPROBS = {**_INT, "minimum": -1, "maximum": 20}
_OBJECT = {"type": ["object", "null"]}

_TOOLS = {
    "type": ["array", "null"],
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": {"type": "string"}, "description": _STRING, "parameters": _OBJECT},
            },
        },
    },
}
_CHOICE = {"anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object"}]}

_COMMON: dict[str, Any] = {
    "model": _STRING,
    "max_tokens": _COUNT,
    "n": {**_COUNT, "maximum": 128},
    "temperature": {**_NUMBER, "minimum": 0},
    **dict.fromkeys(("top_p", "min_p"), _SHARE),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _PENALTY),
    "repetition_penalty": {**_NUMBER, "exclusiveMinimum": 0},
    "top_k": {**_INT, "minimum": -1},
    "seed": {**_INT, "minimum": -(2**63), "maximum": 2**63 - 1},
    "min_tokens": {**_INT, "minimum": 0},
    "truncate_prompt_tokens": _COUNT,
    "stop": {"anyOf": [_STRING, {"type": "array", "items": {"type": "string"}}]},
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), _IDS),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "stream", "echo"), _BOOL),
    "bad_words": {"type": ["array", "null"], "items": {"type": "string"}},
    "prompt_logprobs": _LOGPROBS,
    **dict.fromkeys(("response_format", "structured_outputs"), _OBJECT),
    "logit_bias": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": _BOOL, "continuous_usage_stats": _BOOL},
    },
}
_MESSAGES = {
    "type": ["array", "null"],
    "items": {"type": "object", "required": ["role"], "properties": {"role": {"type": "string"}}},
}
_CHAT = {
    **_COMMON,
    "messages": {**_MESSAGES, "type": "array", "minItems": 1},
    "max_completion_tokens": _COUNT,
    "logprobs": _BOOL,
    "top_logprobs": _LOGPROBS,
    "add_generation_prompt": _BOOL,
    "continue_final_message": _BOOL,
    "chat_template_kwargs": _OBJECT,
    "tools": _TOOLS,
    "tool_choice": _CHOICE,
    "parallel_tool_calls": _BOOL,
}
_RESPONSE = {
    "model": _STRING,
    "input": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["role", "content"]}},
        ]
    },
    **dict.fromkeys(("instructions", "previous_response_id"), _STRING),
    **dict.fromkeys(("store", "stream", "parallel_tool_calls"), _BOOL),
    **dict.fromkeys(("max_output_tokens", "seed"), _COUNT),
    "temperature": {**_NUMBER, "minimum": 0},
    "top_p": _SHARE,
    **dict.fromkeys(("text", "metadata"), _OBJECT),
    "tools": {"type": ["array", "null"], "items": {"type": "object"}},
    "tool_choice": _CHOICE,
}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
_PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": _TOKEN},
        {"type": "array", "minItems": 1, "items": {"type": "array", "minItems": 1, "items": _TOKEN}},
    ]
}
_COMPLETION = {**_COMMON, "prompt": _PROMPT, "logprobs": _LOGPROBS}
_ERRORS = {
    "400": "a field cannot be served",
    "401": "no valid API key",
    "404": "no such model or response",
    "413": "body too large",
    "431": "headers too large",
    "429": "queue full",
    "503": "starting, draining, or no worker",
    "504": "request time limit",
}


def openapi(version: str) -> dict[str, Any]:
    stream: dict[str, Any] = {"text/event-stream": {}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdctl", "version": version},
        "paths": {
            "/v1/models": {"get": _operation("served models")},
            "/v1/models/{id}": {"parameters": [_ID], "get": _operation("a served model")},
            "/v1/chat/completions": {"post": _operation("chat", _CHAT, ["messages"], stream)},
            "/v1/completions": {"post": _operation("completion", _COMPLETION, ["prompt"], stream)},
            "/v1/responses": {"post": _operation("response", _RESPONSE, ["input"], stream)},
            "/v1/responses/{id}": {
                "parameters": [_ID],
                "get": _operation("a kept response"),
                "delete": _operation("forget a kept response"),
            },
            "/tokenize": {"post": _operation("token ids", {"prompt": _STRING, "messages": _MESSAGES})},
            "/detokenize": {"post": _operation("text", {"tokens": {"type": "array", "items": _TOKEN}}, ["tokens"])},
            "/version": {"get": _operation("version")},
        },
    }


def _operation(
    summary: str,
    properties: dict[str, Any] | None = None,
    required: list[str] | None = None,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}}, **(more or {})}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
    responses |= {status: {"description": text} for status, text in _ERRORS.items()}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if properties is not None:
        schema = {"type": "object", "properties": properties, "required": required or []}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
