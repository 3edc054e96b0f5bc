"""HTTP/1.1 as uvicorn and httptools read it, with what they leave out: a limit on headers, and errors as objects.

A request line and headers are kept until the last of them is here, so a client that never ends them must be stopped.
A response's head leaves in one write with the first of its body, where that comes in the same turn of the loop.
"""

import asyncio
from typing import Any, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.router.errors import ApiError

MAX_HEAD = 64 * 2**10  # bytes of request line and headers
MAX_HEADERS = 200
_PHRASE = {400: "Bad Request", 431: "Request Header Fields Too Large"}


class HeadWithBody:
    """A transport for responses: to wake a client costs as much for a head alone as for a head and an event."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/"):  # a head, or a body that looks like one, which may wait as well
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def _flush(self) -> None:
        if self._head:
            data, self._head = self._head, b""
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Protocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast("asyncio.Transport", HeadWithBody(transport, self.loop))

    def on_message_begin(self) -> None:
        self._head = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        """Raises what ends the parsing: `send_400_response` follows."""
        self._head += size
        if self._head > MAX_HEAD or len(self.headers) > MAX_HEADERS:
            raise ValueError("headers too large")

    def send_400_response(self, msg: str) -> None:
        """Also the 431, told from the others by what was counted."""
        if self._head > MAX_HEAD or len(self.headers or ()) > MAX_HEADERS:
            error = ApiError(
                431, f"more than {MAX_HEAD} bytes or {MAX_HEADERS} lines of headers", code="headers_too_large"
            )
        else:
            error = ApiError(400, "this is not an HTTP request", code="invalid_http")
        body = msgspec.json.encode(error.body)
        head = (
            f"HTTP/1.1 {error.status} {_PHRASE[error.status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
