"""A change of knobs from the request to the workers and back: one at a time, confirmed before it is reported done.

1. The store checks it (`KnobStore`), with nothing else under way.
2. The router's own users of knobs take the new values; connected workers get SetKnobs and confirm by a Load with the
   revision. A worker that does not in time, or is not connected, is named as pending: it gets the knobs on its return.
3. The revision goes into the audit log, then into the store, then to those who watch.
4. With `revert_after_s` it is taken back by itself unless somebody has set the knob again; `guard` takes it back when
   requests are slower since than `tune.auto_revert` allows.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from server.config import AutoRevert, Slo
from server.knobs import Value
from server.messages import SetKnobs
from server.router.audit import AuditLog
from server.router.errors import ApiError
from server.router.events import Events
from server.router.guard import Guard
from server.router.knobs import Entry, KnobStore
from server.router.workers import Workers

logger = logging.getLogger(__name__)

RETRY_S = 5.0  # of a revert that could not be written down
CONFIRM_S = 3.0


class Tuning:
    def __init__(
        self,
        store: KnobStore,
        workers: Workers,
        audit: AuditLog,
        events: Events,
        use: Callable[[Mapping[str, Value]], None],
        rule: AutoRevert | None = None,
        slo: Slo | None = None,
    ) -> None:
        self.store = store
        self._workers = workers
        self._audit = audit
        self._events = events
        self._use = use
        self.guard = Guard(rule, slo or Slo(), lambda rev, why: self._take_back(rev, "tune.auto_revert", why))
        self._one = asyncio.Lock()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        store.replay(audit.read())
        use(store.values)
        self._told = SetKnobs(store.rev, dict(store.values))  # what every worker is to have
        workers.greeting = lambda: [self._told]
        for entry in store.entries:
            self._set_timer(entry)

    async def change(self, make: Callable[[], Entry | None], *, is_dry: bool = False) -> Entry | None:
        """Makes what `make` gives the newest revision. Raises Refusal, from `make`. A dry one only checks."""
        async with self._one:
            entry = make()
            if is_dry or entry is None or not entry.after:
                return entry
            pending = await self._send(entry.rev, {**self.store.values, **entry.after})
            entry = msgspec.structs.replace(entry, pending=pending)
            try:
                self._audit.append(entry)
            except OSError as error:
                await self._send(self.store.rev, self.store.values)
                raise ApiError(500, f"the audit log cannot be written: {error}", code="AUDIT_FAILED") from error
            self.store.commit(entry)
        self._set_timer(entry)
        if entry.op == "set":
            self.guard.begin(entry.rev)
        else:
            self.guard.end()
        self._events.say("knobs", **msgspec.to_builtins(entry))
        fields = {"rev": entry.rev, "by": entry.by, **entry.after}
        logger.info("knobs: %s", entry.op, extra={"fields": fields})
        return entry

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()

    async def _send(self, rev: int, values: Mapping[str, Value]) -> tuple[str, ...]:
        """The names of workers that have not confirmed."""
        self._use(values)
        self._told = SetKnobs(rev, dict(values))
        asked = [worker for worker in self._workers.all.values() if worker.is_connected]
        for worker in asked:
            worker.send(self._told)
        try:
            async with asyncio.timeout(CONFIRM_S):
                while any(worker.is_connected and worker.rev != rev for worker in asked):
                    await self._workers.reported.wait()
        except TimeoutError:
            logger.warning("revision %d is not confirmed by every worker yet", rev)
        return tuple(worker.name for worker in self._workers.all.values() if worker.rev != rev)

    def _set_timer(self, entry: Entry) -> None:
        if entry.revert_at and not self.store.is_superseded(entry):
            delay = max(0.0, entry.revert_at - time.time())
            loop = asyncio.get_running_loop()
            self._timers[entry.rev] = loop.call_later(delay, self._revert, entry.rev)

    def _revert(self, rev: int) -> None:
        self._timers.pop(rev, None)
        self._take_back(rev, "timer", f"revision {rev} was to be kept by setting it again, and was not")

    def _take_back(self, rev: int, by: str, reason: str) -> None:
        task = asyncio.ensure_future(self._go_back(rev, by, reason))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _go_back(self, rev: int, by: str, reason: str) -> None:
        try:
            await self.change(lambda: self.store.revert(rev, by, reason))
        except ApiError as error:  # the disk is full: what was to be for a while does not stay for that
            logger.error("revision %d is not taken back yet: %s", rev, error.message)
            self._timers[rev] = asyncio.get_running_loop().call_later(RETRY_S, self._take_back, rev, by, reason)
