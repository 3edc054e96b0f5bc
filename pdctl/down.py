"""Taking a stack down from outside, whatever state it is in.

1. A supervisor that lives is asked, and given the time to drain.
2. One that does not answer, or is gone, is no obstacle: what carries the run's id is ended here.
3. With the stack's lock in hand (nobody starts it anew meanwhile) leftovers of older runs go too, and the record says
   so.
"""

import shutil
import time
from collections.abc import Callable

import psutil

from pdctl import control
from pdctl.exits import Unreachable
from pdctl.process import RUN_ID, STACK_DIR, Identity, members, sweep
from pdctl.rundir import Stack, StackDir

GRACE_S = 5.0
# What a supervisor needs beyond the drain: workers' time to end, then kill.
MARGIN_S = 12.0
Say = Callable[[str], None]


def supervisor_of(stack: Stack) -> Identity:
    return Identity(stack.pid, stack.create_time, stack.run_id)


def recorded(stack: Stack) -> list[Identity]:
    """The processes that stack.json names, the supervisor not among them."""
    return [Identity(process.pid, process.create_time, stack.run_id) for process in stack.processes if process.pid]


def survivors(stack: Stack) -> list[Identity]:
    return [identity for identity in recorded(stack) if identity.is_alive]


def take_down(stack_dir: StackDir, say: Say, *, drain_s: float | None = None, is_forced: bool = False) -> bool:
    """Leaves no process of the stack behind; True when there was one."""
    stack = stack_dir.read()
    if stack is None:
        return False
    supervisor = supervisor_of(stack)
    was_alive = supervisor.is_alive
    if was_alive:
        _ask(stack, supervisor, say, drain_s, is_forced)
    found = sweep(stack.run_id, recorded(stack), grace_s=0.0 if is_forced else GRACE_S)
    with stack_dir.lock() as is_mine:
        if is_mine:
            found += _sweep_older(stack_dir, stack.run_id)
            _record_end(stack_dir, "supervisor was gone" if not was_alive else "pdctl down")
    if found:
        say(f"ended {len(found)} left behind: pid {', '.join(str(identity.pid) for identity in found)}")
    return was_alive or bool(found)


def _ask(stack: Stack, supervisor: Identity, say: Say, drain_s: float | None, is_forced: bool) -> None:
    """Returns when the supervisor is gone, by itself or by force."""
    limit_s = float(stack.profile.get("supervise", {}).get("stop_timeout", 30.0)) if drain_s is None else drain_s
    try:
        control.ask(stack.control, {"op": "down", "drain_s": drain_s, "force": is_forced}, timeout_s=2.0)
        _wait(lambda: not supervisor.is_alive, MARGIN_S + (0.0 if is_forced else limit_s))
    except Unreachable as error:
        say(error.message)
    process = supervisor.find()
    if process is not None:
        say(f"the supervisor (pid {supervisor.pid}) does not end, killing it")
        try:
            process.kill()
        except psutil.Error:
            return
        _wait(lambda: not supervisor.is_alive, 2.0)


def _sweep_older(stack_dir: StackDir, run_id: str) -> list[Identity]:
    here = str(stack_dir.path)
    older = {i.run_id for i in members(lambda env: env.get(STACK_DIR) == here and env.get(RUN_ID) != run_id)}
    return [identity for run in sorted(older) for identity in sweep(run, grace_s=GRACE_S)]


def _record_end(stack_dir: StackDir, reason: str) -> None:
    stack = stack_dir.read()
    if stack is None:
        return
    shutil.rmtree(stack.socket_dir, ignore_errors=True) if stack.socket_dir else None
    if not stack.is_over:
        stack.state, stack.reason = "stopped", reason
        for process in stack.processes:
            process.state = "stopped"
        stack_dir.write(stack)


def _wait(is_over: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_over():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.03)
    return True
