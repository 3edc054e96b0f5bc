"""OpenTelemetry spans of the stages that a stage record has, for whoever sets OTEL_EXPORTER_OTLP_ENDPOINT.

One `sequence` span from arrival to its last token, under the client's own trace when it sent a `traceparent`; below it
one span a stage. They are made when the sequence is over, from the record: nothing is traced while tokens flow. All
other OTEL_ variables mean what the SDK says. Needs the extra `otel`.
"""

import os
import time
from collections.abc import Iterator
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.router.timing import Record

FLUSH_MS = 2000
_propagator = TraceContextTextMapPropagator()


class Spans:
    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("pdctl.router")

    @classmethod
    def to_collector(cls) -> "Spans":
        """To where the environment says, in batches, from a thread of the SDK's."""
        service = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "pdctl"}
        provider = TracerProvider(resource=Resource.create(service))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def close(self) -> None:
        """What is not sent yet has a moment to go; blocks."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()

    def record(self, record: Record) -> None:
        """The sequence is over."""
        origin = time.time_ns() - int((time.perf_counter() - record.arrival) * 1e9)

        def at(ms: float) -> int:
            return origin + int(ms * 1e6)

        end = (record.last or time.perf_counter()) - record.arrival
        parent = _propagator.extract({"traceparent": record.traceparent}) if record.traceparent else None
        stages = record.as_dict()
        names = {"path", "prefill", "decode", "prompt_tokens", "cached_tokens", "kv_bytes", "chunks", "resends", "cut"}
        attributes = {f"pdctl.{name}": stages[name] for name in names if stages[name] is not None}
        attributes |= {"pdctl.output_tokens": record.output_tokens, "pdctl.reason": record.reason}
        attributes |= {"pdctl.request_id": record.request, "http.route": record.endpoint}
        span = self._tracer.start_span("sequence", parent, start_time=at(0), attributes=attributes)
        below = trace.set_span_in_context(span)
        for name, first, then in _stages(record, stages, end * 1000):
            self._tracer.start_span(name, below, start_time=at(first)).end(at(then))
        span.end(at(end * 1000))


def _stages(record: Record, stages: dict[str, Any], end_ms: float) -> Iterator[tuple[str, float, float]]:
    """(stage, from, to) in ms since arrival, of those that happened."""
    sent = stages["queue_ms"]
    if sent is None:
        return
    p, d = record.prefill_stages, record.decode_stages
    spots = {f"p.{name}": sent + seconds * 1000 for name, seconds in p.items()}
    spots |= {f"d.{name}": sent + seconds * 1000 for name, seconds in d.items()}
    spots |= {"arrival": 0.0, "sent": sent, "end": end_ms}
    spots |= {mark: value for mark in ("first_token", "second_token") if (value := stages[f"{mark}_ms"]) is not None}
    for name, first, then in (
        ("queue", "arrival", "sent"),
        ("prefill_queue", "sent", "p.start"),
        ("grant_wait", "p.grant_asked", "p.granted"),
        ("prefill", "p.start", "p.end"),
        ("transfer", "d.first_chunk", "d.kv_ready"),
        ("decode_queue", "d.ready", "d.start"),
        ("second_token", "first_token", "second_token"),
        ("output", "first_token", "end"),
    ):
        if first in spots and then in spots:
            yield name, spots[first], max(spots[first], spots[then])
