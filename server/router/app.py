"""The HTTP application: endpoints for clients, put together from text, dispatch, generate and render.

1. A handler reads the body (413), decodes and checks it (400), and finds the model (404).
2. The generator does the work; a stream's response starts with its first token, so that any error before is a status.
3. After the first token an error is one event, then [DONE].
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from server.router import checks, openai
from server.router.chat import ChatFormat
from server.router.errors import ApiError, bad_request, context_too_long, method_not_allowed
from server.router.generate import Generator, Job, Output, new_id
from server.router.http import (
    KV_HEADER,
    EventStream,
    close_stream,
    count_sequences,
    error_response,
    header,
    json_response,
    read_body,
    request_id,
    tenant,
    until_disconnect,
)
from server.router.prepare import Prepare, Preparer
from server.router.render import DONE, CompletionFormat, Format
from server.router.response_events import ResponseFormat
from server.router.responses import ResponsesRequest, Store, renamed, to_chat
from server.router.text import Text
from server.router.tools import ToolUse

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
_INTERNAL = ApiError(500, "internal error", kind="server_error", code="internal_error")


class Api:
    """Handlers of /v1 and the tokenizer endpoints."""

    def __init__(self, text: Text, generator: Generator, names: list[str], keepalive_s: float = 0.0) -> None:
        self._text = text
        self._prepare = Preparer(text)
        self._store = Store()
        self._generator = generator
        self._names = names
        self._keepalive_s = keepalive_s
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            route("/v1/chat/completions", self.chat, methods=["POST"]),
            route("/v1/completions", self.completions, methods=["POST"]),
            route("/v1/responses", self.responses, methods=["POST"]),
            route("/v1/models", self.models),
            route("/v1/models/{name:path}", self.model),
            route("/v1/responses/{name}", self.kept_response, methods=["GET", "DELETE", "POST"]),
            route("/tokenize", self.tokenize, methods=["POST"]),
            route("/detokenize", self.detokenize, methods=["POST"]),
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
        prepare, use = self._prepare.chat(request)
        job = _job(http, request, new_id("chatcmpl"), "/v1/chat/completions", model)
        return await self._answer(http, job, prepare, self._chat_format(job, use, http))

    async def completions(self, http: Request) -> Response:
        request = openai.decode(await read_body(http), openai.CompletionRequest)
        model = self._find(request.model)
        prepare, num_prompts = self._prepare.completions(request)
        job = _job(http, request, new_id("cmpl"), "/v1/completions", model, num_prompts)
        return await self._answer(http, job, prepare, CompletionFormat(job, self._text, _wants_timing(http)))

    async def responses(self, http: Request) -> Response:
        asked = openai.decode(await read_body(http), ResponsesRequest)
        model = self._find(asked.model)
        try:
            request, conversation = to_chat(asked, self._store, tenant(http))
            prepare, use = self._prepare.chat(request)
        except ApiError as error:
            raise renamed(error) from error
        # Where keys are shared or none are asked for, to know the name is all it takes to read a kept response.
        job = _job(http, request, f"resp_{secrets.token_hex(12)}", "/v1/responses", model)
        form = ResponseFormat(job, self._text, _wants_timing(http), asked, use, self._prepare.style)
        if asked.store is not False:
            form.on_done = lambda body: self._store.add(job.tenant, [*conversation, form.as_message()], body)
        try:
            return await self._answer(http, job, prepare, form)
        except ApiError as error:
            raise renamed(error) from error

    async def kept_response(self, http: Request) -> Response:
        name = http.path_params["name"]
        kept = self._store.get(tenant(http), name)
        if http.method == "GET":
            return json_response(kept.body)
        if http.method == "POST":  # an action such as /compact, which is not served
            raise method_not_allowed("GET, DELETE")
        self._store.remove(tenant(http), name)
        return json_response({"id": name, "object": "response", "deleted": True})

    def _chat_format(self, job: Job, use: ToolUse | None, http: Request) -> ChatFormat:
        return ChatFormat(job, self._text, _wants_timing(http), use, self._prepare.style)

    async def _answer(self, http: Request, job: Job, prepare: Prepare, form: Format) -> Response:
        count_sequences(http, job.num_sequences)
        if not job.request.stream:
            body = await until_disconnect(http.receive, self._whole(job, prepare, form))
            return json_response(body, headers=_handle(job))
        job.on_sent = form.get_ready
        late = asyncio.Event()
        events = self._events(job, prepare, form, late)
        if self._keepalive_s:
            first = await self._begin(http, events)
        else:
            first = await until_disconnect(http.receive, anext(events))
        late.set()
        return EventStream(events, first=first, keepalive_s=self._keepalive_s, headers=_handle(job))

    async def _begin(self, http: Request, events: AsyncGenerator[bytes, None]) -> "bytes | asyncio.Future[bytes]":
        """The first event, so that an error before it is a status; but only as long as a proxy would wait for it."""
        first = asyncio.ensure_future(anext(events))
        try:
            await until_disconnect(http.receive, asyncio.wait((first,), timeout=self._keepalive_s))
            return first.result() if first.done() else first
        except BaseException:
            await close_stream(first, events)
            raise

    async def _whole(self, job: Job, prepare: Prepare, form: Format) -> bytes:
        async with aclosing(self._generator.outputs(job, prepare)) as outputs:
            async for batch in outputs:
                for output in batch:
                    job.completion_tokens += len(output.delta.ids)
                    form.add(output)
        return await asyncio.to_thread(form.body) if job.is_long else form.body()

    async def _events(
        self, job: Job, prepare: Prepare, form: Format, late: asyncio.Event
    ) -> AsyncGenerator[bytes, None]:
        """Ends with [DONE]. Raises what comes before the first event, unless it is `late`: the response has begun."""
        try:
            async with aclosing(self._generator.outputs(job, prepare)) as outputs:
                async for batch in outputs:
                    if chunks := b"".join(_chunks(job, form, batch)):
                        yield chunks
            if usage := form.usage_chunk():
                yield usage
        except Exception as error:
            if not late.is_set():
                raise
            yield form.error_event(_as_api_error(error))
        yield DONE

    # the tokenizer

    async def tokenize(self, http: Request) -> Response:
        request = openai.decode(await read_body(http), openai.TokenizeRequest)
        self._find(request.model)
        ids = await self._prepare.tokens(request)
        body: dict[str, Any] = {"count": len(ids), "max_model_len": self._text.max_len, "tokens": ids}
        body["token_strs"] = self._text.names(ids) if request.return_token_strs else None
        return json_response(body)

    async def detokenize(self, http: Request) -> Response:
        request = openai.decode(await read_body(http), openai.DetokenizeRequest)
        self._find(request.model)
        if request.tokens is None:
            raise bad_request("tokens", "tokens: required")
        if len(request.tokens) > self._text.max_len:
            raise context_too_long(self._text.max_len, len(request.tokens), "tokens")
        checks.check_ids("tokens", request.tokens, self._text.vocab_size)
        (text,) = await self._text.decode_all([request.tokens])
        return json_response({"prompt": text})


class App(Router):
    """The application without its gate. A plain path is looked up; the router tries one route after the other."""

    def __init__(self, routes: Sequence[Route]) -> None:
        super().__init__(routes)
        plain = [route for route in routes if not route.param_convertors]
        self._plain = {(method, route.path): route.app for route in plain for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # within an application, a router raises what it would say in its own words
        try:
            await self._plain.get((scope["method"], scope["path"]), self.app)(scope, receive, send)
        except HTTPException as error:
            await _http_error(error)(scope, receive, send)


def route(path: str, handler: Handler, methods: Sequence[str] = ("GET",)) -> Route:
    return Route(path, Guarded(handler), methods=methods)


class Guarded:
    """A handler behind the one door through which errors become responses."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._response(Request(scope, receive))
        await response(scope, receive, send)

    async def _response(self, request: Request) -> Response:
        try:
            return await self._handler(request)
        except ApiError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            return error_response(_as_api_error(error))


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    logger.error("internal error", exc_info=error)
    return _INTERNAL


def _http_error(error: HTTPException) -> Response:
    if error.status_code == 405:
        return error_response(method_not_allowed((error.headers or {}).get("Allow", "")))
    return error_response(
        ApiError(error.status_code, error.detail, code="not_found" if error.status_code == 404 else None)
    )


def _job(http: Request, request: openai.Request, name: str, endpoint: str, model: str, num_prompts: int = 1) -> Job:
    return Job(
        request,
        name,
        request_id(http),
        endpoint,
        model,
        num_prompts,
        tenant=tenant(http),
        traceparent=header(http, b"traceparent"),
        handle=header(http, KV_HEADER.encode()),
    )


def _handle(job: Job) -> dict[str, str]:
    """For the client's next turn. Not known yet where a response had to begin before its first token."""
    return {KV_HEADER: job.next_handle} if job.next_handle else {}


def _wants_timing(http: Request) -> bool:
    return header(http, b"x-pdctl-timing") == "1"


def _chunks(job: Job, form: Format, batch: list[Output]) -> Iterator[bytes]:
    for output in batch:
        job.completion_tokens += len(output.delta.ids)  # as far as this chunk: a usage beside it says so
        yield form.chunks(output)
