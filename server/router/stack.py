"""The router's parts, put together once: what `__main__` runs, and tests too.

starting   workers connect, probes go through every route
ready      `started` is set
draining   `drain`: new work is refused, what runs may end
stopped    `stop`: connections closed
"""

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from server.boot import Boot, Status
from server.card import text_facts
from server.errors import StartError
from server.messages import Card
from server.metrics import RouterMetrics
from server.router.admin import Admin, Health
from server.router.app import Api, App
from server.router.audit import AuditLog, DrainRecord
from server.router.control import Control
from server.router.dispatch import Dispatcher
from server.router.events import Events
from server.router.generate import Generator
from server.router.http import Gate, allow_origins
from server.router.keys import AdminKeys, Keys, Quota
from server.router.knobs import KnobStore
from server.router.probe import Prober
from server.router.stats import Stats
from server.router.text import Text
from server.router.timing import Recent, Record
from server.router.tuning import Tuning
from server.router.workers import Workers
from server.wire import Identity

if TYPE_CHECKING:
    from server.router.spans import Spans

PROBE_TEXT = "The quick brown fox jumps over the lazy dog. " * 4


@dataclass
class Stack:
    app: ASGIApp
    workers: Workers
    dispatcher: Dispatcher
    prober: Prober
    health: Health
    text: Text
    events: Events
    tuning: Tuning
    spans: "Spans | None"
    _probing: asyncio.Task[None] | None = field(default=None, init=False)

    @classmethod
    def create(cls, boot: Boot, status: Status, text: Text | None = None) -> "Stack":
        """Needs a running loop. Raises StartError."""
        config = boot.config
        status.stage("loading the tokenizer", 0.0)
        text = text or Text(boot.model_dir, config.model.max_len)  # given: a test's, loaded once
        secret = boot.read_secret()
        card = Card(text_facts(boot.model_dir, config.model.path))
        roles = {spec.name: spec.role for spec in config.workers}
        workers = Workers(boot.addresses, dict(roles), me=Identity.new(boot.name, "router"), secret=secret, card=card)
        dispatcher = Dispatcher(workers, config, text.max_len)
        events = Events()
        workers.watch = lambda worker: events.say(
            "worker",
            worker=worker.name,
            state=worker.shown_state,
            reason=worker.reason,
            is_draining=worker.is_draining,
        )
        dispatcher.on_threshold = lambda tokens: events.say("threshold", tokens=tokens)
        store = KnobStore(config, text.max_len, time.time)
        tuning = Tuning(
            store,
            workers,
            AuditLog(boot.state_dir, boot.run_id),
            events,
            dispatcher.use_knobs,
            config.tune.auto_revert,
            config.slo,
        )
        spans = _spans()

        def watch(record: Record) -> None:
            tuning.guard.observe(record)
            if spans is not None:
                spans.record(record)

        dispatcher.watch = watch
        prober = Prober(dispatcher, text.tokenizer.encode(PROBE_TEXT).ids, status.stage)
        health = Health(dispatcher, prober)
        metrics, recent = RouterMetrics(), Recent()
        stats = Stats((config.slo.ttft_p95, config.slo.tpot_p95))
        names = config.served_names
        api = Api(
            text,
            Generator(text, dispatcher, metrics, recent, stats, config.router.request_timeout),
            names,
            config.router.keepalive_s,
        )
        admin_keys = AdminKeys(
            Keys.read(config.router.admin_key_file) if config.router.admin_key_file else Keys([secret]),
            Keys.read(config.router.view_key_file),
        )
        admin = Admin(
            dispatcher=dispatcher,
            health=health,
            prober=prober,
            metrics=metrics,
            recent=recent,
            stats=stats,
            keys=admin_keys,
            names=names,
            store=store,
        )
        control = Control(tuning, dispatcher, DrainRecord(boot.state_dir, boot.run_id), events, admin_keys)
        app = App([*api.routes(), *admin.routes(), *control.routes()])
        keys, quota = Keys.read(config.router.api_key_file), Quota(config.router.key_max_requests)
        gate = allow_origins(Gate(app, keys, quota, health.turned_away), config.router.cors_origins)
        return cls(gate, workers, dispatcher, prober, health, text, events, tuning, spans)

    def start(self) -> None:
        self.workers.start()
        self._probing = asyncio.create_task(self.prober.run(), name="prober")

    async def stop(self) -> None:
        self.events.close()
        self.tuning.close()
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        await self.workers.stop()
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)


def _spans() -> "Spans | None":
    """If the environment names a collector. Raises StartError when it does and the extra is missing."""
    if not any(os.environ.get(f"OTEL_EXPORTER_OTLP_{which}ENDPOINT") for which in ("", "TRACES_")):
        return None
    try:
        from server.router.spans import Spans
    except ImportError as error:
        message = f"OTEL_EXPORTER_OTLP_ENDPOINT is set, and OpenTelemetry is not installed: {error}"
        raise StartError(message, help="pip install 'pdctl[otel]', or unset it") from error
    return Spans.to_collector()
