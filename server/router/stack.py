"""The router's parts, put together once: what `__main__` runs, and tests too.

starting   workers connect, probes go through every route
ready      `started` is set
draining   `drain`: new work is refused, what runs may end
stopped    `stop`: connections closed
"""

import asyncio
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from server.boot import Boot, Status
from server.card import text_facts
from server.messages import Card
from server.metrics import RouterMetrics
from server.router.admin import Admin, Health
from server.router.app import Api, build
from server.router.dispatch import Dispatcher
from server.router.generate import Generator
from server.router.http import Gate, allow_origins
from server.router.keys import Keys, Quota
from server.router.probe import Prober
from server.router.text import Text
from server.router.timing import Recent
from server.router.workers import Workers
from server.wire import Identity

PROBE_TEXT = "The quick brown fox jumps over the lazy dog. " * 4


@dataclass
class Stack:
    app: ASGIApp
    workers: Workers
    dispatcher: Dispatcher
    prober: Prober
    health: Health
    text: Text
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
        dispatcher = Dispatcher(workers, config)
        prober = Prober(dispatcher, text.tokenizer.encode(PROBE_TEXT).ids, status.stage)
        health = Health(dispatcher, prober)
        metrics, recent = RouterMetrics(), Recent()
        names = config.served_names
        api = Api(
            text,
            Generator(text, dispatcher, metrics, recent, config.router.request_timeout),
            names,
            config.router.keepalive_s,
        )
        admin = Admin(
            dispatcher=dispatcher,
            health=health,
            prober=prober,
            metrics=metrics,
            recent=recent,
            keys=Keys.read(config.router.admin_key_file) if config.router.admin_key_file else Keys([secret]),
            names=names,
        )
        app = build([*api.routes(), *admin.routes()])
        keys, quota = Keys.read(config.router.api_key_file), Quota(config.router.key_max_requests)
        gate = allow_origins(Gate(app, keys, quota, health.refusal), config.router.cors_origins)
        return cls(gate, workers, dispatcher, prober, health, text)

    def start(self) -> None:
        self.workers.start()
        self._probing = asyncio.create_task(self.prober.run(), name="prober")

    async def stop(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        await self.workers.stop()
