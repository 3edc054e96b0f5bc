"""What a stack leaves on disk: one state folder a stack, one socket folder a run.

<state root>/<name>/          0700
  stack.json                  who runs, as what; replaced atomically, so a reader sees one whole state
  secret                      0600, the per-stack secret
  lock                        held by the supervisor as long as it lives
  boot/<process>.json         0600, what that process is told
  history.db                  two hours of samples, for `tui --replay`
  logs/<process>.log, .prev   this start's output and the one before
$XDG_RUNTIME_DIR/pdctl-<run>  0700, unix sockets (else /tmp/pdctl-<uid>/<run>: a socket path has 107 bytes)
"""

import contextlib
import difflib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pdctl.exits import NotRunning, UsageError
from server.errors import StartError


class ExitRecord(msgspec.Struct, frozen=True):
    """One end of a process."""

    at: float
    code: int
    reason: str


class ProcessInfo(msgspec.Struct):
    """One process of the stack as the supervisor knows it.

    state: waiting, starting, ready, restarting (waits before it starts again), stopping, stopped, dead (not restarted).
    """

    name: str
    role: str
    state: str = "waiting"
    pid: int = 0
    create_time: float = 0.0
    stage: str = ""
    share: float = 0.0
    restarts: int = 0
    started_at: float = 0.0
    ready_at: float = 0.0
    cpus: list[int] = []
    gpus: list[str] = []
    log: str = ""
    detail: dict[str, Any] = {}
    exits: list[ExitRecord] = []


class Stack(msgspec.Struct):
    """stack.json. state: starting, ready, degraded, draining, stopped, failed."""

    name: str
    run_id: str
    version: int = 1
    pid: int = 0
    create_time: float = 0.0
    state: str = "starting"
    reason: str = ""
    started_at: float = 0.0
    ready_at: float = 0.0
    host: str = ""
    port: int = 0
    socket_dir: str = ""
    model_dir: str = ""
    profile_file: str = ""
    profile: dict[str, Any] = {}
    processes: list[ProcessInfo] = []
    scaling: str = ""  # "decode=2" while that is being done
    scale_problem: str = ""  # why the last one was not

    @property
    def url(self) -> str:
        """Where a client on this machine reaches the router; empty where the router is on another machine."""
        if not self.port:
            return ""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)  # noqa: S104
        return f"http://{host}:{self.port}"

    @property
    def control(self) -> Path:
        return Path(self.socket_dir) / "control.sock"

    @property
    def is_over(self) -> bool:
        return self.state in ("stopped", "failed")

    def process(self, name: str) -> ProcessInfo | None:
        return next((process for process in self.processes if process.name == name), None)


class Order(msgspec.Struct, frozen=True):
    """What `pdctl up` hands to the supervisor process, in a 0600 file."""

    run_id: str
    stack_dir: str
    config: dict[str, Any]
    profile_file: str = ""
    start_timeout_s: float = 0
    progress: str = "auto"
    events_fd: int = -1


class StackDir:
    """The state folder of one stack."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    @property
    def secret_file(self) -> Path:
        return self.path / "secret"

    def log(self, process: str) -> Path:
        return self.path / "logs" / f"{process}.log"

    @property
    def history(self) -> Path:
        return self.path / "history.db"

    def boot(self, process: str) -> Path:
        return self.path / "boot" / f"{process}.json"

    def create(self) -> None:
        """Makes the folder and, once, the secret. Nobody but this user can enter it."""
        for folder in (self.path, self.path / "boot", self.path / "logs"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.chmod(0o700)
        if not self.secret_file.exists():
            write_private(self.secret_file, secrets.token_hex(32).encode() + b"\n")

    def use_secret(self, file: Path) -> None:
        """Takes that of a stack over several machines, in place of its own."""
        write_private(self.secret_file, file.read_bytes().strip() + b"\n")

    def read(self) -> Stack | None:
        """The last recorded state; None where there is none."""
        try:
            return msgspec.json.decode((self.path / "stack.json").read_bytes(), type=Stack)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise UsageError(
                f"{self.path / 'stack.json'} cannot be read: {error}", help="pdctl down --orphans"
            ) from error

    def write(self, stack: Stack) -> None:
        write_private(self.path / "stack.json", msgspec.json.format(msgspec.json.encode(stack)) + b"\n")

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """True inside when this process is the stack's only supervisor; the kernel drops the lock of a dead one."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(fd)

    def rotate_log(self, process: str) -> Path:
        log = self.log(process)
        with contextlib.suppress(FileNotFoundError):
            log.replace(log.with_suffix(".log.prev"))
        return log


def write_private(path: Path, data: bytes) -> None:
    """Replaces `path` atomically by a file that only this user reads."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    part.replace(path)


def state_root(explicit: str | None = None) -> Path:
    if chosen := explicit or os.environ.get("PDCTL_STATE_DIR"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "pdctl"


def make_socket_dir(run_id: str) -> Path:
    """The run's socket folder: new, ours, closed to others. Raises StartError."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        folder = Path(runtime) / f"pdctl-{run_id}"
        if len(str(folder)) < 80 and os.access(runtime, os.W_OK):
            folder.mkdir(mode=0o700)
            return folder
    parent = Path(f"/tmp/pdctl-{os.getuid()}")  # noqa: S108
    parent.mkdir(mode=0o700, exist_ok=True)
    # /tmp is everybody's: a folder that another user made there first must not get our sockets.
    found = parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StartError(f"{parent} is not a folder of this user alone", help=f"rm -r {parent}, or set XDG_RUNTIME_DIR")
    folder = parent / run_id
    folder.mkdir(mode=0o700)
    return folder


def stacks(root: Path) -> list[StackDir]:
    """Every stack that has a recorded state, by name."""
    if not root.is_dir():
        return []
    return [StackDir(path.parent) for path in sorted(root.glob("*/stack.json"))]


def find(root: Path, name: str | None) -> StackDir:
    """The stack called `name`; without a name the only one. Raises NotRunning, UsageError."""
    known = stacks(root)
    if name is not None:
        for stack in known:
            if stack.name == name:
                return stack
        close = difflib.get_close_matches(name, [stack.name for stack in known], n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else _hint(known)
        raise NotRunning(f"there is no stack {name!r}", help=hint)
    running = [stack for stack in known if (state := stack.read()) is not None and not state.is_over]
    candidates = running or known
    if not candidates:
        raise NotRunning("no stack is running", help="pdctl up demo -d")
    if len(candidates) > 1 and running:
        names = ", ".join(stack.name for stack in candidates)
        raise UsageError(f"several stacks are running: {names}", help=f"say which: -n {candidates[0].name}")
    # Several that all ended: the newest is the one that somebody asks about.
    return max(candidates, key=lambda stack: (stack.path / "stack.json").stat().st_mtime)


def _hint(known: list[StackDir]) -> str:
    return f"there are: {', '.join(stack.name for stack in known)}" if known else "pdctl up demo -d"
