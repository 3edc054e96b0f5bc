"""Ready means: one token went through every (P, D) pair and every colocated worker.

1. `Prober.run` waits for workers to change, then sends a tiny sequence through each connected route that is not proven.
2. A probe that fails or takes too long is tried again after a pause; a route through a busy worker waits for it.
3. The first time all routes are proven the router has started; later, a route through a restarted worker carries
   nothing until its own probe came back.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from server.router.dispatch import Dispatcher, Route
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
        self.started = asyncio.Event()

    async def run(self) -> None:
        changed = self._dispatcher.workers.changed
        while True:
            changed.clear()
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
            for route in self._dispatcher.routes
            if route.is_connected
            and not self._dispatcher.is_proven(route)
            and not route.worker.is_busy
            and not (route.prefill and route.prefill.is_busy)
        ]

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
                route, self._prompt, params, record, deadline_s=PROBE_TIMEOUT_S
            ) as attempt:
                while await attempt.next() is not None:
                    pass
        except ApiError as error:
            logger.warning("probe through %s failed", route.name, extra={"fields": {"reason": error.message}})
            return
        if record.output_tokens == 0:
            logger.warning("probe through %s brought no token", route.name)
            return
        self._dispatcher.prove(route, instances)
        self.detail[route.name] = {
            "first_token_ms": round((record.first - began) * 1000, 3),
            "total_ms": round((record.last - began) * 1000, 3),
        }
        done = sum(self._dispatcher.is_proven(other) for other in self._dispatcher.routes)
        self._on_progress(f"probed {route.name}", done / len(self._dispatcher.routes))
