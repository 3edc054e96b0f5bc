"""What every endpoint needs of HTTP: the gate, bodies, errors, event streams, and a client that may leave.

1. `Gate` gives each request an id, asks for a key where one is set, and refuses while the router starts or drains.
2. `read_body` stops at the limit. `json_response` and `error_response` write what msgspec encodes.
3. `until_disconnect` runs a coroutine for as long as the client is there; `EventStream` does the same for a stream.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from random import getrandbits
from typing import Any, TypeVar

import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.router.errors import ApiError
from server.router.keys import Keys, Quota

KV_HEADER = "x-pdctl-kv"
MAX_BODY = 8 * 2**20  # to read it holds the event loop: a tenth of a second for as much
_STREAM_HEADERS = (  # as sse_starlette writes them, but for what HTTP/1.1 does anyway
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies such as nginx keep events back otherwise
    (b"content-type", b"text/event-stream; charset=utf-8"),
)
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
_KEYED = ("/v1/", "/tokenize", "/detokenize")
_WORK = ("/v1/chat/", "/v1/completions", "/v1/responses")

T = TypeVar("T")


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = data if isinstance(data, bytes) else msgspec.json.encode(data)
    return Response(body, status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body, error.status, error.headers)


def header(request: Request, name: bytes) -> str:
    """Of its first line of that name, which is lower case; empty without one."""
    return str(request.scope["state"]["headers"].get(name, b"").decode("latin-1"))


def request_id(request: Request) -> str:
    return str(request.scope["state"]["request_id"])


def tenant(request: Request) -> str:
    """Whose key the request came with."""
    return str(request.scope["state"].get("tenant", ""))


def count_sequences(request: Request, count: int) -> None:
    """The request is `count` sequences of its key's. Raises ApiError 429."""
    request.scope["state"]["held"].grow(count)


class Gate:
    """ASGI middleware around the whole app. `refusal` says why no work is taken at the moment, if so."""

    def __init__(self, app: ASGIApp, keys: Keys, quota: Quota, refusal: Callable[[], ApiError | None]) -> None:
        self._app = app
        self._keys = keys
        self._quota = quota
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(reversed(scope["headers"]))
        given = headers.get(b"x-request-id", b"")
        name = given if _REQUEST_ID.fullmatch(given) else b"%024x" % getrandbits(96)
        state = scope.setdefault("state", {})
        state |= {"headers": headers, "request_id": name.decode(), "send": send}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name)]
            await send(message)

        try:
            key = self._check(scope)
            with self._quota.hold(key) as held:
                state["held"] = held
                await self._app(scope, receive, send_with_id)
        except ApiError as error:  # of the gate: the app makes responses of its own
            await error_response(error)(scope, receive, send_with_id)

    def _check(self, scope: Scope) -> str:
        """The key that the request counts for, empty when it counts for none. Raises ApiError."""
        path: str = scope["path"]
        if scope["method"] == "OPTIONS" or not path.startswith(_KEYED):
            return ""
        key = scope["state"]["tenant"] = self._keys.check(Headers(scope=scope))
        if not path.startswith(_WORK):
            return ""
        if (refusal := self._refusal()) is not None:
            raise refusal
        return key


def allow_origins(app: ASGIApp, origins: list[str]) -> ASGIApp:
    """Outside the gate: a preflight carries no key, and a page may read refusals too."""
    if not origins:
        return app
    shown = ["X-Request-Id", "Retry-After", KV_HEADER]
    methods = ["GET", "POST", "DELETE"]
    return CORSMiddleware(app, allow_origins=origins, allow_methods=methods, allow_headers=["*"], expose_headers=shown)


async def read_body(request: Request) -> bytes:
    """Raises ApiError 413."""
    length = header(request, b"content-length")
    if length.isascii() and length.isdecimal() and int(length) > MAX_BODY:
        raise _too_large()
    body, is_whole = bytearray(), False
    while not is_whole:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > MAX_BODY:
            raise _too_large()
        is_whole = not message.get("more_body", False)
    return bytes(body)


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY} bytes", code="body_too_large")


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """`work`'s result; it runs in this task, so that no other has to be woken for it. Raises ClientDisconnect when the
    client leaves first; `work` has ended by then."""
    task = asyncio.current_task()
    assert task is not None
    others, is_gone = task.cancelling(), False

    async def watch() -> None:
        nonlocal is_gone
        await _disconnected(receive)
        is_gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and task.cancelling() == others + 1:
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()  # before it is done, or it is too late for it to cancel anything: there is no await between
        if is_gone:
            task.uncancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(EventSourceResponse):
    """Server-sent events, whole ones as bytes. `first`: those that are here already, or the task that waits for them.

    LF only and no comments unless `keepalive_s`: both break clients that read line by line. The base class pings, from
    a group of tasks; a stream that needs none is the request's own task, and one that sees whether the client is there.
    An event is one write here, where it would be a cancel scope and a log line too.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        first: "bytes | asyncio.Future[bytes]" = b"",
        keepalive_s: float = 0.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # The base class is made ready in `__call__`: what is here already does not wait for that.
        own = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
        self._head = {"type": "http.response.start", "status": 200, "headers": [*own, *_STREAM_HEADERS]}
        self._first = first
        self._events = events
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(self._head)
            if scope["method"] == "HEAD":
                await _send_end(send)
                return
            # Past the layers between: they look at heads. An event would go through each of them.
            send = scope["state"]["send"]
            if isinstance(self._first, bytes):
                await _send_part(send, self._first)
            if self._keepalive_s:
                super().__init__(self._events, sep="\n", ping=self._keepalive_s, ping_message_factory=_comment)
                await super().__call__(scope, receive, send)
            else:
                await until_disconnect(receive, self._rest(send))
        except ClientDisconnect:
            pass  # nobody reads the rest
        finally:
            # Also for a response that the client left before its first event: nobody else closes the generator then.
            await close_stream(self._first, self._events)

    async def _stream_response(self, send: Send) -> None:
        """Of the base class: pings come between these writes until the last one."""
        if isinstance(self._first, asyncio.Future):
            await _send_part(send, await self._first)
        async for events in self._events:
            await _send_part(send, events)
        async with self._send_lock:
            self.active = False
            await _send_end(send)

    async def _rest(self, send: Send) -> None:
        async for events in self._events:
            await _send_part(send, events)
        await _send_end(send)


def _comment() -> ServerSentEvent:
    return ServerSentEvent(comment="", sep="\n")


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _send_end(send: Send) -> None:
    await send({"type": "http.response.body"})


async def close_stream(first: "bytes | asyncio.Future[bytes]", events: AsyncGenerator[bytes, None]) -> None:
    """Ends `events` wherever it is."""
    if isinstance(first, asyncio.Future):
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    await events.aclose()
