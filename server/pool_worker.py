"""What prefill and decode workers have and colocated ones lack: a transfer thread, and a limit to the prompts that they
read beside streams of their own, so that those keep to `slo.tpot_p95`. A prefill worker has streams while it rests,
while decode is full, and when decode is lost.
"""

import time
from collections.abc import Callable

import msgspec

from server.boot import Boot
from server.engine.build import local_prefill_start
from server.engine.engine import StepResult
from server.engine.local_prefill import LocalPrefill
from server.engine.model_runner import ModelRunner
from server.messages import Load
from server.transfer.thread import TransferThread
from server.worker import E, Worker


class PoolWorker(Worker[E]):
    transfer: TransferThread

    def __init__(
        self, boot: Boot, clock: Callable[[], float] = time.monotonic, runner: ModelRunner | None = None
    ) -> None:
        super().__init__(boot, clock, runner)
        self._local_prefill = LocalPrefill(boot.config.slo.tpot_p95, local_prefill_start(boot.config, self.role))

    def stop_transfer(self) -> None:
        self.transfer.close()

    def turn(self) -> None:
        self._use_local_prefill()

    def stepped(self, result: StepResult) -> None:
        if result.error is None:
            self._local_prefill.observe(result.batch, result.seconds)
        self._use_local_prefill()

    @property
    def _is_auto(self) -> bool:
        return self.config.decode.prefill_tokens == "auto"

    def _use_local_prefill(self) -> None:
        if self._is_auto:
            self.engine.scheduler.limits.local_prefill_tokens = self._local_prefill.tokens

    def load(self, busy_share: float) -> Load:
        load = super().load(busy_share)
        own = {"local_prefill_tokens": float(self.engine.scheduler.limits.local_prefill_tokens or 0)}
        counters = {**load.counters, **self.transfer.counters(), **own}
        return msgspec.structs.replace(load, counters=counters, is_tight=self._is_auto and self._local_prefill.is_tight)
