"""What a stack looked like at one moment: read from supervisor and router, kept by the history, drawn by the TUI.

A snapshot is JSON as these two gave it, not what some screen made of it: whoever replays it can ask other questions.
"""

import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from pdctl import control, logs
from pdctl.client import Answered, Client, admin
from pdctl.down import supervisor_of
from pdctl.exits import NotRunning, Unreachable
from pdctl.rundir import Stack, StackDir
from server.errors import PdctlError

Json = dict[str, Any]
TIMEOUT_S = 2.0
NUM_REQUESTS = 100
KEPT_LINES = 2000
FIRST_LINES = 300


class LogLine(msgspec.Struct, frozen=True):
    process: str
    at: float
    level: str
    text: str


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was read at `at`. None: that witness did not answer."""

    at: float
    version: int = 1
    stack: Json | None = None
    supervisor: str = "ready"
    state: Json | None = None
    knobs: Json | None = None
    requests: list[Json] = []
    audit: list[Json] = []
    logs: list[LogLine] = []
    problem: str = ""


class RouterReader:
    """The router's half. The audit log is read again only when there is a new revision."""

    def __init__(self) -> None:
        self._audit: list[Json] = []
        self._audit_rev = -1
        self._missing: set[str] = set()

    def read(self, client: Client) -> Json:
        """Fields of a Snapshot. Raises PdctlError."""
        state = client.get("/admin/state")
        requests = self._optional(client, f"/admin/requests?limit={NUM_REQUESTS}")
        knobs = self._optional(client, "/admin/knobs")
        rev = int((knobs or {}).get("rev") or 0)
        if knobs is not None and rev != self._audit_rev:
            self._audit = (self._optional(client, "/admin/audit") or {}).get("entries") or []
            self._audit_rev = rev
        elif any(entry.get("pending") for entry in self._audit):
            self._audit_rev = -1  # a worker that is away has still to confirm: ask again
        return {
            "state": state,
            "requests": (requests or {}).get("requests") or [],
            "knobs": knobs,
            "audit": self._audit,
        }

    def _optional(self, client: Client, path: str) -> Json | None:
        """What another version of the router may not have; it is asked for once."""
        if path in self._missing:
            return None
        try:
            return client.get(path)
        except Answered as error:
            if error.status != 404:
                raise
            self._missing.add(path)
            return None


class Reader:
    """A stack on this host, over all its runs. One witness that is silent does not hide what the other says."""

    def __init__(self, stack_dir: StackDir, *, is_view: bool = False) -> None:
        """`is_view`: with a key that may only read; the router then says of its knobs that they are read-only."""
        self._dir = stack_dir
        self._is_view = is_view
        self._router = RouterReader()
        self._run_id = ""

    def read(self) -> Snapshot:
        """Raises NotRunning when it has ended, Unreachable when neither supervisor nor router answers."""
        recorded = self._dir.read()
        if recorded is None or recorded.is_over:
            reason = f": {recorded.reason}" if recorded is not None and recorded.reason else ""
            raise NotRunning(f"{self._dir.name} is not running{reason}", help="pdctl up PROFILE -d")
        if recorded.run_id != self._run_id:
            self._run_id, self._router = recorded.run_id, RouterReader()
        supervisor, stack = _supervisor(recorded)
        fields, problem = self._ask_router(stack)
        if not fields and supervisor != "ready":
            raise Unreachable(f"supervisor {supervisor}; {problem or 'no router yet'}")
        return Snapshot(time.time(), stack=msgspec.to_builtins(stack), supervisor=supervisor, problem=problem, **fields)

    def _ask_router(self, stack: Stack) -> tuple[Json, str]:
        router = stack.process("router")
        # Before it is there nothing listens; connections would wait in the supervisor's backlog.
        if not stack.port or router is None or not router.started_at or router.state in ("waiting", "dead"):
            return {}, ""
        if router.state == "starting" and not router.stage:
            return {}, ""
        try:
            return self._router.read(admin(self._dir, stack, timeout_s=TIMEOUT_S, is_view=self._is_view)), ""
        except PdctlError as error:
            return {}, error.message


class LogTail:
    """The last lines of every log of a stack; each poll reads only what is new."""

    def __init__(self, stack_dir: StackDir, kept: int = KEPT_LINES) -> None:
        self._folder = stack_dir.path / "logs"
        self._followers: dict[str, logs.Follower] = {}
        self._lines: deque[LogLine] = deque(maxlen=kept)

    def read(self) -> list[LogLine]:
        new: list[logs.Line] = []
        for file in sorted(self._folder.glob("*.log")):
            follower = self._followers.get(file.stem)
            if follower is None:
                self._followers[file.stem] = follower = logs.Follower(file.stem, file)
                new += logs.read([(file.stem, file)], min(FIRST_LINES, self._lines.maxlen or 1))
            else:
                new += follower.new()
        for line in sorted(new, key=lambda line: line.at):
            self._lines.append(LogLine(line.process, line.at, line.level, line.text))
        return list(self._lines)

    def close(self) -> None:
        for follower in self._followers.values():
            follower.close()


def _supervisor(recorded: Stack) -> tuple[str, Stack]:
    identity = supervisor_of(recorded)
    if not identity.is_alive:
        return "dead", recorded
    if identity.is_frozen:
        return "frozen", recorded
    try:
        said = control.ask(recorded.control, {"op": "status"}, timeout_s=TIMEOUT_S)
        return "ready", msgspec.convert(said["stack"], Stack)
    except (PdctlError, msgspec.MsgspecError, KeyError):
        return ("ready" if recorded.state in ("starting", "draining") else "unreachable"), recorded


def read_remote(client: Client, router: RouterReader) -> Snapshot:
    """By address and key alone: no supervisor, no logs. Raises PdctlError."""
    fields = router.read(client)
    return Snapshot(time.time(), stack={"name": client.url, "url": client.url, "state": None}, **fields)


def save_json(snapshot: Snapshot, file: Path) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(snapshot)) + b"\n")
