"""Stage records, state and metrics."""

import re
from pathlib import Path

import msgspec
import pytest

from server.messages import LinkState
from tests.router.conftest import SECRET, Cluster, Start, until
from tests.router.test_errors import check_error

# fmt: off
KEYS = [
    "path", "prefill", "decode", "prompt_tokens", "cached_tokens", "queue_ms", "prefill_queue_ms",
    "grant_wait_ms", "prefill_start_ms", "first_chunk_ms", "prefill_end_ms", "first_token_ms", "kv_ready_ms",
    "second_token_ms", "transfer_ms", "kv_bytes", "wire_bytes", "chunks", "resends", "overlap",
    "decode_queue_ms", "ahead_ms", "cut",
]
# fmt: on
ADMIN = {"Authorization": f"Bearer {SECRET.decode()}"}


async def pd(start: Start) -> Cluster:
    cluster = await start(prefill=1, decode=1)
    cluster.prefill.stages = {"grant_asked": 0.001, "granted": 0.003, "start": 0.004, "end": 0.010}
    cluster.decode.stages = {
        "first_chunk": 0.006,
        "kv_ready": 0.012,
        "ready": 0.013,
        "start": 0.015,
        "transfer": 0.006,
        "kv_bytes": 4096.0,
        "wire_bytes": 2048.0,
        "chunks": 4.0,
        "resends": 1.0,
        "overlap": 0.75,
    }
    return cluster


@pytest.mark.parametrize("how", ["whole", "stream", "stream with usage"])
async def test_stage_record(start: Start, how: str) -> None:
    cluster = await pd(start)
    extra = {"stream": True} if how != "whole" else {}
    if how == "stream with usage":
        extra["stream_options"] = {"include_usage": True}  # type: ignore[assignment]
    answer = await cluster.chat(headers={"x-pdctl-timing": "1", "X-Request-Id": "r1"}, **extra)
    bodies = [answer.json] if how == "whole" else answer.events
    record = bodies[-1]["pdctl"]
    assert not any("pdctl" in body for body in bodies[:-1])
    assert list(record) == KEYS
    assert (record["path"], record["prefill"], record["decode"]) == ("pd", "prefill-0", "decode-0")
    assert record["grant_wait_ms"] == 2.0
    assert record["prefill_queue_ms"] == 4.0
    assert record["decode_queue_ms"] == 2.0
    assert record["transfer_ms"] == 6.0
    assert record["prefill_end_ms"] - record["prefill_start_ms"] == pytest.approx(6.0, abs=0.01)
    assert record["kv_ready_ms"] - record["first_chunk_ms"] == pytest.approx(6.0, abs=0.01)
    assert (record["kv_bytes"], record["wire_bytes"], record["chunks"], record["resends"]) == (4096, 2048, 4, 1)
    assert record["overlap"] == 0.75
    assert 0 < record["queue_ms"] <= record["first_token_ms"] <= record["second_token_ms"]

    for name in (bodies[0]["id"], "r1"):
        kept = await cluster.request("GET", f"/admin/requests/{name}", headers=ADMIN)
        assert kept.json["pdctl"] == record
        assert kept.json["sequences"][0]["reason"] == "stop"


async def test_no_record_unless_asked(start: Start) -> None:
    cluster = await start(colocated=1)
    assert "pdctl" not in (await cluster.chat()).json


async def test_admin_key(start: Start, tmp_path: Path) -> None:
    cluster = await start(colocated=1)
    for path in ("/admin/state", "/admin/requests/x"):
        check_error(await cluster.request("GET", path), 401)
    check_error(await cluster.request("GET", "/admin/requests/x", headers=ADMIN), 404)
    (tmp_path / "admin").write_text("boss\n")
    cluster = await start(colocated=1, router={"admin_key_file": str(tmp_path / "admin")})
    check_error(await cluster.request("GET", "/admin/state", headers=ADMIN), 401)
    assert (await cluster.request("GET", "/admin/state", headers={"Authorization": "Bearer boss"})).status == 200


async def test_state(start: Start) -> None:
    cluster = await start(prefill=1, decode=1)
    state = (await cluster.request("GET", "/admin/state", headers=ADMIN)).json
    assert state["version"] == 1
    assert state["router"]["state"] == "ready"
    assert state["routes"]["prefill-0>decode-0"]["proven"] is True
    worker = state["workers"][0]
    assert (worker["name"], worker["role"], worker["state"]) == ("prefill-0", "prefill", "connected")
    assert worker["instance"] == cluster.prefill.instance
    assert worker["pid"] == 4242
    assert worker["load"]["blocks_total"] == 100
    assert worker["load_age_s"] >= 0


async def test_metrics(start: Start) -> None:
    cluster = await start(prefill=1, decode=1, wait=False, fakes_up=False)
    load = cluster.decode.load
    cluster.decode.load = msgspec.structs.replace(load, swapped=2, host_blocks_used=7, swapped_out_bytes=4096)
    for fake in cluster.fakes.values():
        await fake.start()
    await cluster.stack.prober.started.wait()
    await cluster.chat()
    text = (await cluster.request("GET", "/metrics")).body.decode()
    assert 'pdctl_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0' in text
    assert "# HELP pdctl_ttft_seconds " in text
    assert "pdctl_ttft_seconds_count 1.0" in text
    assert 'pdctl_worker_blocks_total{role="decode",worker="decode-0"} 100.0' in text
    for name, value in {"swapped": 2, "host_blocks_used": 7, "swapped_out_bytes_total": 4096}.items():
        assert f'pdctl_worker_{name}{{role="decode",worker="decode-0"}} {value}.0' in text
    assert "# TYPE pdctl_worker_swapped_out_bytes_total counter" in text
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line and not line.startswith("#")}
    assert all(name.startswith("pdctl_") for name in names)


async def test_metrics_of_transfers(start: Start) -> None:
    """Bytes, seconds and counts of the same transfers; what went wrong, from the workers' own counters."""
    cluster = await pd(start)
    names = ("checksum_failures", "lost", "lease_expired", "quarantined_slots", "recomputed", "encode_s", "decode_s")
    cluster.decode.load = msgspec.structs.replace(cluster.decode.load, counters=dict.fromkeys(names, 3.0))
    link = LinkState("tcp over sockets to d:1", "both ends have it", "zstd", 10, 0.5)
    cluster.prefill.load = msgspec.structs.replace(
        cluster.prefill.load, counters={"lease_expired": 1.0, "regranted": 2.0}, links={"decode-0": link}
    )
    for fake in (cluster.prefill, cluster.decode):
        for channel in fake._channels:
            channel.send(fake.load)
    workers = cluster.stack.workers.all
    await until(lambda: all(w.load is not None and w.load.counters for w in workers.values()))
    await cluster.chat()
    text = (await cluster.request("GET", "/metrics")).body.decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    values = {key: float(value) for key, _, value in lines}
    transfer = {key.removeprefix("pdctl_kv_transfer_"): v for key, v in values.items() if "pdctl_kv_transfer_" in key}
    wanted = {
        "bytes_total": 4096,
        "wire_bytes_total": 2048,
        "chunks_total": 4,
        "resends_total": 1,
        "overlapped_bytes_total": 3072,
        "seconds_sum": 0.006,
        "seconds_count": 1,
        "first_chunk_seconds_count": 1,
        'checksum_failures_total{worker="decode-0"}': 3,
        'lease_expired_total{worker="decode-0"}': 3,
        'lease_expired_total{worker="prefill-0"}': 1,
        'regranted_total{worker="prefill-0"}': 2,
        'quarantined_slots{worker="decode-0"}': 3,
    }
    assert {key: transfer.get(key) for key in wanted} == wanted
    assert values["pdctl_grant_wait_seconds_count"] == 1
    labels = 'codec="zstd",decode="decode-0",prefill="prefill-0",transport="tcp over sockets to d:1"'
    assert values[f"pdctl_kv_link_bytes_total{{{labels}}}"] / values[f"pdctl_kv_link_seconds_total{{{labels}}}"] == 20


async def test_version_and_spec(start: Start) -> None:
    cluster = await start(colocated=1)
    assert (await cluster.request("GET", "/version")).json["version"]
    spec = (await cluster.request("GET", "/openapi.json")).json
    assert "/v1/chat/completions" in spec["paths"]


async def test_every_metric_says_what_it_is_and_the_dashboard_asks_for_no_other(start: Start) -> None:
    cluster = await start(prefill=1, decode=1)
    await cluster.chat()
    text = (await cluster.request("GET", "/metrics")).body.decode()
    named = dict(line.split(" ", 3)[2:] for line in text.splitlines() if line.startswith("# HELP "))
    assert all(len(help) > 5 for help in named.values())
    assert 'pdctl_pool_blocks_free{pool="decode"} 90.0' in text
    for stage in ("ttft", "second_token", "queue", "prefill", "grant_wait", "kv_transfer", "decode_queue"):
        assert f"pdctl_{stage}_seconds" in named
    board = (Path(__file__).parents[2] / "docs/grafana-dashboard.json").read_text()
    asked = set(re.findall(r"pdctl_[a-z_]+", board))
    there = {line.split("{")[0].split(" ")[0] for line in text.splitlines()}
    assert asked <= there, asked - there
