"""What of this machine, and of the stacks on it, stands in the way: findings, each with its fix.

1. The machine: versions, cores, GPUs, memory, limits that registration of memory meets, allocator settings.
2. The transports, measured between two processes (`server.transfer.probe`), against a plain copy of the same bytes.
3. What runs: which pairs are linked, over what; which refuse each other, and the fields in which they differ.

A finding is ok, a warning (it works, worse than it could) or a failure (exit 5).
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pdctl.exits import Exit, NotRunning, Unreachable
from pdctl.launch import Machine, holder_of
from pdctl.render import table
from pdctl.rundir import stacks
from pdctl.status import gather, link_line
from server.errors import PdctlError

PACKAGES = ("torch", "transformers", "tokenizers", "msgspec", "starlette", "zstandard")
MIN_MEMORY, MIN_SHM, MIN_MEMLOCK = 2 * 2**30, 256 * 2**20, 256 * 2**20
# Of a plain copy: one-sided writes copy once, sockets twice and through the kernel. Beside that, a chunk has a price.
SHOULD_GIVE = {"nixl": 0.5, "tcp": 0.15}
SHOULD_START_MS = 2.0
SIZES = {"64KiB": 64 * 2**10, "1MiB": 2**20, "64MiB": 64 * 2**20}
SHM = "/dev/shm"  # noqa: S108
PROBE_TIMEOUT_S = 90.0
DEFAULT_PORT = 8000


@dataclass(frozen=True, slots=True)
class Finding:
    """`level`: ok, warn or fail. A fix is a sentence or a command."""

    check: str
    level: str
    found: str
    fix: str = ""


def examine(root: Path, *, measures: bool = True) -> tuple[list[Finding], dict[str, Any]]:
    """Findings, and what the probe measured."""
    findings = [*versions(), *machine(), *limits(os.environ), *ports(root)]
    measured: dict[str, Any] = {}
    if measures:
        try:
            measured = probe()
        except PdctlError as error:
            findings.append(Finding("transports", "fail", error.message, error.help))
        else:
            findings += [*transports(measured), *compression(measured)]
    findings += running(root)
    return findings, measured


def exit_of(findings: Iterable[Finding]) -> Exit:
    return Exit.PREFLIGHT if any(finding.level == "fail" for finding in findings) else Exit.OK


# -- the machine -----------------------------------------------------------------------------------------------------


def versions() -> list[Finding]:
    found = [Finding("python", "ok", platform.python_version())]
    for package in PACKAGES:
        try:
            found.append(Finding(package, "ok", importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding(package, "fail", "not installed", f"pip install {package}"))
    return found


def machine() -> list[Finding]:
    here = Machine.here()
    cores = Finding("cores", "ok", f"{len(here.cpus)} usable")
    if len(here.cpus) < 2:
        cores = Finding("cores", "warn", "one: prefill and decode share it", "give the container two cores or more")
    gpus = Finding("gpus", "ok", ", ".join(here.gpus) if here.gpus else "none: CPU profiles only, such as demo")
    memory = Finding("memory", "ok", f"{here.memory / 2**30:.1f} GiB available")
    if here.memory < MIN_MEMORY:
        fix = "free some, or a smaller kv_bytes in the profile"
        memory = Finding("memory", "warn", f"only {here.memory / 2**30:.1f} GiB available", fix)
    return [cores, gpus, memory]


def limits(environ: Mapping[str, str], has_gpus: bool | None = None) -> list[Finding]:
    """What NIXL and CUDA meet when they register and share memory."""
    has_gpus = bool(Machine.here().gpus) if has_gpus is None else has_gpus
    return [_memlock(has_gpus), _shm(), _ptrace(), _pid_namespace(), _allocator(environ)]


def _memlock(has_gpus: bool) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", "ok", "unlimited")
    shown = f"{soft / 2**20:.0f} MiB may be locked"
    if soft >= MIN_MEMLOCK:
        return Finding("memlock", "ok", shown)
    fix = "ulimit -l unlimited; in a container: --ulimit memlock=-1"
    return Finding("memlock", "warn" if has_gpus else "ok", f"{shown}; RDMA needs more", fix if has_gpus else "")


def _shm() -> Finding:
    try:
        free = shutil.disk_usage(SHM).free
    except OSError as error:
        return Finding(SHM, "warn", str(error.strerror), "mount a tmpfs there")
    shown = f"{free / 2**20:.0f} MiB free"
    if free < MIN_SHM:
        return Finding(SHM, "warn", f"{shown}: too little for shared memory transports", "docker: --shm-size=1g")
    return Finding(SHM, "ok", shown)


def _ptrace() -> Finding:
    """Copies from process to process (UCX's cma) are allowed to whom ptrace is."""
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return Finding("ptrace", "ok", "not restricted")
    if scope == 0 or os.geteuid() == 0:
        return Finding("ptrace", "ok", f"scope {scope}")
    fix = "sysctl kernel.yama.ptrace_scope=0, or expect UCX to use sockets on this host"
    return Finding("ptrace", "warn", f"scope {scope}: a worker may not write another's memory", fix)


def _pid_namespace() -> Finding:
    """Workers of one stack in different pid namespaces see no common process ids, which cma and CUDA IPC need."""
    try:
        mine = os.readlink("/proc/self/ns/pid")
    except OSError:
        return Finding("pid namespace", "ok", "not known")
    return Finding("pid namespace", "ok", f"{mine}; workers in other containers of this host need --pid=host")


def _allocator(environ: Mapping[str, str]) -> Finding:
    for key in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in environ.get(key, "").lower().replace(" ", ""):
            return Finding("allocator", "fail", f"{key} asks for expandable_segments", f"unset {key}: it breaks NIXL")
    return Finding("allocator", "ok", "nothing that breaks registration")


def ports(root: Path) -> list[Finding]:
    import socket

    with socket.socket() as sock:
        if sock.connect_ex(("127.0.0.1", DEFAULT_PORT)) != 0:
            return [Finding("port", "ok", f"{DEFAULT_PORT} is free")]
    owned = [d.name for d in stacks(root) if (stack := d.read()) and not stack.is_over and stack.port == DEFAULT_PORT]
    if owned:
        return [Finding("port", "ok", f"{DEFAULT_PORT} is {owned[0]}'s")]
    fix = "pdctl up ... --set router.port=0"
    return [Finding("port", "warn", f"{DEFAULT_PORT} is held by {holder_of(DEFAULT_PORT)}", fix)]


# -- transports ------------------------------------------------------------------------------------------------------


def probe() -> dict[str, Any]:
    """Runs the probe in a process of its own: it loads torch, and a transport that crashes takes nothing with it."""
    command = [sys.executable, "-P", "-m", "server.transfer.probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
        measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired as error:
        raise PdctlError(f"the transports' probe did not end within {PROBE_TIMEOUT_S:g} s") from error
    except (IndexError, ValueError) as error:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise PdctlError(f"the transports' probe failed: {last[0]}", help=" ".join(command)) from error
    return measured


def transports(measured: dict[str, Any]) -> list[Finding]:
    found = []
    copy = measured["copy_MBps"]
    for name, sizes in measured["transports"].items():
        if missing := sizes.get("missing"):
            fix = "pip install 'pdctl[nixl]'; without it KV goes over tcp" if name == "nixl" else ""
            found.append(Finding(name, "warn" if name == "nixl" else "fail", missing, fix))
            continue
        shown = ", ".join(f"{size} {sizes[size]['ms']:.2f} ms {sizes[size]['MBps']:.0f} MB/s" for size in sizes)
        shown += f"; {sizes['64MiB']['MBps'] / copy:.0%} of a plain copy ({copy:.0f} MB/s)"
        slow = [size for size in sizes if _is_slow(SIZES[size] / 1e6, sizes[size]["MBps"], copy * SHOULD_GIVE[name])]
        fix = f"{', '.join(slow)} should be quicker: look for other load; for nixl see ptrace and {SHM} above"
        found.append(Finding(name, "warn" if slow else "ok", shown, fix if slow else ""))
    return found


def _is_slow(megabytes: float, rate: float, should_give: float) -> bool:
    """Whether so many MB at `rate` MB/s take longer than at what the link should give, and a start."""
    return megabytes / rate > megabytes / should_give + SHOULD_START_MS / 1e3


def compression(measured: dict[str, Any]) -> list[Finding]:
    """Whether a codec pays: its seconds against those that fewer bytes save, on the best transport here."""
    rates = [s["64MiB"]["MBps"] for s in measured["transports"].values() if "64MiB" in s]
    if not rates:
        return []
    link = max(rates)
    found = []
    for name, codec in measured["codecs"].items():
        cost = 1 / codec["encode_MBps"] + 1 / codec["decode_MBps"]
        break_even = (1 - codec["ratio"]) / cost
        verdict = "pays here" if link < break_even else "does not pay here"
        shown = f"{verdict}: {codec['ratio']:.0%} of the bytes; pays on links below {break_even:.0f} MB/s"
        found.append(Finding(f"compression {name}", "ok", shown))
    return found


# -- what runs -------------------------------------------------------------------------------------------------------


def running(root: Path) -> list[Finding]:
    found: list[Finding] = []
    for stack_dir in stacks(root):
        try:
            value, code = gather(stack_dir)
        except (NotRunning, Unreachable):
            continue
        if code is Exit.NOT_RUNNING:
            continue
        level = "ok" if code is Exit.OK else "warn"
        fix = "" if code is Exit.OK else f"pdctl status {stack_dir.name}; pdctl logs -n {stack_dir.name}"
        found.append(Finding(f"stack {stack_dir.name}", level, value["state"], fix))
        found += _namespaces(stack_dir.name, [process["pid"] for process in value["processes"] if process["pid"]])
        if (stack := stack_dir.read()) is not None:
            found += _environments(stack_dir.name, stack.profile)
        for process in value["processes"]:
            found += _process(stack_dir.name, process)
    return found


def _namespaces(stack: str, pids: list[int]) -> list[Finding]:
    """Processes of one stack that see no common process ids cannot share memory."""
    spaces = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # gone, or another user's
            spaces.add(os.readlink(f"/proc/{pid}/ns/pid"))
    if len(spaces) < 2:
        return []
    shown = f"processes in {len(spaces)} pid namespaces: {', '.join(sorted(spaces))}"
    return [
        Finding(f"{stack} pid namespaces", "warn", shown, "start its containers with --pid=host, or in one container")
    ]


def _environments(stack: str, profile: dict[str, Any]) -> list[Finding]:
    """What a pool's own environment asks of the allocator."""
    pools = {role: (profile.get(role) or {}).get("env") or {} for role in ("prefill", "decode", "colocated")}
    found = [(role, _allocator(env)) for role, env in pools.items()]
    return [Finding(f"{stack} {role}.env", f.level, f.found, f.fix) for role, f in found if f.level != "ok"]


def _process(stack: str, process: dict[str, Any]) -> list[Finding]:
    numbers, name = process["numbers"], f"{stack} {process['name']}"
    fix = "start both from one profile and one version"
    if numbers.get("state") == "refused":
        return [Finding(name, "fail", numbers["reason"], fix)]
    found = []
    for decode, link in sorted(((numbers.get("load") or {}).get("links") or {}).items()):
        is_refused = not link["transport"]
        shown = link["why"] if is_refused else link_line(decode, link)
        found.append(Finding(f"{name} > {decode}", "fail" if is_refused else "ok", shown, fix if is_refused else ""))
    return found


def to_json(findings: list[Finding], measured: dict[str, Any]) -> dict[str, Any]:
    is_ok = exit_of(findings) is Exit.OK
    return {"version": 1, "ok": is_ok, "findings": [asdict(f) for f in findings], "measured": measured}


def show(findings: list[Finding]) -> str:
    """One line a finding, its fix under it."""
    rows = [[finding.level, finding.check, finding.found] for finding in findings]
    lines = table(rows, ("", "CHECK", "FOUND")).splitlines()
    out = lines[:1]
    for line, finding in zip(lines[1:], findings, strict=True):
        out.append(line)
        if finding.fix:
            out.append(f"      fix: {finding.fix}")
    return "\n".join(out)
