"""All workers of a router: who there is, who is told what on connecting, who hears of a change.

`add` and `remove` are for `pdctl scale`; prefill workers are told of every decode worker that comes or goes (`Peers`).
"""

import asyncio
from collections.abc import Callable

from server.messages import AnyMessage, Card, Peers
from server.router.worker import Worker
from server.wire import Identity


class Pulse:
    """Wakes whoever waits at the moment, and nobody later."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def beat(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future


class Workers:
    """All of them, by name. `changed` is set, and `num_changes` grows, whenever one connects, goes, ends being busy, or
    is to be free of work."""

    def __init__(
        self, addresses: dict[str, str], roles: dict[str, str], *, me: Identity, secret: bytes, card: Card
    ) -> None:
        self.me = me
        self.changed = asyncio.Event()
        self.num_changes = 0
        self.reported = Pulse()
        self.watch: Callable[[Worker], None] = lambda worker: None  # who wants to know of every change of state
        self.greeting: Callable[[], list[AnyMessage]] = list  # the first messages to a worker
        self._secret = secret
        self._card = card
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._has_started = False
        self.all: dict[str, Worker] = {}
        for name, address in addresses.items():
            if name in roles:
                self.add(name, roles[name], address)

    def add(self, name: str, role: str, address: str) -> Worker:
        """One more; it is connected to from now on, or from `start` on."""
        worker = self.all[name] = Worker(
            name,
            role,
            address,
            me=self.me,
            secret=self._secret,
            card=self._card,
            on_change=self._on_change,
            on_load=lambda _: self.reported.beat(),
            greeting=self._greet,
        )
        if self._has_started:
            self._start(worker)
            self._introduce()
        return worker

    async def remove(self, worker: Worker) -> None:
        """Nobody goes there any more."""
        del self.all[worker.name]
        self._introduce()
        if (task := self._tasks.pop(worker.name, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _greet(self, worker: Worker) -> list[AnyMessage]:
        return [*self.greeting(), *([self._peers()] if worker.role == "prefill" else [])]

    def _peers(self) -> Peers:
        return Peers({worker.name: worker.address for worker in self.with_role("decode")})

    def _introduce(self) -> None:
        for worker in self.with_role("prefill"):
            worker.send(self._peers())

    def drain(self, worker: Worker, is_draining: bool) -> None:
        """No new work for `worker`, or work again. What it has goes on."""
        worker.is_draining = is_draining
        self._on_change(worker)

    def _on_change(self, worker: Worker) -> None:
        self.num_changes += 1
        self.changed.set()
        self.reported.beat()
        self.watch(worker)

    def with_role(self, role: str) -> list[Worker]:
        return [worker for worker in self.all.values() if worker.role == role]

    def start(self) -> None:
        self._has_started = True
        for worker in self.all.values():
            self._start(worker)

    def _start(self, worker: Worker) -> None:
        self._tasks[worker.name] = asyncio.create_task(worker.run(), name=worker.name)

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
