"""An HTTP/1.1 client that does one thing: POST, and note when each server-sent event came in.

Events are stamped in `data_received`, the first Python code that a byte meets, and kept as raw bytes; they are parsed
after the request is over, so that parsing one answer does not delay the stamp of another. A connection is used again as
long as the server lets it.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from pdctl.exits import UsageError

Event = tuple[float, bytes]
_CONNECT_S = 10.0


class BrokenOff(Exception):
    """The connection ended, or said something that is not HTTP, before the answer was complete."""


@dataclass(slots=True)
class Answer:
    status: int = 0
    events: list[Event] = field(default_factory=list)
    body: bytes = b""  # of what is no event stream


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    is_tls: bool
    prefix: str

    @classmethod
    def of(cls, url: str) -> "Address":
        """Of a base URL, with or without its /v1."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no http:// or https:// address")
        is_tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if is_tls else 80), is_tls, prefix)


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer = Answer()
        self._done: asyncio.Future[Answer] | None = None
        self._reset()

    def _reset(self) -> None:
        self._buffer = b""  # bytes not yet understood
        self._text = b""  # of an event that is not whole yet
        self._has_head = self._is_chunked = self._is_stream = self._must_close = False
        self._left = -1  # of a body whose length is known; of a chunk

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_idle(self) -> bool:
        return self._done is None

    async def post(self, head: bytes, body: bytes) -> Answer:
        """Raises BrokenOff. Cancelling it closes the connection: that aborts the request at the server."""
        assert self._transport is not None and self._done is None, "one request at a time"
        self._reset()
        self._answer = Answer()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(head + body)
        try:
            return await self._done
        except asyncio.CancelledError:
            self._transport.abort()
            raise
        finally:
            self._done = None
            if self._must_close:
                self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._buffer += data
        try:
            if self._has_head or self._read_head():
                self._read_body(now)
        except ValueError as error:
            self._fail(f"no HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if self._has_head and not self._is_chunked and self._left < 0:  # a body that ends with the connection
            self._finish()
        else:
            self._fail(f"the connection ended early ({exc or 'closed by the server'})")

    # HTTP

    def _read_head(self) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return False
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._answer.status = int(status.split(" ", 2)[1])
        self._is_chunked = "chunked" in headers.get("transfer-encoding", "")
        self._is_stream = "text/event-stream" in headers.get("content-type", "")
        self._left = int(headers["content-length"]) if "content-length" in headers else -1
        self._must_close = headers.get("connection", "").lower() == "close" or (not self._is_chunked and self._left < 0)
        self._has_head, self._buffer = True, rest
        return True

    def _read_body(self, now: float) -> None:
        if self._is_chunked:
            self._read_chunks(now)
            return
        data, self._buffer = self._buffer, b""
        self._take(data, now)
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._finish()

    def _read_chunks(self, now: float) -> None:
        """Whole chunks only: a router sends an event as one."""
        while True:
            line, found, rest = self._buffer.partition(b"\r\n")
            if not found:
                return
            size = int(line.split(b";")[0], 16)
            if len(rest) < size + 2:
                return
            self._buffer = rest[size + 2 :]
            if not size:
                self._finish()
                return
            self._take(rest[:size], now)

    def _take(self, data: bytes, now: float) -> None:
        if not self._is_stream:
            self._answer.body += data
            return
        *whole, self._text = (self._text + data).replace(b"\r\n", b"\n").split(b"\n\n")
        self._answer.events += [(now, event) for event in whole if event.startswith(b"data:")]

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._answer)

    def _fail(self, reason: str) -> None:
        self._must_close = True
        if self._done is not None and not self._done.done():
            self._done.set_exception(BrokenOff(reason))
        if self._transport is not None:
            self._transport.close()


class Pool:
    """Connections to one server, as many as there are requests at once."""

    def __init__(self, url: str, key: str) -> None:
        self.address = Address.of(url)
        self._key = key
        self._idle: list[Connection] = []
        self._all: list[Connection] = []

    async def post(self, path: str, body: bytes, headers: str = "") -> Answer:
        connection = await self._take()
        head = (
            f"POST {self.address.prefix}{path} HTTP/1.1\r\nHost: {self.address.host}:{self.address.port}\r\n"
            f"Authorization: Bearer {self._key}\r\nContent-Type: application/json\r\nAccept: text/event-stream\r\n"
            f"Content-Length: {len(body)}\r\n{headers}\r\n"
        )
        answer = await connection.post(head.encode(), body)
        if connection.is_open:
            self._idle.append(connection)
        return answer

    async def open(self, count: int) -> None:
        """So many connections beforehand: that a measured request waits for no handshake."""
        fresh = [await self._connect() for _ in range(count - len(self._idle))]
        self._idle += fresh

    def close(self) -> None:
        for connection in self._all:
            if connection._transport is not None:
                connection._transport.abort()
        self._idle.clear()
        self._all.clear()

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return await self._connect()

    async def _connect(self) -> Connection:
        where = self.address
        context = ssl.create_default_context() if where.is_tls else None
        loop = asyncio.get_running_loop()
        try:
            made = loop.create_connection(Connection, where.host, where.port, ssl=context)
            _, connection = await asyncio.wait_for(made, _CONNECT_S)
        except (OSError, TimeoutError) as error:
            raise BrokenOff(f"{where.host}:{where.port} cannot be reached: {error}") from error
        self._all.append(connection)
        return connection
