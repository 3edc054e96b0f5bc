"""What a router counts, in Prometheus' terms. One registry an object, so that tests and two stacks never share one.

Per-request figures are observed once, when the request ends; nothing here runs for every token.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 2.5, 5, 10, 30)

Sample = tuple[str, str, dict[str, str], float]  # name, help, labels, value


class RouterMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        reg = self.registry
        self.requests = Counter(
            "pdctl_requests", "Finished HTTP requests for tokens", ["endpoint", "status"], registry=reg
        )
        self.waiting = Gauge("pdctl_requests_waiting", "Requests without a first token yet", registry=reg)
        self.running = Gauge("pdctl_requests_running", "Requests with a first token, not finished", registry=reg)
        self.prompt_tokens = Counter("pdctl_prompt_tokens", "Prompt tokens of finished sequences", registry=reg)
        self.output_tokens = Counter("pdctl_output_tokens", "Output tokens of finished sequences", registry=reg)
        self.cached_tokens = Counter("pdctl_cached_tokens", "Prompt tokens found in a prefix cache", registry=reg)
        self.sequences = Counter("pdctl_sequences", "Finished sequences", ["path", "reason"], registry=reg)
        # Of the same transfers as the transfer stage's seconds: those that ended complete.
        self.kv_bytes = Counter("pdctl_kv_transfer_bytes", "KV bytes handed over", registry=reg)
        self.wire_bytes = Counter("pdctl_kv_transfer_wire_bytes", "Bytes on the wire for them", registry=reg)
        self.chunks = Counter("pdctl_kv_transfer_chunks", "Chunks that brought them", registry=reg)
        self.resends = Counter("pdctl_kv_transfer_resends", "Ranges asked for again", registry=reg)
        self.cuts = Counter("pdctl_cuts", "Sequences that prefill decoded until decode had room", registry=reg)
        self.cut_tokens = Counter("pdctl_cut_tokens", "Output tokens that they had by then", registry=reg)
        self.overlapped_bytes = Counter(
            "pdctl_kv_transfer_overlapped_bytes", "KV bytes verified before the first token was", registry=reg
        )
        self.stages = {
            name: Histogram(f"pdctl_{'kv_' * (name == 'transfer')}{name}_seconds", doc, buckets=buckets, registry=reg)
            for name, doc, buckets in (
                ("ttft", "Request received to first token", _SECONDS),
                ("second_token", "First token to second, the hand-over gap", _TOKEN_SECONDS),
                ("tpot", "(last - first) / (n - 1)", _TOKEN_SECONDS),
                ("e2e", "Request received to last token", _SECONDS),
                ("queue", "Time in the router before dispatch", _SECONDS),
                ("prefill_queue", "Time in the prefill worker's queue", _SECONDS),
                ("prefill", "First chunk's start to the prompt's end, on the worker that reads it", _SECONDS),
                ("grant_wait", "Grant asked to grant held", _SECONDS),
                ("transfer", "First chunk to last block verified", _TOKEN_SECONDS),
                ("kv_transfer_first_chunk", "Prefill began to first chunk verified", _SECONDS),
                ("decode_queue", "KV ready to first decode step", _SECONDS),
            )
        }

    def add_samples(self, samples: Callable[[], Iterable[Sample]]) -> None:
        """Gauges read only when somebody asks, such as the workers' last Load."""
        self.registry.register(_Samples(samples))

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Samples(Collector):
    def __init__(self, samples: Callable[[], Iterable[Sample]]) -> None:
        self._samples = samples

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, doc, labels, value in self._samples():
            family = families.get(name)
            if family is None:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = families[name] = kind(name, doc, labels=list(labels))
            family.add_metric(list(labels.values()), value)
        return families.values()
