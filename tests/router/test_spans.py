"""OpenTelemetry spans: the stages of the stage record, on the client's trace."""

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from server.errors import StartError
from server.router.stack import _spans
from tests.router.conftest import Start

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_without_the_extra_the_start_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "server.router.spans", raising=False)
    assert _spans() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(StartError, match="OTEL_EXPORTER_OTLP_ENDPOINT is set"):
        _spans()


async def test_one_span_a_stage(start: Start) -> None:
    """1 a pd request with a traceparent, 2 the sequence and its stages are spans of that trace, 3 within each other."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from server.router.spans import Spans

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    cluster = await start(prefill=1, decode=1)
    cluster.stack.dispatcher.watch = Spans(provider).record
    cluster.prefill.stages = {"grant_asked": 0.001, "granted": 0.002, "start": 0.003, "end": 0.004}
    cluster.decode.stages = {"first_chunk": 0.003, "kv_ready": 0.005, "ready": 0.005, "start": 0.006, "transfer": 0.002}

    answer = await cluster.chat({"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"})

    assert answer.status == 200
    spans = {span.name: span for span in exporter.get_finished_spans()}
    whole = spans.pop("sequence")
    assert set(spans) == {
        "queue",
        "prefill_queue",
        "grant_wait",
        "prefill",
        "transfer",
        "decode_queue",
        "second_token",
        "output",
    }
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert f"{whole.parent.span_id:016x}" == PARENT
    assert whole.attributes["pdctl.path"] == "pd"
    assert whole.attributes["pdctl.request_id"] == "mine"
    assert whole.attributes["pdctl.output_tokens"] > 1
    assert all(span.parent.span_id == whole.context.span_id for span in spans.values())
    assert spans["grant_wait"].end_time - spans["grant_wait"].start_time == pytest.approx(1e6, abs=2000)
    assert spans["transfer"].end_time - spans["transfer"].start_time == pytest.approx(2e6, abs=2000)
    assert spans["queue"].start_time == whole.start_time <= spans["output"].start_time


async def test_they_reach_a_collector(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not sent yet is sent when the router ends."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    posts: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posts.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Silent."""

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        cluster = await start(colocated=1)
        assert (await cluster.chat()).status == 200
        await cluster.stack.stop()
        server.shutdown()
    assert {path for path, _ in posts} == {"/v1/traces"}
    assert any(b"sequence" in body and b"decode_queue" not in body for _, body in posts)
