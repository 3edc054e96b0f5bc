"""The supervisor: one process that starts the others, keeps them running and takes them down.

1. take the stack's lock, the router's port and the sockets, before anything loads;
2. resolve the model, a stage of its own in a subprocess;
3. start every worker and the router; each says itself when it is ready, or why it is not;
4. ready: restart what dies, answer on the control socket, record everything in stack.json;
5. stop (Ctrl-C, SIGTERM, `pdctl down`, a failed start): the router drains first, then the workers end, and whatever
   still carries this run's id is killed. Asked a second time, all is killed at once.

`python -P -m pdctl.supervise ORDER` is how `pdctl up` starts it, in its own place (foreground) or apart (-d).
"""

import asyncio
import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from pdctl import control
from pdctl.child import Child, start
from pdctl.client import admin
from pdctl.exits import Exit, Refused, TimedOut, exit_of
from pdctl.launch import Launch, Machine, Plan, check_keys, listen, plan
from pdctl.model import Resolver
from pdctl.process import RUN_ID, STACK_DIR, of_this_process, sweep
from pdctl.recorder import Recorder
from pdctl.restart import RestartPolicy
from pdctl.rundir import ProcessInfo, Stack, StackDir, make_socket_dir
from pdctl.scale import Scaler
from pdctl.slot import Slot
from server.boot import Boot
from server.config import ROLES, Config, Role
from server.errors import PdctlError

Emit = Callable[[dict[str, Any]], None]
WORKER_STOP_S = 5.0
FAILED_STOP_S = 2.0
WRITE_EVERY_S = 0.2
logger = logging.getLogger("pdctl.supervisor")


class Supervisor:
    """`run` is its whole life; the return value is the exit code."""

    def __init__(
        self,
        stack_dir: StackDir,
        config: Config,
        emit: Emit,
        *,
        run_id: str,
        profile_file: str = "",
        start_timeout_s: float = 0,
    ) -> None:
        self._dir = stack_dir
        self._config = config
        self._emit = emit
        self._start_timeout_s = start_timeout_s
        me = of_this_process(run_id)
        self._stack = Stack(
            name=config.name,
            run_id=run_id,
            pid=me.pid,
            create_time=me.create_time,
            started_at=time.time(),
            host=config.router.host,
            profile_file=profile_file,
            profile=config.model_dump(mode="json"),
        )
        self._slots: dict[str, Slot] = {}
        self._children: set[Child] = set()
        self._keepers: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._drain_s = config.supervise.stop_timeout
        self._exit = Exit.OK
        self._write_soon: asyncio.TimerHandle | None = None
        self._scaling: asyncio.Task[None] | None = None
        self.max_prefill = config.prefill.workers
        self.machine = Machine.here()  # before this process binds itself to a part of it

    async def run(self) -> Exit:
        with self._dir.lock() as is_mine:
            if not is_mine:
                raise Refused(f"{self._stack.name} is run by another supervisor", code="E_RUNNING", help="pdctl status")
            try:
                return await self._run_locked()
            except PdctlError as error:
                await self._fail(error)
                raise
            finally:
                self._clean()

    async def _run_locked(self) -> Exit:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGINT, self.ask_stop, Exit.INTERRUPTED, "Ctrl-C")
        loop.add_signal_handler(signal.SIGTERM, self.ask_stop, Exit.OK, "SIGTERM")
        loop.add_signal_handler(signal.SIGHUP, self.ask_stop, Exit.OK, "its terminal closed")
        placed = self._prepare()
        server = await control.serve(self._stack.control, self._answer)
        recorder = Recorder(self._dir)
        recorder.start()
        try:
            await self._bring_up(placed)
            await self._stop.wait()
            was_cut = await self._take_down(self._drain_s)
        finally:
            recorder.stop()
            server.close()
        self._finish("stopped", self._stack.reason)
        return Exit.TERMINATED if was_cut and self._stack.reason == "SIGTERM" else self._exit

    def _prepare(self) -> Plan:
        """Everything that can be refused before a process is started. Raises StartError, ConfigError."""
        placed = plan(self._config, self.machine)
        check_keys(self._config)
        if self._config.secret_file is not None:
            self._dir.use_secret(Path(self._config.secret_file).expanduser())
        if placed.router is not None:
            self._listener = listen(self._config.router.host, self._config.router.port, self._stack.name)
            self._stack.port = self._listener.getsockname()[1]
        self._stack.socket_dir = str(make_socket_dir(self._stack.run_id))
        for warning in placed.warnings:
            self._say("warning", text=warning)
        if placed.helpers:
            os.sched_setaffinity(0, placed.helpers)
        for launch in placed.launches:
            self._add_slot(launch)
        self._write()
        return placed

    def _add_slot(self, launch: Launch) -> None:
        limits = self._config.supervise
        low_s, high_s = limits.backoff_s
        info = ProcessInfo(
            name=launch.name,
            role=launch.role,
            cpus=list(launch.cpus),
            gpus=list(launch.gpus),
            log=str(self._dir.log(launch.name)),
        )
        self._stack.processes.append(info)
        self._slots[launch.name] = Slot(
            launch,
            info,
            RestartPolicy(limits.restart, limits.max_restarts, low_s, high_s),
            spawn=self._spawn,
            changed=self._changed,
            ready_timeout_s=limits.ready_timeout,
            stop_timeout_s=limits.stop_timeout,
        )

    async def _bring_up(self, placed: Plan) -> None:
        """Returns when all are ready or a stop was asked for. Raises what the first failed start said."""
        work = asyncio.create_task(self._start_all(placed))
        stop = asyncio.create_task(self._stop.wait())
        limit = self._start_timeout_s or None
        await asyncio.wait({work, stop}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if work.done():
            work.result()
            self._stack.ready_at = time.time()
            self._settle()
            self._write()
            self._say("ready", url=self._stack.url, state=self._stack.state)
            return
        work.cancel()
        if not self._stop.is_set():
            waiting = [slot.info.name for slot in self._slots.values() if not slot.info.ready_at]
            raise TimedOut(
                f"not ready within {limit:g} s: {', '.join(waiting)}", help=f"pdctl logs -n {self._stack.name}"
            )

    async def _start_all(self, placed: Plan) -> None:
        log, answer = self._dir.rotate_log("model"), self._dir.path / "boot" / "model.folder"
        resolver = Resolver(self._config.model.path, log, answer)
        self._children.add(resolver.start(self._stack.run_id, self._dir.path, placed.helpers))
        self._stack.model_dir = await resolver.folder(self._on_model)
        slots = list(self._slots.values())
        for slot in slots:
            self._keep(slot)
        await asyncio.gather(*(slot.first_ready for slot in slots))

    def _keep(self, slot: Slot) -> None:
        keeper = asyncio.create_task(slot.keep(), name=slot.info.name)
        self._keepers.add(keeper)
        keeper.add_done_callback(self._on_keeper_done)

    def _on_model(self, state: str, stage: str) -> None:
        self._say("process", name="model", state=state, stage=stage, share=float(state == "ready"))

    def _on_keeper_done(self, keeper: "asyncio.Task[None]") -> None:
        """A keeper that breaks is our own mistake: its process would be watched by nobody."""
        self._keepers.discard(keeper)
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            logger.error("keeper of %s failed", keeper.get_name(), exc_info=error)
            slot = self._slots[keeper.get_name()]
            if not slot.first_ready.done():
                slot.first_ready.set_exception(PdctlError(f"{keeper.get_name()} cannot be started: {error}"))

    def _spawn(self, slot: Slot) -> Child:
        """One incarnation of a slot: its boot file, log and status pipe."""
        launch, boot_file = slot.launch, self._dir.boot(slot.launch.name)
        listen_fd = self._listener.fileno() if self._listener and launch.role == "router" else None

        def argv(status_fd: int) -> list[str]:
            slot.boot_file, slot.status_fd = boot_file, status_fd
            self._write_boot(launch.name, boot_file, listen_fd, status_fd)
            return launch.argv(boot_file)

        child = start(
            argv,
            env=launch.env(os.environ, **{RUN_ID: self._stack.run_id, STACK_DIR: str(self._dir.path)}),
            log=self._dir.rotate_log(launch.name),
            cpus=launch.cpus,
            run_id=self._stack.run_id,
            on_status=slot.on_status,
            pass_fds=() if listen_fd is None else (listen_fd,),
        )
        self._children.add(child)
        return child

    def _write_boot(self, name: str, file: Path, listen_fd: int | None, status_fd: int) -> None:
        boot = Boot(
            name=name,
            config=self._config,
            model_dir=self._stack.model_dir,
            state_dir=str(self._dir.path),
            secret_file=str(self._dir.secret_file),
            addresses={worker.name: self.address(worker.name) for worker in self._config.workers},
            listen_fd=listen_fd,
            status_fd=status_fd,
            max_prefill=self.max_prefill,
            run_id=self._stack.run_id,
        )
        file.touch(mode=0o600)
        boot.save(file)

    def _reap(self) -> None:
        for child in list(self._children):
            child.poll()
            if child.exited.done():
                self._children.discard(child)

    def ask_stop(self, code: Exit, reason: str, drain_s: float | None = None) -> None:
        """The first time: stop after a drain. Again: at once."""
        if self._stop.is_set():
            self._say("note", text=f"{reason} again: stopping at once")
            self._force.set()
            return
        self._exit, self._stack.reason = code, reason
        self._drain_s = self._drain_s if drain_s is None else drain_s
        self._stop.set()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request.get("op"):
            case "status":
                return {"ok": True, "stack": msgspec.to_builtins(self._stack)}
            case "down":
                drain_s = request.get("drain_s")
                self.ask_stop(Exit.OK, "pdctl down", None if drain_s is None else float(drain_s))
                if request.get("force"):
                    self._force.set()
                return {"ok": True}
            case "restart":
                slot = self._slots.get(str(request.get("worker")))
                if slot is None:
                    return {"ok": False, "error": f"no process {request.get('worker')!r}", "known": list(self._slots)}
                slot.restart()
                return {"ok": True}
            case "scale":
                role, count = str(request.get("role")), int(request.get("workers", 0))
                return self._begin_change(role, f"{role}={count}", lambda s, role: s.scale(role, count))
            case "role":
                worker, role = str(request.get("worker")), str(request.get("role"))
                return self._begin_change(role, f"{worker} as {role}", lambda s, role: s.turn(worker, role))
        return {"ok": False, "error": f"unknown op {request.get('op')!r}"}

    # -- scaling: `scale.Scaler` says in which order -----------------------------------------------------------------

    @property
    def config(self) -> Config:
        return self._config

    def use(self, config: Config) -> None:
        """From here on: boot files are written from it, and the record says so."""
        self._config = config
        self._stack.profile = config.model_dump(mode="json")
        self._write()

    def address(self, name: str) -> str:
        host = self._config.host_of(name)
        return f"unix:{self._stack.socket_dir}/{name}.sock" if host is None else host.control(name)

    def _begin_change(
        self, role: str, target: str, change: Callable[[Scaler, Role], Coroutine[Any, Any, None]]
    ) -> dict[str, Any]:
        if self._stack.scaling or self._stack.state != "ready":
            busy = f"scaling to {self._stack.scaling}" if self._stack.scaling else self._stack.state
            return {"ok": False, "error": f"the stack is {busy}"}
        if self._config.hosts:
            return {"ok": False, "error": "a stack over several machines keeps the workers of its profile"}
        if role not in ROLES:
            return {"ok": False, "error": f"there is no pool {role!r}"}
        self._stack.scaling, self._stack.scale_problem = target, ""
        work = change(Scaler(self, admin(self._dir, self._stack)), role)
        self._scaling = asyncio.create_task(self._change(target, work), name="scale")
        return {"ok": True}

    async def _change(self, target: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
            self._say("note", text=f"scaled to {target}")
        except (PdctlError, TimeoutError, ValueError) as error:
            self._stack.scale_problem = str(error) or type(error).__name__
            self._say("note", text=f"not scaled to {target}: {self._stack.scale_problem}")
        finally:
            self._stack.scaling = ""
            self._settle()
            self._write()

    async def start_worker(self, name: str) -> None:
        """One that the configuration has and that does not run yet; returns when it is ready. Raises PdctlError."""
        placed = plan(self._config, self.machine)
        for warning in placed.warnings:
            self._say("warning", text=warning)
        self._add_slot(next(launch for launch in placed.workers if launch.name == name))
        slot = self._slots[name]
        self._keep(slot)
        await slot.first_ready

    async def turn_worker(self, name: str, new_name: str) -> None:
        """The running process `name` goes on as `new_name`, which the configuration has; returns when it is ready.
        Raises Refused, having changed nothing; PdctlError and TimeoutError: then it is started anew, as `new_name`."""
        slot = self._slots[name]
        launch = next(launch for launch in plan(self._config, self.machine).workers if launch.name == new_name)
        if not slot.is_running:
            raise Refused(f"{name} does not run", code="E_ROLE", help=f"pdctl restart {name}")
        self._slots[new_name] = self._slots.pop(name)
        for keeper in self._keepers:
            if keeper.get_name() == name:
                keeper.set_name(new_name)
        log = self._dir.rotate_log(new_name)
        self._dir.log(name).rename(log)
        self._write_boot(new_name, slot.boot_file, None, slot.status_fd)
        slot.turn(replace(launch, cpus=slot.launch.cpus, gpus=slot.launch.gpus), log)
        try:
            async with asyncio.timeout(self._config.supervise.ready_timeout):
                await asyncio.shield(slot.first_ready)
        except TimeoutError:
            slot.restart()
            raise

    async def end_worker(self, name: str) -> None:
        """Ends it for good."""
        slot = self._slots.pop(name, None)
        if slot is None:
            return
        slot.stop(signal.SIGTERM)
        if not await self._ended([slot], WORKER_STOP_S):
            slot.stop(signal.SIGKILL)
        self._stack.processes.remove(slot.info)
        self._write()

    async def _take_down(self, drain_s: float) -> bool:
        """Router first, so that what is under way ends; True when that was cut short."""
        if self._scaling is not None:
            self._scaling.cancel()
        self._stack.state = "draining"
        router = self._slots.get("router")
        was_cut = False
        if (
            router is not None
            and self._stack.ready_at
            and router.is_running
            and drain_s > 0
            and not self._force.is_set()
        ):
            self._say("draining", text=f"letting requests finish, at most {drain_s:g} s; Ctrl-C again stops now")
            router.stop(signal.SIGTERM)
            was_cut = not await self._ended([router], drain_s)
        await self._end_all(WORKER_STOP_S)
        return was_cut

    async def _end_all(self, grace_s: float) -> None:
        """SIGTERM, and after `grace_s` or a second request SIGKILL, to every process and its group."""
        slots = list(self._slots.values())
        for slot in slots:
            slot.stop(signal.SIGKILL if self._force.is_set() else signal.SIGTERM)
        await self._ended(slots, grace_s)
        for child in list(self._children):
            child.signal(signal.SIGKILL)
        await asyncio.gather(*(child.wait(2.0) for child in list(self._children)))
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=1.0)
        # Helpers that a worker started may have left its group; they carry the run id all the same.
        sweep(self._stack.run_id, grace_s=0.0, keep=[os.getpid()])

    async def _ended(self, slots: list[Slot], timeout_s: float) -> bool:
        """True when all ended within the time; a second request ends the wait."""
        exits: list[asyncio.Future[Any]] = [slot.child.exited for slot in slots if slot.child and slot.is_running]
        force: asyncio.Future[Any] = asyncio.ensure_future(self._force.wait())
        deadline = time.monotonic() + timeout_s
        while (left := [future for future in exits if not future.done()]) and not force.done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            await asyncio.wait([force, *left], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        force.cancel()
        return all(future.done() for future in exits)

    async def _fail(self, error: PdctlError) -> None:
        self._stack.state = "draining"
        await self._end_all(FAILED_STOP_S)
        self._finish("failed", error.message)
        self._say("failed", code=error.code, message=error.message, help=error.help, exit=int(exit_of(error)))

    def _finish(self, state: str, reason: str) -> None:
        self._stack.state, self._stack.reason = state, reason
        self._write()
        if state == "stopped":
            self._say("stopped", text=reason)

    def _clean(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._stack.socket_dir:
            shutil.rmtree(self._stack.socket_dir, ignore_errors=True)

    def _changed(self, slot: Slot) -> None:
        info = slot.info
        reason = info.exits[-1].reason if info.exits and info.state in ("restarting", "dead") else ""
        self._say("process", name=info.name, state=info.state, stage=info.stage, share=info.share, reason=reason)
        self._settle()
        # Stages may be reported a hundred times a second; states are recorded at once.
        if info.state != "starting":
            self._write()
        elif self._write_soon is None:
            self._write_soon = asyncio.get_running_loop().call_later(WRITE_EVERY_S, self._write)

    def _settle(self) -> None:
        """The stack's state follows from its processes' once it has been ready, until it stops."""
        if self._stack.ready_at and self._stack.state in ("starting", "ready", "degraded"):
            is_whole = all(slot.info.state == "ready" for slot in self._slots.values())
            self._stack.state = "ready" if is_whole else "degraded"

    def _write(self) -> None:
        if self._write_soon is not None:
            self._write_soon.cancel()
            self._write_soon = None
        self._dir.write(self._stack)

    def _say(self, event: str, **fields: Any) -> None:
        logger.info("%s %s", event, " ".join(f"{key}={value}" for key, value in fields.items() if value != ""))
        self._emit({"event": event, "stack": self._stack.name, **fields})
