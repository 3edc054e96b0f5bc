"""What is wrong now, in words that name the knob to turn."""

import msgspec

from pdctl.tui import numbers
from pdctl.tui.frame import Frame, Worker

HOLD_S = 5.0


class Alert(msgspec.Struct, frozen=True):
    """`key` tells whether it is still the same one; `knob` is where Tune opens."""

    key: str
    text: str
    knob: str = ""
    level: str = "warn"


def find(frame: Frame) -> list[Alert]:
    """Every condition that holds at this moment; `Watch` decides which have held long enough to be told."""
    found = [alert for worker in frame.workers for alert in _worker(frame, worker)]
    router = frame.router
    if router.queue_high and router.queue >= 0.8 * router.queue_high:
        text = f"router queue {router.queue} of {router.queue_high:g}: clients soon get 429. Raise router.queue_high, "
        found.append(Alert("queue", text + "or hybrid.threshold_tokens to spare prefill", "router.queue_high"))
    found += _latencies(frame)
    return found


def _latencies(frame: Frame) -> list[Alert]:
    found = []
    ttft, itl, moved = frame.figures("ttft").p95, frame.figures("itl").p95, frame.figures("transfer").p95
    if ttft is not None and ttft > frame.slo_ttft_ms:
        text = f"TTFT p95 {numbers.span(ttft)} over its objective {numbers.span(frame.slo_ttft_ms)}. "
        text += "Try prefill.token_budget"
        found.append(Alert("ttft", text, "prefill.token_budget"))
    if itl is not None and itl > frame.slo_tpot_ms:
        text = f"ITL p95 {numbers.span(itl)} over its objective {numbers.span(frame.slo_tpot_ms)}. "
        text += "Try lower decode.max_running"
        found.append(Alert("itl", text, "decode.max_running"))
    if moved is not None and moved > frame.latency_warn_ms:
        text = f"KV transfer p95 {numbers.span(moved)} over {numbers.span(frame.latency_warn_ms)}. "
        text += "Try transfer.chunk_tokens"
        found.append(Alert("transfer", text, "transfer.chunk_tokens"))
    return found


def _worker(frame: Frame, worker: Worker) -> list[Alert]:
    if worker.state not in ("ready", "draining", "drained", "starting", "waiting"):
        why = f": {worker.reason}" if worker.reason else ""
        return [Alert(f"state:{worker.name}", f"{worker.name} is {worker.state}{why}. R restarts it", "", "bad")]
    pool = frame.pools.get(worker.role)
    if pool is None or worker.kv is None:
        return []
    share = numbers.share(worker.kv)
    if pool.kv_high is not None and worker.kv >= pool.kv_high:
        text = f"{worker.name} KV {share} over kv_high {numbers.share(pool.kv_high)}: no new grants. "
        return [
            Alert(
                f"kv:{worker.name}", text + "Lower decode.max_running or prefill.token_budget", "decode.kv_high", "bad"
            )
        ]
    if pool.kv_low is not None and worker.kv >= pool.kv_low:
        text = f"{worker.name} KV {share} over kv_low {numbers.share(pool.kv_low)}. "
        return [
            Alert(f"kv:{worker.name}", text + "Try lower decode.max_running or prefill.token_budget", "decode.kv_low")
        ]
    return []


class Watch:
    """Tells of a condition once it has held for a while, and until it is gone; an acknowledged one is only counted."""

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._since: dict[str, float] = {}
        self._acked: set[str] = set()
        self.all: list[Alert] = []

    def update(self, frame: Frame) -> list[Alert]:
        """The alerts that are new with this frame."""
        found = find(frame)
        self._since = {alert.key: self._since.get(alert.key, frame.at) for alert in found}
        self._acked &= self._since.keys()
        before = {alert.key for alert in self.all}
        self.all = [alert for alert in found if frame.at - self._since[alert.key] >= self._hold_s]
        return [alert for alert in self.all if alert.key not in before]

    @property
    def open(self) -> list[Alert]:
        return [alert for alert in self.all if alert.key not in self._acked]

    def since(self, alert: Alert) -> float:
        return self._since.get(alert.key, 0.0)

    def acknowledge(self) -> int:
        count = len(self.open)
        self._acked |= {alert.key for alert in self.all}
        return count
