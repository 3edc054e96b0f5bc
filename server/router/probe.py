"""Ready means: one token went through every (P, D) pair and every colocated worker.

1. `Prober.run` waits for workers to change, then sends a tiny sequence through each connected route that is not proven.
2. A probe that fails or takes too long is tried again after a pause; a route through a busy worker waits for it.
3. A worker that refuses the handshake before the start is over ends it: another secret or model does not heal.
4. The first time all routes are proven the router has started; later, a route through a restarted worker carries
   nothing until its own probe came back. A prefill worker that comes while no decode worker is there is probed alone.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from server.errors import StartError
from server.router.attempt import Plan, Route
from server.router.dispatch import Dispatcher
from server.router.errors import ApiError
from server.router.timing import Record
from server.sequence import SamplingParams

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 60.0
RETRY_S = 0.5


class Prober:
    def __init__(self, dispatcher: Dispatcher, prompt: list[int], on_progress: Callable[[str, float], None]) -> None:
        self._dispatcher = dispatcher
        self._prompt = prompt
        self._on_progress = on_progress
        self.detail: dict[str, dict[str, Any]] = {}
        self._stage = ""
        self.started = asyncio.Event()
        self.failed: asyncio.Future[StartError] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        changed = self._dispatcher.workers.changed
        while True:
            changed.clear()
            self._look_at_workers()
            await asyncio.gather(*(self._probe(route) for route in self._due()))
            self._note_started()
            try:
                async with asyncio.timeout(RETRY_S if self._due() else None):
                    await changed.wait()
            except TimeoutError:
                pass

    def _due(self) -> list[Route]:
        return [
            route
            for route in (*self._dispatcher.routes, *(self._dispatcher.stand_ins() if self.started.is_set() else ()))
            if route.is_connected
            and not self._dispatcher.is_proven(route)
            and not route.worker.is_busy
            and not (route.prefill and route.prefill.is_busy)
        ]

    def _look_at_workers(self) -> None:
        if self.started.is_set():
            return
        workers = self._dispatcher.workers.all.values()
        connected = [worker for worker in workers if worker.is_connected]
        busy = next((f": {w.name} is {w.heartbeat.busy}" for w in connected if w.heartbeat and w.is_busy), "")
        self._report(f"{len(connected)} of {len(workers)} workers connected{busy}")
        refused = next((worker for worker in workers if worker.state == "refused"), None)
        if refused is not None and not self.failed.done():
            self.failed.set_result(StartError(f"{refused.name} refuses the router: {refused.reason}"))

    def _report(self, stage: str) -> None:
        workers, routes = self._dispatcher.workers.all.values(), self._dispatcher.routes
        done = sum(worker.is_connected for worker in workers) + sum(map(self._dispatcher.is_proven, routes))
        if stage != self._stage:  # each retry of a connection passes here
            self._stage = stage
            self._on_progress(stage, round(done / (len(workers) + len(routes)), 3))

    def _note_started(self) -> None:
        routes = self._dispatcher.routes
        if not self.started.is_set() and all(self._dispatcher.is_proven(route) for route in routes):
            self.started.set()

    async def _probe(self, route: Route) -> None:
        record = Record()
        instances = route.instances
        params = SamplingParams(max_tokens=2, temperature=0.0, min_tokens=2)
        began = time.perf_counter()
        try:
            async with self._dispatcher.open(
                Plan(route, len(self._prompt)), self._prompt, params, record, deadline_s=PROBE_TIMEOUT_S
            ) as attempt:
                while await attempt.more():
                    attempt.next()
        except ApiError as error:
            logger.warning("probe through %s failed", route.name, extra={"fields": {"reason": error.message}})
            return
        if record.output_tokens == 0 or record.path != route.path:
            # A decode worker that no KV reaches computes every prompt itself: right answers, and no disaggregation.
            logger.warning("the probe through %s did not take that path: no KV crossed", route.name)
            return
        self._dispatcher.prove(route, instances)
        self.detail[route.name] = {
            "first_token_ms": round((record.first - began) * 1000, 3),
            "total_ms": round((record.last - began) * 1000, 3),
        }
        self._report(f"probed {route.name}")
