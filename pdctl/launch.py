"""What would start, and where: profile + machine -> one Launch a process, and what stands in the way.

1. `cpus` and `gpus` of a profile count what this process may use, from 0, as CUDA_VISIBLE_DEVICES renumbers GPUs: in a
   container that owns cores 4 and 5, `cpus = [0]` is core 4.
2. Router, supervisor and helpers share the prefill cores, so that the decode cores are left to decode alone. Colocated
   workers share all with everybody.
3. Of a profile with `hosts` only the part of this machine is started: the host whose address is one of its own.
4. A machine with one core runs any CPU profile on it, with a warning; otherwise a number that is not there is refused.
"""

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from server.config import Config, Host, WorkerSpec
from server.errors import ConfigError, StartError

# Temporaries of a decode step cross malloc's default threshold; a fresh mmap for each costs more than the arithmetic.
MALLOC_THRESHOLD = str(1 << 30)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# A worker shares its cores with the router and others. OpenMP threads that spin between the parallel parts use up their
# share of a core, so that what comes by then preempts one of them in the middle of a part and the rest wait for it.
WAIT_POLICY = "passive"
MODULES = {
    "router": "server.router",
    "prefill": "server.prefill",
    "decode": "server.decode",
    "colocated": "server.worker",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use."""

    cpus: tuple[int, ...]
    gpus: tuple[str, ...]
    memory: int
    addresses: frozenset[str] = frozenset()

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> "Machine":
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        addresses = {each.address.partition("%")[0] for found in psutil.net_if_addrs().values() for each in found}
        return cls(cpus, _visible_gpus(environ), psutil.virtual_memory().available, frozenset(addresses))


@dataclass(frozen=True, slots=True)
class Launch:
    """One process to start. `gpus` are CUDA_VISIBLE_DEVICES entries, `cpus` real core numbers."""

    name: str
    role: str
    cpus: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)

    def argv(self, boot: Path | str) -> list[str]:
        return [sys.executable, "-P", "-m", MODULES[self.role], "--boot", str(boot)]

    def env(self, base: Mapping[str, str], **more: str) -> dict[str, str]:
        """`base` with threads, devices and memory settled. What the profile's `env` says wins."""
        env = {**base, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        env["PDCTL_LOG"] = "json"
        # Profile overrides are settled by now; a child that read them again could only disagree.
        env = {key: value for key, value in env.items() if not key.startswith("PDCTL__")}
        if self.cpus:
            env |= dict.fromkeys(THREADS, str(len(self.cpus)))
            env |= {"MALLOC_MMAP_THRESHOLD_": MALLOC_THRESHOLD, "MALLOC_TRIM_THRESHOLD_": MALLOC_THRESHOLD}
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        else:
            env["OMP_WAIT_POLICY"] = WAIT_POLICY
            if self.role != "router" and self.cpus:
                env["CUDA_VISIBLE_DEVICES"] = ""
        return {**env, **self.extra_env, **more}


@dataclass(frozen=True, slots=True)
class Plan:
    """Every process of a stack on this machine, and what a reader should know before it starts."""

    router: Launch | None
    workers: tuple[Launch, ...]
    helpers: tuple[int, ...]
    warnings: tuple[str, ...]

    @property
    def launches(self) -> tuple[Launch, ...]:
        return self.workers if self.router is None else (*self.workers, self.router)


def plan(config: Config, machine: Machine) -> Plan:
    """Raises StartError when a core or GPU is asked for that is not there, or no host is this machine."""
    warnings: list[str] = []
    host = host_here(config, machine)
    specs = [spec for spec in config.workers if host is None or spec.name in host.workers]
    workers = tuple(_worker(spec, config, machine, warnings) for spec in specs)
    helpers = _helper_cpus(workers, machine)
    warnings += _overlaps(workers)
    router = Launch("router", "router", cpus=helpers) if host is None or host.router else None
    return Plan(router, workers, helpers, tuple(warnings))


def host_here(config: Config, machine: Machine) -> Host | None:
    """The profile's host that this machine is; None when it names none. Raises StartError."""
    if not config.hosts:
        return None
    found = [host for host in config.hosts.values() if machine.addresses & _resolved(host.address)]
    if len(found) != 1:
        named = ", ".join(f"{name} ({host.address})" for name, host in config.hosts.items())
        raise StartError(
            f"{len(found) or 'none'} of the profile's hosts is this machine: {named}",
            code="E_HOST",
            help=f"this machine has {', '.join(sorted(machine.addresses))}",
        )
    return found[0]


def _resolved(address: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(address, None)}
    except OSError:
        return {address}


def _worker(spec: WorkerSpec, config: Config, machine: Machine, warnings: list[str]) -> Launch:
    cpus = tuple(_core(index, spec, machine, warnings) for index in spec.cpus)
    gpus = tuple(_gpu(index, spec, machine) for index in spec.gpus)
    return Launch(spec.name, spec.role, tuple(sorted(set(cpus))), gpus, config.pool(spec.role).env)


def _core(index: int, spec: WorkerSpec, machine: Machine, warnings: list[str]) -> int:
    count = len(machine.cpus)
    if 0 <= index < count:
        return machine.cpus[index]
    if count == 1:
        warnings.append(f"one core only: {spec.name} shares it with everything else, expect it to be slow")
        return machine.cpus[0]
    raise StartError(
        f"{spec.role}.cpus names core {index}; pdctl may use {count} cores here, which count as 0..{count - 1}",
        code="E_CPU",
        help=f"pdctl up ... --set '{spec.role}.cpus=[{count - 1}]'",
    )


def _gpu(index: int, spec: WorkerSpec, machine: Machine) -> str:
    if 0 <= index < len(machine.gpus):
        return machine.gpus[index]
    have = f"GPUs 0..{len(machine.gpus) - 1}" if machine.gpus else "no GPU"
    raise StartError(
        f"{spec.role}.gpus names GPU {index}; this machine has {have}",
        code="E_GPU",
        help="on a machine without GPUs: pdctl up demo" if not machine.gpus else "choose others in the profile",
    )


def _helper_cpus(workers: tuple[Launch, ...], machine: Machine) -> tuple[int, ...]:
    """Nothing to decide unless workers are bound to cores."""
    if not any(worker.cpus for worker in workers):
        return ()
    prefill = {cpu for worker in workers if worker.role == "prefill" for cpu in worker.cpus}
    decode = {cpu for worker in workers if worker.role == "decode" for cpu in worker.cpus}
    return tuple(sorted(prefill or set(machine.cpus) - decode or machine.cpus))


def _overlaps(workers: tuple[Launch, ...]) -> list[str]:
    """Shared devices are allowed (a test on one GPU) but never in silence."""
    found = []
    for index, one in enumerate(workers):
        for other in workers[index + 1 :]:
            if shared := sorted(set(one.gpus) & set(other.gpus)):
                found.append(f"{one.name} and {other.name} share GPU {', '.join(shared)}")
            if cores := sorted(set(one.cpus) & set(other.cpus)):
                found.append(f"{one.name} and {other.name} share core {', '.join(map(str, cores))}")
    return found


def _visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    present = [path.name[6:] for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", path.name)]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(str(i) for i in range(len(present)))
    return tuple(part.strip() for part in visible.split(",") if part.strip() not in ("", "-1"))


def listen(host: str, port: int, name: str) -> socket.socket:
    """The router's socket, bound and listening before anything loads. Raises StartError that names the holder."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        # Two sockets may share a bound port until one of them listens.
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno in (98, 48):  # EADDRINUSE, Linux and macOS
            holder = holder_of(port)
            raise StartError(
                f"router port {port} is held by {holder}",
                code="E_PORT_IN_USE",
                help=f"pdctl up {name} --set router.port=0",
            ) from error
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}", code="E_LISTEN") from error
    sock.set_inheritable(False)
    return sock


def holder_of(port: int) -> str:
    """Who listens there: "pid 913 `vllm serve ...` (user bob)"; less when this user may not see it."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return "another process (its owner cannot be seen by this user)"
    for connection in connections:
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
            if connection.pid is None:
                break
            return _describe(connection.pid)
    return "another process (its owner cannot be seen by this user)"


def _describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline()) or process.name()
        return f"pid {pid} `{command[:79] + '…' if len(command) > 80 else command}` (user {process.username()})"
    except psutil.Error:
        return f"pid {pid}"


def check_keys(config: Config) -> None:
    """Key files exist, are not empty and are nobody else's to read. Raises ConfigError."""
    files = {
        f"router.{key}": getattr(config.router, key) for key in ("api_key_file", "admin_key_file", "view_key_file")
    }
    for key, value in {**files, "secret_file": config.secret_file}.items():
        if value is None:
            continue
        path = Path(value).expanduser()
        try:
            mode = path.stat().st_mode
            is_empty = not path.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"{key}: {path}: {error.strerror}", code="E_KEY_FILE") from error
        if mode & 0o077:
            raise ConfigError(f"{key}: {path} can be read by others", code="E_KEY_FILE", help=f"chmod 600 {path}")
        if is_empty:
            raise ConfigError(f"{key}: {path} is empty", code="E_KEY_FILE")
