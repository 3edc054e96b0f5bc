"""The supervisor's own unix socket: one JSON object a line, one answer a line. The folder's mode is the access check.

{"op": "status"}                              -> {"ok": true, "stack": {...}}
{"op": "down", "drain_s": 30, "force": false} -> {"ok": true}; the supervisor ends when all is down
{"op": "restart", "worker": "decode-0"}       -> {"ok": true} once the old one was told to end
{"op": "scale", "role": "decode", "workers": 2} -> {"ok": true} once begun; status says `scaling` until it is done
anything else                                 -> {"ok": false, "error": "..."}
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pdctl.exits import Unreachable

Answer = Callable[[dict[str, Any]], dict[str, Any]]
MAX_LINE = 1 << 16


async def serve(path: Path, answer: Answer) -> asyncio.Server:
    """Listens until closed. A caller that says nothing is let go after 10 s."""

    async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            while line := await asyncio.wait_for(reader.readline(), 10.0):
                writer.write(_answer(line, answer))
                await asyncio.wait_for(writer.drain(), 10.0)
        writer.close()

    return await asyncio.start_unix_server(on_connect, path, limit=MAX_LINE)


def _answer(line: bytes, answer: Answer) -> bytes:
    try:
        reply = answer(msgspec.json.decode(line, type=dict[str, Any]))
    except msgspec.MsgspecError as error:
        reply = {"ok": False, "error": f"not a request: {error}"}
    return msgspec.json.encode(reply) + b"\n"


def ask(path: Path, request: dict[str, Any], timeout_s: float = 1.0) -> dict[str, Any]:
    """One request from the command line. Raises Unreachable, also when a frozen supervisor does not answer."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            sock.connect(str(path))
            sock.sendall(msgspec.json.encode(request) + b"\n")
            with sock.makefile("rb") as file:
                return msgspec.json.decode(file.readline(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise Unreachable(f"the supervisor does not answer at {path}: {error}", help="pdctl down") from error
