"""Processes: how one is started, how it is known again, how it is ended.

A pid alone names nothing for long. A process is ours when pid and start time agree with the record and its environment
carries this run's id. Only such a process is ever signalled, never a name.

1. `spawn`: own session, own log, own cores (taken on before exec), a status pipe.
2. `Identity`: is that pid still the one we started?
3. `sweep`: ends everything that carries a run id, recorded or not, with SIGTERM, then SIGKILL.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

RUN_ID = "PDCTL_RUN_ID"
STACK_DIR = "PDCTL_STACK_DIR"


@dataclass(frozen=True, slots=True)
class Identity:
    """A process that can be recognised."""

    pid: int
    create_time: float
    run_id: str

    @property
    def is_alive(self) -> bool:
        return self.find() is not None

    def find(self) -> psutil.Process | None:
        """The live process, or None when it ended, became a zombie, or its pid belongs to somebody else now."""
        if self.pid <= 0:
            return None
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.create_time) > 0.05 or process.status() == psutil.STATUS_ZOMBIE:
                return None
        except psutil.Error:
            return None
        return process if environment(process).get(RUN_ID) == self.run_id else None

    @property
    def is_frozen(self) -> bool:
        """Stopped by a signal: it lives, holds everything, and answers nobody."""
        process = self.find()
        try:
            return process is not None and process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.Error:
            return False


def environment(process: psutil.Process) -> Mapping[str, str]:
    """Its environment; empty where it is gone or not ours to read."""
    try:
        found: Mapping[str, str] = process.environ()
        return found
    except (psutil.Error, OSError):
        return {}


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path,
    answer: Path | None = None,
    cpus: Iterable[int] = (),
    pass_fds: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Starts `argv` as the leader of a session and group of its own. Its stdout goes to `answer`, else to the log."""
    with contextlib.ExitStack() as files:
        stderr = files.enter_context(log.open("ab"))
        stdout = files.enter_context(answer.open("wb")) if answer else stderr
        files.enter_context(_on_cpus(cpus))
        return subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )


@contextlib.contextmanager
def _on_cpus(cpus: Iterable[int]) -> Iterator[None]:
    """A child inherits the affinity of the thread that forks it, so it never runs one instruction elsewhere. Safer
    than preexec_fn, which runs Python between fork and exec."""
    wanted = set(cpus)
    if not wanted:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, wanted)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def signal_group(pid: int, signum: signal.Signals) -> None:
    """To the whole group that `pid` leads. Only for a child that is not reaped yet, or right after a check."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


def describe_exit(code: int) -> str:
    """0 -> "ended", 3 -> "exited with code 3", -9 -> "killed by SIGKILL"."""
    if code == 0:
        return "ended"
    if code > 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def members(match: Callable[[Mapping[str, str]], bool]) -> list[Identity]:
    """Every process of this user whose environment matches; never this one."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            variables = environment(process)
            if RUN_ID in variables and match(variables) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(Identity(process.pid, process.create_time(), variables[RUN_ID]))
        except psutil.Error:
            continue
    return found


def sweep(
    run_id: str,
    recorded: Iterable[Identity] = (),
    *,
    grace_s: float = 5.0,
    keep: Iterable[int] = (),
    clock: Callable[[], float] = time.monotonic,
) -> list[Identity]:
    """Ends whatever belongs to `run_id`; returns what it found alive. SIGKILL after `grace_s`, 0 kills at once."""
    spared = set(keep)

    def alive() -> list[Identity]:
        here = {i for i in recorded if i.is_alive} | set(members(lambda env: env.get(RUN_ID) == run_id))
        return sorted((i for i in here if i.pid not in spared), key=lambda i: i.pid)

    first = left = alive()
    if left and grace_s > 0:
        _signal_all(left, signal.SIGTERM)
        left = _wait_gone(left, clock() + grace_s, clock)
    # Again from the start: a process that was just being started was in neither list.
    for _ in range(5):
        left = alive()
        if not left:
            break
        _signal_all(left, signal.SIGKILL)
        _wait_gone(left, clock() + 2.0, clock)
    return first


def _signal_all(targets: list[Identity], signum: signal.Signals) -> None:
    for identity in targets:
        process = identity.find()
        if process is None:
            continue
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getpgid(identity.pid) == identity.pid:
                os.killpg(identity.pid, signum)
            else:
                process.send_signal(signum)


def _wait_gone(targets: list[Identity], deadline: float, clock: Callable[[], float]) -> list[Identity]:
    left = targets
    while (left := [identity for identity in left if identity.is_alive]) and clock() < deadline:
        time.sleep(0.02)
    return left


def of_this_process(run_id: str) -> Identity:
    me = psutil.Process()
    return Identity(me.pid, me.create_time(), run_id)
