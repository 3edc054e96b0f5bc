"""The HTTP application: endpoints for clients, put together from text, dispatch, generate and render.

1. A handler reads the body (413), decodes and checks it (400), and finds the model (404).
2. The generator does the work; a stream's response starts with its first token, so that any error before is a status.
3. After the first token an error is one event, then [DONE].
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from sse_starlette.sse import AppStatus
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from server.router import checks, openai, structured
from server.router.errors import ApiError, bad_request
from server.router.generate import Generator, Job, lengths, new_id
from server.router.http import (
    EventStream,
    close_stream,
    error_response,
    json_response,
    read_body,
    request_id,
    until_disconnect,
)
from server.router.render import DONE, ChatFormat, CompletionFormat, Format, event
from server.router.text import Text

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
_INTERNAL = ApiError(500, "internal error", kind="server_error", code="internal_error")


class Api:
    """Handlers of /v1 and the tokenizer endpoints."""

    def __init__(self, text: Text, generator: Generator, names: list[str], keepalive_s: float = 0.0) -> None:
        self._text = text
        self._generator = generator
        self._names = names
        self._keepalive_s = keepalive_s
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", guarded(self.models)),
            Route("/v1/models/{name:path}", guarded(self.model)),
            Route("/v1/chat/completions", guarded(self.chat), methods=["POST"]),
            Route("/v1/completions", guarded(self.completions), methods=["POST"]),
            Route("/tokenize", guarded(self.tokenize), methods=["POST"]),
            Route("/detokenize", guarded(self.detokenize), methods=["POST"]),
        ]

    # models

    async def models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": [self._card(name) for name in self._names]})

    async def model(self, request: Request) -> Response:
        return json_response(self._card(self._find(request.path_params["name"])))

    def _card(self, name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "pdctl"}
        return {**card, "root": self._names[0], "max_model_len": self._text.max_len}

    def _find(self, name: str | None) -> str:
        if name is None:
            return self._names[0]
        if name not in self._names:
            message = f"The model {name[:100]!r} does not exist. Served here: {', '.join(self._names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    # tokens

    async def chat(self, http: Request) -> Response:
        request = openai.decode(await read_body(http), openai.ChatRequest)
        model = self._find(request.model)
        checks.check_common(request, self._text.vocab_size)
        checks.check_chat(request)
        constraint = structured.read(request)
        resume = bool(request.continue_final_message)
        messages = checks.read_messages(request.messages, resume=resume, generation=request.add_generation_prompt)

        async def prepare(job: Job) -> None:
            rendered = await self._text.render_chat(
                messages,
                generation=not resume and request.add_generation_prompt is not False,
                resume=resume,
                extra=checks.read_kwargs(request.chat_template_kwargs),
            )
            job.prompts = [await self._encode(request, rendered, "messages", bool(request.add_special_tokens))]
            job.max_tokens = lengths(job, self._text.max_len, "messages")
            job.bounds = await self._bounds(request, constraint)
            if request.echo:
                job.echoes = [messages[-1]["content"]]

        job = Job(request, new_id("chatcmpl"), request_id(http), "/v1/chat/completions", model)
        return await self._answer(http, job, prepare, ChatFormat(job, self._text, _wants_timing(http)))

    async def completions(self, http: Request) -> Response:
        request = openai.decode(await read_body(http), openai.CompletionRequest)
        model = self._find(request.model)
        checks.check_common(request, self._text.vocab_size)
        checks.check_completion(request)
        constraint = structured.read(request)
        prompts = openai.read_prompts(request.prompt)
        checks.check_prompts(prompts, request.num_choices, self._text.vocab_size)

        async def prepare(job: Job) -> None:
            special = request.add_special_tokens is not False
            job.prompts = [await self._encode(request, prompt, "prompt", special) for prompt in prompts]
            job.max_tokens = lengths(job, self._text.max_len, "prompt")
            job.bounds = await self._bounds(request, constraint)
            if request.echo:
                job.echoes = [p if isinstance(p, str) else self._text.decode(p, skip_special=False) for p in prompts]

        job = Job(request, new_id("cmpl"), request_id(http), "/v1/completions", model)
        return await self._answer(http, job, prepare, CompletionFormat(job, self._text, _wants_timing(http)))

    async def _encode(self, request: openai.Request, prompt: str | list[int], param: str, special: bool) -> list[int]:
        cut = request.truncate_prompt_tokens
        if isinstance(prompt, str):
            limit = self._text.max_len if cut is None else None
            prompt = await self._text.encode(prompt, param, special=special, limit=limit)
        if not prompt:
            raise bad_request(param, f"{param}: no tokens in it")
        if cut is None:
            return prompt
        keep = max(1, self._text.max_len - (request.limit or 1)) if cut == -1 else cut
        return prompt[:keep] if request.truncation_side == "right" else prompt[-keep:]

    async def _bounds(self, request: openai.Request, constraint: tuple[str, str]) -> openai.Bounds:
        """Raises ApiError 400 for a grammar that is none."""
        name, grammar = constraint
        if grammar and (wrong := await self._text.check_grammar(grammar)):
            raise structured.refused(name, wrong)
        return openai.Bounds(grammar, self._text.spellings(request.bad_words or []))

    async def _answer(
        self, http: Request, job: Job, prepare: Callable[[Job], Awaitable[None]], form: Format
    ) -> Response:
        if not job.request.stream:
            return json_response(await until_disconnect(http.receive, self._whole(job, prepare, form)))
        late = asyncio.Event()
        events = self._events(job, prepare, form, late)
        first = asyncio.ensure_future(anext(events))
        try:
            await until_disconnect(http.receive, _wait(first, self._keepalive_s))
            late.set()
        except BaseException:
            await close_stream(first, events)
            raise
        return EventStream(first, events, self._keepalive_s)

    async def _whole(self, job: Job, prepare: Callable[[Job], Awaitable[None]], form: Format) -> bytes:
        async with aclosing(self._generator.outputs(job, prepare)) as outputs:
            async for output in outputs:
                form.add(output)
        return form.body()

    async def _events(
        self, job: Job, prepare: Callable[[Job], Awaitable[None]], form: Format, late: asyncio.Event
    ) -> AsyncGenerator[bytes, None]:
        """Ends with [DONE]. Raises what comes before the first event, unless it is `late`: the response has begun."""
        try:
            async with aclosing(self._generator.outputs(job, prepare)) as outputs:
                async for output in outputs:
                    if chunk := form.chunks(output):
                        yield chunk
            if usage := form.usage_chunk():
                yield usage
        except Exception as error:
            if not late.is_set():
                raise
            yield event(_as_api_error(error).body)
        yield DONE

    # the tokenizer

    async def tokenize(self, http: Request) -> Response:
        request = openai.decode(await read_body(http), openai.TokenizeRequest)
        self._find(request.model)
        if request.chat_template is not None:
            raise bad_request("chat_template", "chat_template: this server does not take one from requests")
        if request.messages is not None:
            resume, generation = bool(request.continue_final_message), request.add_generation_prompt
            messages = checks.read_messages(request.messages, resume=resume, generation=generation)
            text = await self._text.render_chat(
                messages,
                generation=not resume and generation is not False,
                resume=resume,
                extra=checks.read_kwargs(request.chat_template_kwargs),
            )
            ids = await self._text.encode(text, "messages", special=bool(request.add_special_tokens))
        elif request.prompt is not None:
            special = request.add_special_tokens is not False
            ids = await self._text.encode(request.prompt, "prompt", special=special)
        else:
            raise bad_request("prompt", "prompt: give prompt or messages")
        body: dict[str, Any] = {"count": len(ids), "max_model_len": self._text.max_len, "tokens": ids}
        body["token_strs"] = self._text.names(ids) if request.return_token_strs else None
        return json_response(body)

    async def detokenize(self, http: Request) -> Response:
        request = openai.decode(await read_body(http), openai.DetokenizeRequest)
        self._find(request.model)
        if request.tokens is None:
            raise bad_request("tokens", "tokens: required")
        checks.check_ids("tokens", request.tokens, self._text.vocab_size)
        return json_response({"prompt": self._text.decode(request.tokens, skip_special=False)})


def build(routes: list[Route]) -> Starlette:
    """The application without its gate."""
    # Streams end when the router has drained, not when the signal comes: the router sees to that itself.
    AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error, Exception: _unhandled})


def guarded(handler: Handler) -> Handler:
    """The one door through which errors become responses."""

    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            return error_response(_as_api_error(error))

    return run


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    logger.error("internal error", exc_info=error)
    return _INTERNAL


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(
        ApiError(error.status_code, error.detail, code="not_found" if error.status_code == 404 else None)
    )


async def _unhandled(_: Request, error: Exception) -> Response:
    return error_response(_as_api_error(error))


def _wants_timing(http: Request) -> bool:
    return http.headers.get("x-pdctl-timing") == "1"


async def _wait(first: "asyncio.Future[bytes]", keepalive_s: float) -> None:
    """For the first event, so that an error before it is a status; with keepalive, only as long as a proxy would."""
    await asyncio.wait((first,), timeout=keepalive_s or None)
    if first.done():
        first.result()
