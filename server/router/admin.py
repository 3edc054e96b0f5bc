"""What operators and probes ask: health without a key, state and stage records with the admin key.

/livez     the process answers
/startupz  every route was proven once
/readyz    started, not draining, and at least one route can serve; /health is the same, with an empty body
"""

import os
import time
from importlib import metadata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.metrics import RouterMetrics
from server.router.app import route
from server.router.choice import Chooser
from server.router.dispatch import Dispatcher
from server.router.errors import ApiError, bad_request, no_worker, unavailable
from server.router.gauges import samples
from server.router.http import json_response
from server.router.keys import AdminKeys
from server.router.knobs import KnobStore
from server.router.probe import Prober
from server.router.spec import openapi
from server.router.stats import Stats
from server.router.timing import KEPT, Recent
from server.router.worker import Worker


def version() -> str:
    try:
        return metadata.version("pdctl")
    except metadata.PackageNotFoundError:
        return "0+source"


class Health:
    """Whether the router takes work, and why not."""

    def __init__(self, dispatcher: Dispatcher, prober: Prober) -> None:
        self._dispatcher = dispatcher
        self._prober = prober
        self.is_draining = False

    @property
    def state(self) -> str:
        if self.is_draining:
            return "draining"
        if not self._prober.started.is_set():
            return "starting"
        return "ready" if self._dispatcher.can_serve else "no worker"

    def refusal(self) -> ApiError | None:
        match self.state:
            case "draining":
                return unavailable("the server is shutting down", "draining", 5)
            case "starting":
                return unavailable("the server is starting", "starting", 5)
            case "no worker":
                return no_worker()
        return None

    def turned_away(self) -> ApiError | None:
        """As `refusal`, but that a request may wait for a worker that is coming back."""
        refusal = self.refusal()
        is_coming = refusal is not None and refusal.error_code == "no_worker" and self._dispatcher.is_worth_waiting
        return None if is_coming else refusal


class Admin:
    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        health: Health,
        prober: Prober,
        metrics: RouterMetrics,
        recent: Recent,
        stats: Stats,
        keys: AdminKeys,
        names: list[str],
        store: KnobStore,
    ) -> None:
        self._dispatcher = dispatcher
        self._health = health
        self._prober = prober
        self._metrics = metrics
        self._recent = recent
        self._stats = stats
        self._keys = keys
        self._names = names
        self._store = store
        self._started = time.time()
        metrics.add_samples(lambda: samples(dispatcher))

    def routes(self) -> list[Route]:
        return [
            route("/livez", self.livez),
            route("/startupz", self.startupz),
            route("/readyz", self.readyz),
            route("/health", self.health),
            route("/version", self.version),
            route("/metrics", self.metrics),
            route("/openapi.json", self.spec),
            route("/admin/state", self.state),
            route("/admin/requests", self.requests),
            route("/admin/requests/{name}", self.request),
        ]

    # open

    async def livez(self, _: Request) -> Response:
        return json_response({"status": "alive"})

    async def startupz(self, _: Request) -> Response:
        return _status(self._prober.started.is_set(), self._health.state)

    async def readyz(self, _: Request) -> Response:
        return _status(self._health.state == "ready", self._health.state)

    async def health(self, _: Request) -> Response:
        refusal = self._health.refusal()
        return Response(status_code=200) if refusal is None else Response(status_code=503, headers=refusal.headers)

    async def version(self, _: Request) -> Response:
        return json_response({"version": version()})

    async def metrics(self, _: Request) -> Response:
        self._metrics.waiting.set(self._dispatcher.waiting)
        self._metrics.running.set(self._dispatcher.running)
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def spec(self, _: Request) -> Response:
        return json_response(openapi(version()))

    # with the admin key

    async def state(self, request: Request) -> Response:
        self._keys.admit(request)
        dispatcher = self._dispatcher
        router = {
            "state": self._health.state,
            "instance": dispatcher.workers.me.instance,
            "pid": os.getpid(),
            "up_s": round(time.time() - self._started, 1),
            "waiting": dispatcher.waiting,
            "running": dispatcher.running,
            "queue_high": dispatcher.queue_high,
            "models": self._names,
        }
        routes = {
            route.name: {"proven": dispatcher.is_proven(route), **self._prober.detail.get(route.name, {})}
            for route in dispatcher.routes
        }
        workers = [_worker(worker) for worker in dispatcher.workers.all.values()]
        body = {"version": 1, "rev": self._store.rev, "router": router, "routes": routes, "workers": workers}
        return json_response({**body, "hybrid": _hybrid(dispatcher.chooser), "stats": self._stats.as_dict()})

    async def requests(self, request: Request) -> Response:
        """The newest first, those under way among them. `?limit=100`"""
        self._keys.admit(request)
        limit = request.query_params.get("limit", "100")
        if not limit.isdecimal() or not 0 < int(limit) <= KEPT:
            raise bad_request("limit", f"limit: a number from 1 to {KEPT}")
        return json_response({"version": 1, "requests": self._recent.rows(int(limit))})

    async def request(self, request: Request) -> Response:
        self._keys.admit(request)
        found = self._recent.get(request.path_params["name"])
        if found is None:
            raise ApiError(404, "no such request among the last ones", param="id", code="not_found")
        name, records = found
        sequences = [
            {**record.as_dict(), "output_tokens": record.output_tokens, "reason": record.reason} for record in records
        ]
        body = {"id": name, "request_id": records[0].request, "pdctl": records[0].as_dict(), "sequences": sequences}
        return json_response(body)


def _status(is_good: bool, state: str) -> Response:
    headers = {} if is_good else {"Retry-After": "5"}
    return json_response({"status": state}, 200 if is_good else 503, headers)


def _hybrid(chooser: Chooser) -> dict[str, Any]:
    """What decides between one worker and two, and what was measured for it."""
    is_auto = chooser.threshold is None
    return {
        "threshold_tokens": chooser.crossover.tokens if is_auto else chooser.threshold,
        "is_auto": is_auto,
        "crossover": chooser.crossover.table(),
        "prefill_tokens_per_s": round(chooser.rates.prefill.value, 1),
        "local_tokens_per_s": round(chooser.rates.local.value, 1),
    }


def _worker(worker: Worker) -> dict[str, Any]:
    now = time.monotonic()
    load, heartbeat = worker.load, worker.heartbeat
    return {
        "name": worker.name,
        "role": worker.role,
        "state": worker.shown_state,
        "is_draining": worker.is_draining,
        "reason": worker.reason,
        "instance": worker.instance,
        "pid": worker.pid,
        "address": worker.address,
        "open": len(worker.open),
        "load": None if load is None else msgspec.structs.asdict(load),
        "load_age_s": None if load is None else round(now - worker.load_at, 3),
        "heartbeat": None if heartbeat is None else msgspec.structs.asdict(heartbeat),
        "heartbeat_age_s": None if heartbeat is None else round(now - worker.heartbeat_at, 3),
    }
