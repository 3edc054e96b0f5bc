"""What is the case now, from three witnesses: the record on disk, the kernel, and the router if it answers.

The record says what should be; the kernel says which of these processes live; the supervisor says what it is doing
about it. None of them is waited for longer than half a second, so the answer comes within two whatever is dead.
"""

import time
from typing import Any

import msgspec

from pdctl import control
from pdctl.client import admin
from pdctl.down import supervisor_of
from pdctl.exits import Exit, NotRunning, Unreachable
from pdctl.process import Identity
from pdctl.render import STATE_COLOURS, Style, duration, table
from pdctl.rundir import ProcessInfo, Stack, StackDir
from server.errors import PdctlError

NUMBERS = ("queue", "running", "kv")
# A step that takes five times as long as predicted is frozen; short steps get a second, for the machine may be busy.
FROZEN_FACTOR, FROZEN_MIN_S = 5.0, 1.0


def gather(stack_dir: StackDir) -> tuple[dict[str, Any], Exit]:
    """The `--json` value and the exit code of `pdctl status`."""
    recorded = stack_dir.read()
    if recorded is None:
        return {"version": 1, "name": stack_dir.name, "state": "stopped", "processes": []}, Exit.NOT_RUNNING
    supervisor, stack = _supervisor(recorded)
    states = {process.name: _state(process, stack, supervisor["state"]) for process in stack.processes}
    numbers = _numbers(stack_dir, stack) if states.get("router") == "ready" and not stack.is_over else {}
    states |= {name: _as_routed(state, numbers.get(name, {})) for name, state in states.items()}
    here = [*stack.processes, *_elsewhere(stack, numbers)]
    states |= {process.name: process.state for process in here if process.name not in states}
    processes = [_process(process, states[process.name], numbers.get(process.name, {})) for process in here]
    state, code = _verdict(stack, supervisor["state"], list(states.values()))
    value = {
        "version": 1,
        "name": stack.name,
        "state": state,
        "reason": stack.reason,
        "run_id": stack.run_id,
        "url": stack.url if stack.port else "",
        "model": stack.profile.get("model", {}).get("path", ""),
        "profile_file": stack.profile_file,
        "uptime_s": round(time.time() - stack.ready_at, 1) if stack.ready_at and not stack.is_over else 0.0,
        "supervisor": supervisor,
        "processes": processes,
    }
    return value, code


def _supervisor(stack: Stack) -> tuple[dict[str, Any], Stack]:
    """Its state, and what it says itself where it answers."""
    identity = supervisor_of(stack)
    fields = {"pid": stack.pid, "uptime_s": round(time.time() - stack.started_at, 1)}
    if not identity.is_alive:
        return {"state": "stopped" if stack.is_over else "dead", **fields}, stack
    if identity.is_frozen:
        return {"state": "frozen", **fields}, stack
    try:
        said = control.ask(stack.control, {"op": "status"}, timeout_s=0.5)
        return {"state": "ready", **fields}, msgspec.convert(said["stack"], Stack)
    except (PdctlError, msgspec.MsgspecError, KeyError):
        # Before its socket is there and after it is gone, the record is all there is.
        starting = stack.state in ("starting", "draining") or stack.is_over
        return {"state": "ready" if starting else "unreachable", **fields}, stack


def _state(process: ProcessInfo, stack: Stack, supervisor: str) -> str:
    if stack.is_over:
        return "stopped"
    if not process.pid or process.state in ("restarting", "dead", "waiting", "stopped"):
        return process.state
    identity = Identity(process.pid, process.create_time, stack.run_id)
    if not identity.is_alive:
        # The supervisor has a moment to notice; nobody will, where it is gone.
        return "dead" if supervisor != "ready" else "restarting"
    return "frozen" if identity.is_frozen else process.state


def _as_routed(state: str, numbers: dict[str, Any]) -> str:
    """A process that runs is of use once the router can send it something: after a restart that takes a moment."""
    said = numbers.get("state")
    return state if state != "ready" or said in (None, "ready", "connected", "busy") else str(said)


def _numbers(stack_dir: StackDir, stack: Stack) -> dict[str, dict[str, Any]]:
    """What the router knows of each process: state as it sees it, queue, running, kv."""
    rows: dict[str, dict[str, Any]]
    try:
        state = admin(stack_dir, stack, timeout_s=0.5).get("/admin/state")
    except PdctlError as error:
        return {"router": {"unreachable": error.message}}
    router = state.get("router", {})
    rows = {"router": {"state": router.get("state"), "queue": router.get("waiting"), "running": router.get("running")}}
    unproven = [name for name, route in state.get("routes", {}).items() if not route.get("proven")]
    if unproven and rows["router"]["state"] == "ready":
        rows["router"] |= {"state": "proving routes", "reason": ", ".join(unproven)}
    return rows | {str(worker.get("name")): _worker(worker) for worker in state.get("workers", [])}


def _elsewhere(stack: Stack, numbers: dict[str, dict[str, Any]]) -> list[ProcessInfo]:
    """Workers on other machines, of which only the router knows."""
    hosts = stack.profile.get("hosts") or {}
    remote = [name for host in hosts.values() for name in host["workers"] if stack.process(name) is None]
    return [
        ProcessInfo(name, name.partition("-")[0], state=_as_routed("ready", numbers[name]))
        for name in remote
        if name in numbers
    ]


def _worker(worker: dict[str, Any]) -> dict[str, Any]:
    """The router's view of a worker in the words of the table; `kv` is the share of blocks written or granted."""
    load, heartbeat = worker.get("load") or {}, worker.get("heartbeat") or {}
    total = load.get("blocks_total")
    age_s, predicted_s = heartbeat.get("step_age_s") or 0.0, heartbeat.get("predicted_s") or 0.0
    is_frozen = not heartbeat.get("busy") and predicted_s > 0 and age_s > FROZEN_FACTOR * predicted_s + FROZEN_MIN_S
    return {
        "state": "frozen" if is_frozen else worker.get("state"),
        "reason": worker.get("reason") or "",
        "queue": load.get("waiting"),
        "running": load.get("running"),
        "kv": load.get("blocks_used", 0) / total if total else None,
        "load": load,
        "links": [link_line(name, link) for name, link in sorted((load.get("links") or {}).items())],
    }


def link_line(decode: str, link: dict[str, Any]) -> str:
    """Over what KV goes to one decode worker, why, and how fast it went so far, verification included."""
    if not link["transport"]:
        return f"{decode}: {link['why']}"
    rate = f"{link['bytes'] / link['seconds'] / 1e6:.0f} MB/s" if link["seconds"] else "nothing sent yet"
    codec = "" if link["codec"] == "none" else f", {link['codec']}"
    return f"{decode}: {link['transport']} ({link['why']}){codec}, {rate}"


def _process(process: ProcessInfo, state: str, numbers: dict[str, Any]) -> dict[str, Any]:
    last = process.exits[-1] if process.exits else None
    return {
        "name": process.name,
        "role": process.role,
        "state": state,
        "pid": process.pid,
        "uptime_s": round(time.time() - process.started_at, 1) if process.started_at and state != "dead" else 0.0,
        "stage": process.stage,
        "share": process.share,
        "restarts": process.restarts,
        "last_exit": msgspec.to_builtins(last) if last else None,
        "cpus": process.cpus,
        "gpus": process.gpus,
        "log": process.log,
        "detail": process.detail,
        "numbers": numbers,
    }


def _verdict(stack: Stack, supervisor: str, states: list[str]) -> tuple[str, Exit]:
    if stack.is_over or supervisor == "stopped":
        return stack.state, Exit.NOT_RUNNING
    if supervisor != "ready":
        if supervisor == "dead" and all(state in ("dead", "stopped", "waiting") for state in states):
            return "dead", Exit.NOT_RUNNING
        return f"supervisor {supervisor}", Exit.UNREACHABLE
    if stack.state == "ready" and all(state == "ready" for state in states):
        return "ready", Exit.OK
    return "degraded" if stack.state == "ready" else stack.state, Exit.DEGRADED


def show(value: dict[str, Any], style: Style) -> str:
    """For people: one line for the stack, one for each process, and what is wrong."""
    up = f"up {duration(value['uptime_s'])}" if value.get("uptime_s") else ""
    head = [value["name"], style(value["state"], STATE_COLOURS.get(value["state"], "yellow")), value.get("url", ""), up]
    lines = ["  ".join(part for part in head if part)]
    supervisor = value.get("supervisor", {})
    rows = [
        [
            "supervisor",
            "",
            supervisor.get("state", ""),
            str(supervisor.get("pid", "")),
            duration(supervisor.get("uptime_s", 0)),
            "",
            "",
            "",
            "",
            "",
        ]
    ]
    rows += [_row(process) for process in value["processes"]]
    lines.append(table(rows, ("NAME", "ROLE", "STATE", "PID", "UP", "ON", "QUEUE", "RUN", "KV", "RESTARTS")))
    for process in value["processes"]:
        if process["state"] not in ("ready", "stopped") and process["last_exit"]:
            ago = duration(time.time() - process["last_exit"]["at"])
            lines.append(f"{process['name']}: {process['last_exit']['reason']}, {ago} ago (log: {process['log']})")
        if problem := process["numbers"].get("unreachable") or process["numbers"].get("reason"):
            lines.append(f"{process['name']}: {problem}")
        lines += [f"{process['name']} > {link}" for link in process["numbers"].get("links", [])]
    if value["state"] in ("failed", "stopped") and value.get("reason"):
        lines.append(f"{value['state']}: {value['reason']}")
    if value["state"].startswith("supervisor"):
        lines.append(f"the supervisor is {supervisor.get('state')}, nothing is restarted: pdctl down {value['name']}")
    return "\n".join(lines)


def _row(process: dict[str, Any]) -> list[str]:
    numbers = process["numbers"]
    shown = (
        process["state"] if process["state"] != "starting" else f"starting {process['stage']} {process['share']:.0%}"
    )
    where = [f"gpu {','.join(process['gpus'])}"] if process["gpus"] else []
    where += [f"core {','.join(map(str, process['cpus']))}"] if process["cpus"] else []
    pid = str(process["pid"] or "-") if process["state"] not in ("dead", "stopped", "waiting") else "-"
    return [
        process["name"],
        process["role"],
        shown,
        pid,
        duration(process["uptime_s"]) if pid != "-" else "-",
        " ".join(where) or "-",
        *(_number(numbers, key) for key in NUMBERS),
        str(process["restarts"] or "-"),
    ]


def _number(numbers: dict[str, Any], key: str) -> str:
    value = numbers.get(key)
    if value is None:
        return "-"
    return f"{value:.0%}" if key == "kv" and isinstance(value, float) else str(value)


def running(stack_dir: StackDir) -> Stack:
    """The record of a stack whose supervisor lives. Raises NotRunning, Unreachable."""
    stack = stack_dir.read()
    if stack is None or stack.is_over:
        raise NotRunning(f"{stack_dir.name} is not running", help="pdctl up PROFILE -d")
    if not supervisor_of(stack).is_alive:
        raise Unreachable(f"the supervisor of {stack.name} is gone", help=f"pdctl down {stack.name}")
    return stack
