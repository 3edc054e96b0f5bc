"""What every worker process is; run as a program, a colocated worker.

1. Boot: read the boot file, take the control socket. Nothing listens on it yet, so early callers are refused at once.
2. Load: weights, KV pool, start-up check, warm-up, each reported on the status pipe. A failure is one line there.
3. Serve: the control loop takes messages, the engine thread steps, results come back to the control loop.
4. Stop (SIGTERM): the running step ends, connections close, exit 0. The router has drained by then.

Roles add message handlers and say what a finished step means for them (`prefill`, `decode`); nothing else differs.
"""

import argparse
import asyncio
import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Generic, TypeVar, cast

import msgspec

from server.boot import Boot, Status
from server.config import Role
from server.engine.build import build_engine, engine_of, limits_for, model_facts, worker_spec
from server.engine.engine import Engine, StepResult
from server.engine.loop import EngineThread
from server.engine.memory import memory_table
from server.engine.model_runner import ModelRunner
from server.engine.scheduler import Step
from server.errors import HandshakeRefused, PdctlError, PeerLost, ProtocolError
from server.knobs import turned
from server.ledger import Entry, Ledger
from server.logs import setup
from server.messages import (
    Abort,
    AbortAck,
    AnyMessage,
    Card,
    Decode,
    Done,
    Heartbeat,
    Load,
    NotResident,
    Pause,
    Prefill,
    Resume,
    SeqToken,
    SetKnobs,
    Tokens,
)
from server.report import all_blocks, changed_blocks, load_of
from server.sequence import SeqId, Sequence
from server.transfer.base import Offer
from server.utilisation import Utilisation
from server.wire import Channel, Identity, bind, serve, welcome

HEARTBEAT_S = 1.0
SILENCE_S = 10.0
LOAD_S = 0.2
LATE_S = 0.5
TURN = signal.SIGUSR2  # become what the boot file says now. SIGHUP is UCX's own, which takes it away
# Engine, transfer and control loop share one interpreter, and hand it over at each wait for the device. With Python's
# own 5 ms a chunk's dozen short waits took longer than its bytes (two H200s: 4 GB/s, against 9.5 at 0.3 ms).
SWITCH_S = 0.0002

logger = logging.getLogger(__name__)
E = TypeVar("E", bound=Entry)


class Worker(Generic[E]):
    """Control loop and engine thread of one process. Subclasses set `role` and extend `handlers`."""

    role: ClassVar[Role] = "colocated"

    def __init__(
        self, boot: Boot, clock: Callable[[], float] = time.monotonic, runner: ModelRunner | None = None
    ) -> None:
        """`runner`: the loaded model of the role before this one."""
        self.boot = boot
        self._runner = runner
        self.clock = clock
        self.me = Identity.new(boot.name, self.role)
        self.status = Status(boot.status_fd)
        self.secret = boot.read_secret()
        self.ledger: Ledger[E] = Ledger()
        self.channels: set[Channel] = set()
        self.counters: dict[str, float] = {"unexpected": 0, "failed": 0}
        self.engine: Engine
        self.loop: asyncio.AbstractEventLoop
        self.thread: EngineThread
        self._share = 0.0
        self._utilisation = -1.0
        self.config = boot.config  # with the knobs as they are now
        self.rev = 0
        self.offer: Offer = {}  # what a subclass's transfer says of itself
        self._tasks: set[asyncio.Task[None]] = set()
        self.building: set[SeqId] = set()  # known, but not taken up before their grammars are built
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    # -- life ----------------------------------------------------------------------------------------------------

    async def run(self) -> ModelRunner | None:
        """Serves until SIGTERM or SIGINT; or until TURN, and gives its model to the role that the boot file names then.
        Raises PdctlError when it cannot start."""
        self.loop = asyncio.get_running_loop()
        stop, turn = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, stop.set)

        def on_turn() -> None:
            turn.set()
            stop.set()

        self.loop.add_signal_handler(TURN, on_turn)
        address = self.boot.addresses[self.boot.name]
        sock = bind(address)
        self.engine = (
            await self._load_or_stop(stop) if self._runner is None else engine_of(self.boot, self.role, self._runner)
        )
        if stop.is_set():
            return None
        self.facts = model_facts(self.boot, self.engine.runner)
        memory = memory_table(self.boot.config, self.role, self.engine.runner)
        logger.info("memory of a %s worker: %s", self.role, memory)
        self.start_transfer()
        self.thread = EngineThread(self.engine, self._stepped)
        self.thread.start()
        server = await serve(sock, self._serve)
        for task in (self._beat(), self._tick_forever()):
            self.spawn(task)
        self.start_links()
        gc.collect()
        gc.freeze()  # what the load left stays: looking through it stops every thread for 0.1 s and more
        detail = {"address": address, "instance": self.me.instance, "memory": memory.as_dict(), **self.facts}
        self.status.ready(detail)
        await stop.wait()
        server.close()
        self.thread.stop()
        await self._close_channels()
        self.stop_transfer()
        _unlink(sock, address)
        return self.engine.runner if turn.is_set() else None

    async def _load_or_stop(self, stop: asyncio.Event) -> Engine:
        """Loads off the loop, so that a stop during a long load is heard; the process then leaves without waiting."""
        loading = self.loop.run_in_executor(None, build_engine, self.boot, self.role, self.status.stage)
        stopped = self.loop.create_task(stop.wait())
        stopped.add_done_callback(lambda _: None if loading.done() else os._exit(0))  # a load cannot be interrupted
        try:
            return await loading
        finally:
            stopped.cancel()

    def start_transfer(self) -> None:
        """Starts the transfer thread, for roles that have one."""

    def stop_transfer(self) -> None: ...

    def start_links(self) -> None:
        """Starts connections to other workers, for roles that make them."""

    def spawn(self, work: Any) -> None:
        """Runs a coroutine for as long as the worker lives; what it raises is logged, never lost."""
        task: asyncio.Task[None] = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task ended", exc_info=error)

    async def _close_channels(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*(channel.close() for channel in list(self.channels)), return_exceptions=True)

    # -- connections ---------------------------------------------------------------------------------------------

    def card(self) -> Card:
        """What peers must agree on, and what this one offers."""
        return Card(same=self.facts, offer={"pid": os.getpid(), **self.offer})

    async def _serve(self, channel: Channel) -> None:
        """One accepted connection, from Hello to its end."""
        try:
            await welcome(channel, self.me, self.secret, self.card())
        except (HandshakeRefused, PeerLost, ProtocolError, TimeoutError) as error:
            logger.warning("connection refused: %s", error)
            return
        await self.converse(channel)

    async def converse(self, channel: Channel) -> None:
        """Takes messages until the connection ends. A bad message ends the connection, nothing else."""
        self.channels.add(channel)
        self.joined(channel)
        try:
            while True:
                self._handle(channel, await channel.recv(SILENCE_S))
        except (PeerLost, ProtocolError) as error:
            logger.info("%s left: %s", channel.peer.name, error)
        except TimeoutError:
            logger.warning("%s said nothing for %g s", channel.peer.name, SILENCE_S)
        finally:
            channel.abort()
            self.channels.discard(channel)
            self.lost(channel)

    def _handle(self, channel: Channel, message: AnyMessage) -> None:
        if isinstance(message, Prefill | Decode) and not self._is_built(message.params.grammar):
            self.spawn(self._handle_built(channel, message))
        else:
            self._handle_now(channel, message)

    def _is_built(self, grammar: str) -> bool:
        return not grammar or self.engine.runner.grammars.is_built(grammar)

    async def _handle_built(self, channel: Channel, message: Prefill | Decode) -> None:
        """Takes up a sequence once its grammar is built, which may take longer than a step should: off the engine's
        thread, one at a time, while the sequences of others go on."""
        self.building.add(message.id)
        try:
            build = self.engine.runner.grammars.prepare
            await self.loop.run_in_executor(self._builder, build, message.params.grammar)
        finally:
            self.building.discard(message.id)
        if channel in self.channels:
            self._handle_now(channel, message)

    def _handle_now(self, channel: Channel, message: AnyMessage) -> None:
        handler = self.handlers().get(type(message))
        if handler is None:
            self.counters["unexpected"] += 1
            return
        try:
            handler(channel, message)
        except Exception:
            # A message that trips a handler must not take the connection's other sequences with it.
            logger.exception("handling %s from %s", type(message).__name__, channel.peer.name)
            self.counters["failed"] += 1

    def handlers(self) -> dict[type, Callable[[Channel, Any], None]]:
        return {
            Prefill: self.on_prefill,
            Abort: self.on_abort,
            Pause: self.on_pause,
            Resume: self.on_resume,
            SetKnobs: self.on_knobs,
            AbortAck: _ignore,
            Heartbeat: _ignore,
        }

    def joined(self, channel: Channel) -> None:
        """A peer passed the handshake. A router learns which prefixes are cached here."""
        if channel.peer.role == "router" and (blocks := all_blocks(self.engine)) is not None:
            channel.send(blocks)

    def lost(self, channel: Channel) -> None:
        """A closed connection cancels what it owns."""
        for entry in self.ledger:
            if entry.owner is channel:
                self.drop(entry, "router connection lost")

    # -- messages ------------------------------------------------------------------------------------------------

    def on_prefill(self, channel: Channel, message: Prefill) -> None:
        """The whole sequence here."""
        if self._is_known(channel, message.id):
            return
        if message.num_resident and not self._is_resident(message):
            channel.send(NotResident(message.id))
            return
        seq = self.sequence_of(message)
        seq.output = list(message.output)
        entry = cast("E", self.new_entry(seq, channel))
        self.ledger.add(entry)
        self.admit(entry)

    def _is_known(self, channel: Channel, id: SeqId) -> bool:
        """An id begins once. Whoever asks again for one that has ended is told so: if it waits, it would for ever."""
        if not self.ledger.knew(id):
            return False
        if self.ledger.get(id) is None:
            channel.send(Done(id, "error", message=f"it has ended on {self.me.name}"))
        return True

    def sequence_of(self, message: Prefill | Decode) -> Sequence:
        """As the router tells it, from now on."""
        return Sequence(message.id, message.prompt, message.params, arrival=self.clock(), salt=message.salt)

    def _is_resident(self, message: Prefill) -> bool:
        pool = self.engine.scheduler.pool
        with self.engine.lock:
            return len(pool.match(message.prompt[:-1], message.salt)) * pool.block_size >= message.num_resident

    def new_entry(self, seq: Sequence, owner: Channel) -> Entry:
        return Entry(seq, owner, heard=self.clock())

    def admit(self, entry: E) -> None:
        """Gives a sequence to the scheduler; one that can never fit is refused to its owner."""
        try:
            with self.engine.lock:
                self.engine.scheduler.add(entry.seq)
                has_ended = bool(entry.seq.finish_reason)
        except PdctlError as error:
            self.fail(entry, error.message)
        else:
            if has_ended:  # begun elsewhere, its last token among those known: only its end was not told
                self.finish(entry)
        self.wake()

    def on_abort(self, channel: Channel, message: Abort) -> None:
        entry = self.ledger.get(message.id)
        if entry is None:
            self.ledger.bury(message.id, self.clock())
        else:
            self.drop(entry, message.reason)
        channel.send(AbortAck(message.id))

    def on_pause(self, channel: Channel, message: Pause) -> None:
        with self.engine.lock:
            self.engine.scheduler.pause(message.id)

    def on_resume(self, channel: Channel, message: Resume) -> None:
        with self.engine.lock:
            self.engine.scheduler.resume(message.id)
        self.wake()

    def on_knobs(self, channel: Channel, message: SetKnobs) -> None:
        """The router's word, whatever came before: after its restart the revision may be an older one."""
        self.config = turned(self.boot.config, message.values)
        limits = limits_for(self.config, self.role, self.engine.runner.max_len)
        with self.engine.lock:
            self.engine.scheduler.limits.become(limits)
        self.rev = message.rev
        self.turn()
        self.wake()
        channel.send(self.load(self._share))

    def turn(self) -> None:
        """`config` has changed: what a role has outside the scheduler follows."""

    def drop(self, entry: E, reason: str) -> None:
        """Nobody wants the sequence: out of the schedule, its blocks free as soon as nothing uses them."""
        with self.engine.lock:
            entry.is_dropped = True
            self.engine.scheduler.abort(entry.id)
        self.ledger.bury(entry.id, self.clock())
        self.wake()

    def fail(self, entry: E, message: str, reason: str = "error") -> None:
        """The sequence cannot go on here, and its owner is told why."""
        self.counters["failed"] += 1
        entry.owner.send(Done(entry.id, reason, entry.seq.num_cached, entry.stages, message))
        self.drop(entry, message)

    def soon(self, work: Callable[..., Any], *args: Any) -> None:
        """From any thread: `work(*args)` on the control loop. After the loop has closed there is nobody to tell."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(work, *args)

    # -- engine thread -------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to compute."""
        self.thread.wake()

    def _stepped(self, result: StepResult) -> None:
        self.stepped(result)
        self.soon(self._deliver, result)

    def stepped(self, result: StepResult) -> None:
        """On the engine thread, right after a step: what must not wait for the control loop."""

    # -- results, back on the control loop -----------------------------------------------------------------------

    def _deliver(self, result: StepResult) -> None:
        """One Tokens message a router, whatever the number of sequences; then what ended."""
        items: dict[Channel, list[SeqToken]] = {}
        for step in result.steps:
            entry = self._entry(step.seq)
            if entry is None:
                continue
            entry.mark("start", result.started)
            if step.token is not None:
                item = SeqToken(step.seq.id, step.index, step.token, step.seq.num_cached)
                items.setdefault(entry.owner, []).append(item)
        for channel, tokens in items.items():
            channel.send(Tokens(tuple(tokens)))
        for step in result.steps:
            entry = self._entry(step.seq)
            if entry is not None:
                self.advanced(entry, step)
        for seq in result.failed:
            entry = self._entry(seq)
            if entry is not None:
                self.fail(entry, f"the engine failed on it: {result.error}")
        for seq, why in result.stuck:
            entry = self._entry(seq)
            if entry is not None:
                self.fail(entry, why, "refused")
        if any(step.finished for step in result.steps):
            self._publish()  # the next turn of a conversation comes soon after the last token of this one
        self.after_step()

    def _entry(self, seq: Sequence) -> E | None:
        """Of exactly this sequence: one that was begun again has another with the same id."""
        entry = self.ledger.get(seq.id)
        return entry if entry is not None and entry.seq is seq else None

    def advanced(self, entry: E, step: Step) -> None:
        """One sequence took part in a step."""
        if step.index == 0 and step.token is not None:
            entry.mark("end", self.clock())
        if step.finished:
            self.finish(entry)

    def finish(self, entry: E) -> None:
        seq = entry.seq
        entry.owner.send(Done(seq.id, seq.finish_reason, seq.num_cached, entry.stages))
        self.ledger.bury(seq.id, self.clock())

    def after_step(self) -> None:
        """Blocks may be free now."""

    def _publish(self) -> None:
        """Tells routers which prefixes came and went since the last time."""
        if (blocks := changed_blocks(self.engine)) is not None:
            self._tell_routers(blocks)

    def _tell_routers(self, message: AnyMessage) -> None:
        for channel in self.channels:
            if channel.peer.role == "router":
                channel.send(message)

    # -- timers --------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            engine = self.engine
            beat = Heartbeat(engine.num_steps, engine.step_age_s, engine.predicted_step_s)
            for channel in self.channels:
                channel.send(beat)
            await asyncio.sleep(HEARTBEAT_S)

    async def _tick_forever(self) -> None:
        busy_before, then = self.thread.busy_s, self.clock()
        device = Utilisation(bool(self.boot.config.pool(self.role).gpus))
        while True:
            await asyncio.sleep(LOAD_S)
            now, busy = self.clock(), self.thread.busy_s
            share = max(0.0, busy - busy_before) / max(1e-6, now - then)
            late = now - then - LOAD_S
            busy_before, then = busy, now
            try:
                if late > LATE_S:
                    self.overslept(late)
                self.ledger.prune(now)
                self.tick(now)
                self._share = min(1.0, share)
                self._utilisation = device.sample()
                load = self.load(self._share)
            except Exception:
                logger.exception("tick")
                continue
            self._tell_routers(load)
            self._publish()

    def overslept(self, seconds: float) -> None:
        """This loop has not run for so long: what others sent in time may not be read yet."""

    def tick(self, now: float) -> None:
        """Leases and other things that end by themselves."""

    def load(self, busy_share: float) -> Load:
        """Subclasses add what only they have."""
        return msgspec.structs.replace(
            load_of(self.engine, looks_closer=not len(self.ledger)),
            busy_share=busy_share,
            counters=dict(self.counters),
            rev=self.rev,
            utilisation=self._utilisation,
        )


def _ignore(channel: Channel, message: AnyMessage) -> None:
    """The connection's liveness is all that these say."""


def _unlink(sock: socket.socket, address: str) -> None:
    sock.close()
    if address.startswith("unix:"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(address.removeprefix("unix:"))


def _class_of(role: Role) -> type[Worker[Any]]:
    """Looked up by name: this module is below those of the roles."""
    if role == "colocated":
        return Worker
    found: type[Worker[Any]] = getattr(importlib.import_module(f"server.{role}"), f"{role.capitalize()}Worker")
    return found


def main(worker: type[Worker[Any]]) -> int:
    """Entry point of every role: `python -P -m server.<role> --boot FILE`."""
    parser = argparse.ArgumentParser(prog=f"server.{worker.role}")
    parser.add_argument("--boot", required=True, help="boot file written by the supervisor")
    file = parser.parse_args().boot
    boot = Boot.load(file)
    setup(boot.name)
    sys.setswitchinterval(SWITCH_S)
    try:
        runner = asyncio.run(worker(boot).run())
        while runner is not None:
            boot = Boot.load(file)
            setup(boot.name)
            logger.info("%s is %s from here on", worker.role, boot.name)
            worker = _class_of(worker_spec(boot).role)
            runner = asyncio.run(worker(boot, runner=runner).run())
    except PdctlError as error:
        Status(boot.status_fd).error(error.message, error.help)
        return 1
    except Exception as error:
        logger.exception("start failed")
        Status(boot.status_fd).error(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Worker))
