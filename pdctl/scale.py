"""`pdctl scale decode=2`: workers more or fewer of one pool while the stack runs, nothing else restarted.

More    1. the profile with the new count, devices chosen for the new ones; refused here if it cannot be
        2. each new worker, one after another, starts as at `up`; one that does not leaves the stack without it
        3. the router is told, introduces it to the prefill workers, and proves its routes before it carries work
Fewer   1. the router drains the last ones, each ends what it has
        2. the router forgets it, the process ends

`pdctl role prefill-1 decode`: the last worker of one pool becomes the last of the other; its process goes on, and the
weights stay loaded. Drained and forgotten as above, told its new role, made known to the router again.

A prefill pool is not scaled up: a decode worker's landing ring is shared out among the prefill workers at its start.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pdctl.client import Client
from pdctl.exits import Refused, TimedOut, Unreachable, UsageError
from pdctl.launch import Machine, plan
from server.config import MAX_WORKERS, ROLES, Config, Role
from server.errors import PdctlError

if TYPE_CHECKING:
    from pdctl.supervisor import Supervisor

DRAIN_S = 600.0


def resized(config: Config, role: Role, count: int, machine: Machine) -> Config:
    """`config` with so many workers in the pool of `role`. Raises Refused."""
    pool = config.pool(role)
    if role == "prefill" or not pool.workers:
        raise Refused(f"the {role} pool cannot be scaled while the stack runs", code="E_SCALE", help="pdctl down, up")
    if count < 1:
        raise Refused(f"{role}={count}: a pool keeps one worker at least", code="E_SCALE", help="pdctl down")
    if count > MAX_WORKERS:
        raise Refused(f"a pool has {MAX_WORKERS} workers at most", code="E_SCALE")
    share = max(1, len(pool.gpus or pool.cpus) // pool.workers)
    devices: dict[str, Any] = {}
    if pool.gpus:
        devices["gpus"] = _gpus(config, pool.gpus, count * share, machine)
    elif pool.cpus:
        devices["cpus"] = _cpus(config, pool.cpus, count * share, machine)
    sections = config.model_dump(mode="json")
    sections[role] |= {"workers": count, **devices}
    return Config.model_validate(sections)


def turned(config: Config, name: str, role: Role, max_prefill: int) -> tuple[str, Config]:
    """What `name` is called in its new role, and `config` with it there. Raises Refused."""
    spec = next((spec for spec in config.workers if spec.name == name), None)
    known = ", ".join(each.name for each in config.workers)
    if spec is None:
        raise Refused(f"there is no worker {name}; there are: {known}", code="E_ROLE")
    if {spec.role, role} != {"prefill", "decode"}:
        raise Refused(f"{name} is a {spec.role} worker: only prefill and decode change places", code="E_ROLE")
    old, new = config.pool(spec.role), config.pool(role)
    if old.workers == 1:
        raise Refused(f"{name} is the only {spec.role} worker", code="E_ROLE", help="pdctl scale decode=2")
    if spec.index != old.workers - 1:
        raise Refused(f"the last worker of a pool changes: {spec.role}-{old.workers - 1}", code="E_ROLE")
    if role == "prefill" and new.workers + 1 > max_prefill:
        message = f"landing rings were shared out among {max_prefill} prefill workers when they started"
        raise Refused(message, code="E_ROLE", help="pdctl down, up with more prefill.workers")
    sections = config.model_dump(mode="json")
    for kind in ("gpus", "cpus"):
        own = getattr(spec, kind)
        sections[spec.role][kind] = getattr(old, kind)[: len(getattr(old, kind)) - len(own)]
        sections[role][kind] = [*getattr(new, kind), *own]
    sections[spec.role]["workers"] -= 1
    sections[role]["workers"] += 1
    return f"{role}-{new.workers}", Config.model_validate(sections)


def _gpus(config: Config, have: Sequence[int], wanted: int, machine: Machine) -> list[int]:
    used = {index for role in ("prefill", "decode", "colocated") for index in config.pool(role).gpus}
    free = [index for index in range(len(machine.gpus)) if index not in used]
    if len(have) + len(free) < wanted:
        raise Refused(f"{wanted - len(have)} GPUs more are needed, {len(free)} are free", code="E_SCALE")
    return [*have, *free][:wanted]


def _cpus(config: Config, have: Sequence[int], wanted: int, machine: Machine) -> list[int]:
    """Cores that no worker has come first. When there are too few, the pool's own are shared: slower, and said so in a
    warning."""
    used = {index for role in ROLES for index in config.pool(role).cpus}
    cpus = [*have, *(index for index in range(len(machine.cpus)) if index not in used)][:wanted]
    while len(cpus) < wanted:
        cpus.append(min(cpus, key=cpus.count))
    return cpus


class Scaler:
    """Changes a supervisor's pools; it sees to it that one change is made at a time."""

    def __init__(self, supervisor: "Supervisor", router: Client) -> None:
        self._supervisor = supervisor
        self._router = router

    async def scale(self, role: Role, count: int) -> None:
        """One worker after another. Raises PdctlError: the step that failed is undone, those before it stand."""
        supervisor = self._supervisor
        resized(supervisor.config, role, count, supervisor.machine)  # refused as a whole, before anything changes
        while (now := supervisor.config.pool(role).workers) != count:
            if now < count:
                await self._add(f"{role}-{now}", resized(supervisor.config, role, now + 1, supervisor.machine))
            else:
                await self._remove(f"{role}-{now - 1}", resized(supervisor.config, role, now - 1, supervisor.machine))

    async def _add(self, name: str, after: Config) -> None:
        supervisor = self._supervisor
        before = supervisor.config
        supervisor.use(after)  # boot files are written from it
        try:
            await supervisor.start_worker(name)
            await self._introduce(name)
        except PdctlError:
            await supervisor.end_worker(name)
            supervisor.use(before)
            with contextlib.suppress(PdctlError):  # a router that restarted meanwhile has read of it
                await self._tell("DELETE", f"/admin/workers/{name}")
            raise

    async def turn(self, name: str, role: Role) -> None:
        """Raises PdctlError, before anything was changed or with the worker on its way to its new role."""
        supervisor = self._supervisor
        before = supervisor.config
        new_name, after = turned(before, name, role, supervisor.max_prefill)
        plan(after, supervisor.machine)  # what it cannot place is refused while the worker still works
        await self._forget(name)
        supervisor.use(after)
        try:
            await supervisor.turn_worker(name, new_name)
        except Refused:  # it ended while it drained, and comes back as what it was
            supervisor.use(before)
            await self._introduce(name)
            raise
        except (PdctlError, TimeoutError):  # it comes back as what it was to become
            await self._introduce(new_name)
            raise
        await self._introduce(new_name)

    async def _introduce(self, name: str) -> None:
        """Makes a worker known to the router."""
        role, _, _ = name.rpartition("-")
        address = self._supervisor.address(name)
        await self._tell("POST", "/admin/workers", {"name": name, "role": role, "address": address})

    async def _remove(self, name: str, after: Config) -> None:
        await self._forget(name)
        self._supervisor.use(after)  # a router that restarts from here on must not wait for it
        await self._supervisor.end_worker(name)

    async def _forget(self, name: str) -> None:
        """The router lets it end what it has, and knows it no more. Raises PdctlError, and it has work again."""
        if not await self._state_of(name):  # a change that failed came as far as this
            return
        await self._tell("POST", f"/admin/workers/{name}/drain")
        try:
            async with asyncio.timeout(DRAIN_S):
                while not await self._is_drained(name):  # noqa: ASYNC110  # it is another process: one can only ask
                    await asyncio.sleep(0.2)
            await self._tell("DELETE", f"/admin/workers/{name}")
        except (PdctlError, TimeoutError) as error:
            with contextlib.suppress(PdctlError):
                await self._tell("POST", f"/admin/workers/{name}/resume")
            if isinstance(error, TimeoutError):
                raise TimedOut(f"{name} still has work after {DRAIN_S:g} s", help="pdctl status") from None
            raise

    async def _is_drained(self, name: str) -> bool:
        try:
            return await self._state_of(name) in ("drained", "lost")
        except Unreachable:  # it restarts, and knows from the one before who is to be drained
            return False

    async def _state_of(self, name: str) -> str:
        """As the router sees it; empty when it knows no such worker."""
        workers = (await self._tell("GET", "/admin/state"))["workers"]
        return next((str(worker["state"]) for worker in workers if worker["name"] == name), "")

    async def _tell(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        return await asyncio.to_thread(self._router.call, method, path, body)


def parse(text: str) -> tuple[str, int]:
    """'decode=2' -> ("decode", 2). Raises UsageError."""
    role, _, count = text.partition("=")
    if role not in ("prefill", "decode", "colocated") or not count.isdecimal():
        raise UsageError(f"{text}: expected POOL=COUNT, such as decode=2")
    return role, int(count)


def wait(ask: Any, timeout_s: float) -> str:
    """Asks the supervisor until it is through; what went wrong, or nothing. Raises TimedOut."""
    import time

    deadline = time.monotonic() + timeout_s
    while (stack := ask()["stack"])["scaling"]:
        if time.monotonic() > deadline:
            raise TimedOut(f"scaling to {stack['scaling']} takes longer than {timeout_s:g} s", help="pdctl status")
        time.sleep(0.2)
    return str(stack["scale_problem"])
