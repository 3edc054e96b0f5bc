"""`pdctl up`: from a profile's name to a supervisor that runs it.

1. prepare: load the profile, find the stack's folder.
2. running already? The same profile: its address, exit 0. Another: the difference, exit 7. A dead supervisor whose
   processes live on: refused, `pdctl down` first.
3. foreground: this process becomes the supervisor (exec), so that signals and exit code need no forwarding.
   -d: the supervisor gets a session of its own, and we read its events until it is ready or says why not.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pdctl.down import supervisor_of, survivors
from pdctl.exits import Exit, Refused, Unreachable
from pdctl.launch import Machine, Plan, plan
from pdctl.process import RUN_ID, STACK_DIR
from pdctl.profile import Profile, difference, load
from pdctl.render import Progress, note, print_json, table
from pdctl.rundir import Order, Stack, StackDir, write_private
from server.errors import PdctlError


@dataclass(frozen=True, slots=True)
class Start:
    """A checked profile and the folder it would run in."""

    profile: Profile
    stack_dir: StackDir

    @property
    def running(self) -> Stack | None:
        """The recorded stack, where it is not over."""
        stack = self.stack_dir.read()
        return None if stack is None or stack.is_over else stack


def prepare(profile: str, root: Path, *, sets: list[str], name: str | None) -> Start:
    loaded = load(profile, sets=sets, flags={"name": name} if name else None)
    return Start(loaded, StackDir(root / loaded.config.name))


def start(order: Start, *, is_detached: bool, waits: bool, timeout_s: float, progress: str) -> int:
    """Returns only where something ran already, or with -d; else this process becomes the supervisor."""
    stack = order.running
    if stack is not None and supervisor_of(stack).is_alive:
        return _join(order, stack, waits=waits)
    if stack is not None and (left := survivors(stack)):
        pids = ", ".join(str(identity.pid) for identity in left)
        raise Unreachable(
            f"the supervisor of {stack.name} is gone, its processes live on (pid {pids})",
            help=f"pdctl down {stack.name}",
        )
    order.stack_dir.create()
    order.stack_dir.rotate_log("supervisor")
    run_id = secrets.token_hex(6)
    env = {**os.environ, RUN_ID: run_id, STACK_DIR: str(order.stack_dir.path)}
    if not is_detached:
        file = _write_order(order, run_id, timeout_s=timeout_s, progress=progress)
        sys.stdout.flush()
        os.execve(sys.executable, _argv(file), env)  # noqa: S606
    return _detached(order, run_id, env, waits=waits, timeout_s=timeout_s, progress=progress)


def _argv(file: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "pdctl.supervise", str(file)]


def _write_order(start: Start, run_id: str, *, timeout_s: float, progress: str, events_fd: int = -1) -> Path:
    file = start.stack_dir.boot(f"supervisor-{run_id}")
    order = Order(
        run_id=run_id,
        stack_dir=str(start.stack_dir.path),
        config=start.profile.config.model_dump(mode="json"),
        profile_file=str(start.profile.file.absolute()),
        start_timeout_s=timeout_s,
        progress=progress,
        events_fd=events_fd,
    )
    write_private(file, msgspec.json.encode(order))
    return file


def _join(order: Start, stack: Stack, *, waits: bool) -> int:
    """`up` on what runs already."""
    if changes := difference(order.profile.config, stack.profile):
        shown = "; ".join(f"{key} is {_shown(now)}, asked for {_shown(asked)}" for key, asked, now in changes)
        raise Refused(
            f"{stack.name} runs with another profile: {shown}",
            code="E_RUNNING",
            help=f"pdctl down {stack.name}, then up again; or -n OTHER --set router.port=0 for a second stack",
        )
    note(f"{stack.name} is already up")
    while waits and stack.state == "starting" and supervisor_of(stack).is_alive:
        time.sleep(0.1)
        stack = order.stack_dir.read() or stack
    if waits and stack.is_over:
        raise PdctlError(f"{stack.name} did not start: {stack.reason}", help=f"pdctl logs -n {stack.name}")
    _tell(stack.name, stack.url)
    return Exit.OK


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _tell(name: str, url: str) -> None:
    """The address is data; how to use it is narration."""
    if not url:
        note(f"{name}: this machine's workers are up; the router is on another")
        note(f"stop them: pdctl down {name}")
        return
    print(f"{url}/v1", flush=True)
    note(f"call it:  curl {url}/v1/models      or: eval $(pdctl env -n {name})")
    note(f"look:     pdctl status {name}; pdctl logs -n {name} -f")
    note(f"stop it:  pdctl down {name}")


def _tell_links(stack_dir: StackDir) -> None:
    """Over what KV goes, and why: nothing falls back in silence."""
    from pdctl.status import gather

    for process in gather(stack_dir)[0]["processes"]:
        for link in process["numbers"].get("links", []):
            note(f"kv:       {process['name']} > {link}")


def _detached(start: Start, run_id: str, env: dict[str, str], *, waits: bool, timeout_s: float, progress: str) -> int:
    reader, writer = os.pipe()
    file = _write_order(start, run_id, timeout_s=timeout_s, progress=progress, events_fd=writer)
    log = start.stack_dir.log("supervisor")
    with log.open("ab") as output:
        process = subprocess.Popen(
            _argv(file),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(writer,),
            start_new_session=True,
        )
    os.close(writer)
    try:
        return _follow(start, process, _events(reader), waits=waits, shown=Progress(progress))
    except KeyboardInterrupt:
        note("Ctrl-C: taking it down")
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
        return Exit.INTERRUPTED


def _follow(
    start: Start, process: "subprocess.Popen[bytes]", events: Iterator[dict[str, Any]], *, waits: bool, shown: Progress
) -> int:
    """Until the supervisor is ready, or says why it is not."""
    failure = Exit.OK
    for event in events:
        shown.event(event)
        if event["event"] == "ready" or (not waits and event["event"] == "process"):
            stack = start.stack_dir.read()
            if stack is not None and not shown.is_json:
                _tell(stack.name, stack.url)
                _tell_links(start.stack_dir)
            # It outlives us: without this Python would warn that a child still runs.
            process.returncode = 0
            return Exit.OK
        if event["event"] == "failed":
            failure = Exit(event["exit"])
    code = process.wait(timeout=60)
    if failure:
        return failure
    if code == 0:
        raise Refused(f"{start.stack_dir.name} was stopped while it started")
    raise PdctlError(f"the supervisor ended with code {code} (log: {start.stack_dir.log('supervisor')})")


def _events(fd: int) -> Iterator[dict[str, Any]]:
    with os.fdopen(fd, "rb") as file:
        for line in file:
            yield msgspec.json.decode(line, type=dict[str, Any])


def dry_run(start: Start, *, as_json: bool, tells_difference: bool) -> int:
    """Shows processes, devices, port and fit. With `tells_difference`: 0 what runs is the same, 1 it is not."""
    config = start.profile.config
    placed = plan(config, Machine.here())
    running = start.running
    is_running = running is not None and supervisor_of(running).is_alive
    changes = difference(config, running.profile) if running is not None and is_running else []
    port = "the router's, on another machine"
    if placed.router is not None:
        port = _port(config.name, config.router.host, config.router.port, running if is_running else None)
    if as_json:
        print_json(_as_json(start, placed, port, changes, is_running))
    else:
        _print_plan(start, placed, port, is_running)
        for key, asked, now in changes:
            print(f"{key}: {_shown(now)} -> {_shown(asked)}")
    return int(bool(changes) or not is_running) if tells_difference else Exit.OK


def _port(name: str, host: str, port: int, running: Stack | None) -> str:
    from pdctl.launch import listen

    if port == 0:
        return "any free port"
    if running is not None and running.port == port:
        return f"{port} (its own)"
    listen(host, port, name).close()
    return f"{port} (free)"


def _as_json(
    start: Start, placed: Plan, port: str, changes: list[tuple[str, Any, Any]], is_running: bool
) -> dict[str, Any]:
    processes = [
        {
            "name": launch.name,
            "role": launch.role,
            "cpus": launch.cpus,
            "gpus": launch.gpus,
            "argv": launch.argv(start.stack_dir.boot(launch.name)),
        }
        for launch in placed.launches
    ]
    return {
        "version": 1,
        "name": start.stack_dir.name,
        "profile_file": str(start.profile.file),
        "running": is_running,
        "port": port,
        "processes": processes,
        "warnings": placed.warnings,
        "changes": [{"key": key, "asked": asked, "now": now} for key, asked, now in changes],
        "memory_available_bytes": Machine.here().memory,
    }


def _print_plan(start: Start, placed: Plan, port: str, is_running: bool) -> None:
    config = start.profile.config
    print(f"{start.stack_dir.name}: {config.model.path} from {start.profile.file}{' (running)' if is_running else ''}")
    rows = []
    for launch in placed.launches:
        where = [f"gpu {','.join(launch.gpus)}"] if launch.gpus else []
        where += [f"core {','.join(map(str, launch.cpus))}"] if launch.cpus else []
        command = " ".join(["python", *launch.argv(start.stack_dir.boot(launch.name))[1:]])
        rows.append([launch.name, launch.role, " ".join(where) or "-", command])
    print(table(rows, ("NAME", "ROLE", "ON", "COMMAND")))
    print(f"port: {port}")
    pools = sum(pool.kv_bytes * pool.workers for pool in _pools(config) if isinstance(pool.kv_bytes, int))
    available = Machine.here().memory
    if pools and not any(launch.gpus for launch in placed.workers):
        verdict = "fits" if pools < available else "does NOT fit"
        print(f"KV pools: {pools / 2**30:.1f} GiB of {available / 2**30:.1f} GiB available: {verdict}")
    else:
        print(f"memory: {available / 2**30:.1f} GiB available; KV pools are sized at start (kv_bytes = auto)")
    for warning in placed.warnings:
        print(f"warning: {warning}")


def _pools(config: Any) -> tuple[Any, ...]:
    return (config.prefill, config.decode, config.colocated)
