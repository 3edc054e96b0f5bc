"""HTTP to the router with the standard library: admin calls with the stack's key, and `smoke`'s OpenAI calls."""

import http.client
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pdctl.exits import Refused, Unreachable
from pdctl.rundir import Stack, StackDir
from server.errors import PdctlError
from server.viewing import view_twin

CHUNK = 1 << 16


class Answered(PdctlError):
    """The router answered with an error status."""

    code = "E_HTTP"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status


class Client:
    """One router. A connection a call: nothing here is called often enough to keep one."""

    def __init__(self, url: str, key: str, *, timeout_s: float = 10.0) -> None:
        self.url = url
        self._key = key
        self._timeout_s = timeout_s

    def get(self, path: str) -> dict[str, Any]:
        return self.call("GET", path)

    def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Its JSON. Raises Unreachable, Refused for a change that was refused, Answered otherwise."""
        connection, response = self._send(method, path, body, headers or {})
        try:
            text = response.read()
            value = json.loads(text or b"{}")
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"the router at {self.url} broke off: {error}") from error
        except ValueError as error:
            raise Answered(response.status, f"no JSON from {path}: {text[:80]!r}") from error
        finally:
            connection.close()
        if response.status >= 400:
            raise _refusal(response.status, value)
        return value if isinstance(value, dict) else {"value": value}

    def stream(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
        """The JSON of each server-sent event until [DONE]."""
        connection, response = self._send("POST", path, body, headers or {})
        try:
            if response.status >= 400:
                raise _refusal(response.status, json.loads(response.read() or b"{}"))
            for raw in response:
                line = raw.strip()
                if line == b"data: [DONE]":
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
            raise Answered(response.status, "the stream ended without [DONE]")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unreachable(f"the router at {self.url} broke off: {error}") from error
        finally:
            connection.close()

    def _send(
        self, method: str, path: str, body: Any, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname or "127.0.0.1", where.port, timeout=self._timeout_s)
        data = None if body is None else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json", **headers}
        try:
            connection.request(method, path, data, sent)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unreachable(f"the router at {self.url} does not answer: {error}", help="pdctl status") from error


def _refusal(status: int, value: Any) -> PdctlError:
    error = value.get("error", value) if isinstance(value, dict) else {}
    error = error if isinstance(error, dict) else {"message": str(error)}
    message, code = str(error.get("message") or value), str(error.get("code") or "")
    if code.isupper():  # the admin API's own words: OUT_OF_RANGE, NEEDS_RESTART ...
        return Refused(f"{code}: {message}")
    return Answered(status, message)


def admin(stack_dir: StackDir, stack: Stack, *, timeout_s: float = 10.0, is_view: bool = False) -> Client:
    """A client with the admin key: the profile's file, else the per-stack secret. `is_view`: it may only read."""
    file = stack.profile.get("router", {}).get("admin_key_file")
    path = Path(file).expanduser() if file else stack_dir.secret_file
    try:
        key = first_key(path)
    except OSError as error:
        raise Unreachable(f"the admin key cannot be read: {error}") from error
    return Client(stack.url, view_twin(key.encode()).decode() if is_view else key, timeout_s=timeout_s)


def first_key(path: Path) -> str:
    """Of a key file: one key a line, blank lines and # comments between them. Raises OSError."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "")


def api_key(stack: Stack) -> str:
    """What OpenAI clients are to send; never empty, for they refuse an empty one before they ask the server."""
    file = stack.profile.get("router", {}).get("api_key_file")
    return first_key(Path(file).expanduser()) if file else "none-needed"


def openai(stack: Stack, *, timeout_s: float = 120.0) -> Client:
    return Client(stack.url, api_key(stack), timeout_s=timeout_s)
