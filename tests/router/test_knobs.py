"""Live knobs over HTTP: who confirms what, every refusal code, undo, reset, the log that outlives a router."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from server.config import AutoRevert, Config
from server.router.audit import AuditLog, DrainRecord
from server.router.knobs import KnobStore, Refusal
from tests.router.conftest import SECRET, Answer, Cluster, Start, until

ADMIN = {"Authorization": f"Bearer {SECRET.decode()}"}


async def patch(cluster: Cluster, values: dict[str, Any], **more: Any) -> Answer:
    return await cluster.request("PATCH", "/admin/knobs", {"values": values, **more}, ADMIN)


async def knobs(cluster: Cluster) -> dict[str, Any]:
    body: dict[str, Any] = (await cluster.request("GET", "/admin/knobs", headers=ADMIN)).json
    return body


async def test_a_change_reaches_router_and_workers(start: Start) -> None:
    cluster = await start(prefill=1, decode=1)
    assert (await knobs(cluster))["rev"] == 1
    answer = await patch(cluster, {"router.queue_high": 80, "decode.kv_low": 0.5}, by="alice", reason="why not")
    assert answer.status == 200
    assert answer.json["rev"] == 2
    assert answer.json["pending"] == []
    assert answer.json["changed"]["router.queue_high"] == {"from": 50, "to": 80}
    assert cluster.stack.dispatcher.queue_high == 80
    for fake in cluster.fakes.values():
        assert fake.knobs.rev == 2
        assert fake.knobs.values["decode.kv_low"] == 0.5
    assert (await knobs(cluster))["knobs"]["decode.kv_low"]["now"] == 0.5
    audit = (await cluster.request("GET", "/admin/audit", headers=ADMIN)).json
    assert [(e["rev"], e["by"], e["reason"]) for e in audit["entries"]] == [(2, "alice", "why not")]
    assert (await cluster.request("GET", "/admin/state", headers=ADMIN)).json["rev"] == 2


async def test_a_worker_that_comes_back_gets_them(start: Start) -> None:
    cluster = await start(prefill=1, decode=1)
    await cluster.decode.stop()
    await until(lambda: not cluster.stack.workers.all["decode-0"].is_connected)
    assert (await patch(cluster, {"decode.queue_low": 1})).json["pending"] == ["decode-0"]
    cluster.decode.restart()
    await cluster.decode.start()
    await until(lambda: cluster.decode.knobs.rev == 2)


async def test_a_silent_worker_is_named(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.router.tuning.CONFIRM_S", 0.05)
    cluster = await start(colocated=2)
    cluster.fakes["colocated-1"].confirms = False
    assert (await patch(cluster, {"router.queue_high": 7})).json["pending"] == ["colocated-1"]


REFUSALS: list[tuple[dict[str, Any], dict[str, Any], int, str]] = [
    ({"router.queue_hihg": 5}, {}, 400, "UNKNOWN_KNOB"),
    ({"router.queue_high": "many"}, {}, 400, "BAD_VALUE"),
    ({"router.queue_high": True}, {}, 400, "BAD_VALUE"),
    ({"router.queue_high": 1.5}, {}, 400, "BAD_VALUE"),
    ({"router.queue_high": "auto"}, {}, 400, "BAD_VALUE"),
    ({"router.queue_high": 0}, {}, 400, "OUT_OF_RANGE"),
    ({"transfer.chunk_tokens": 24}, {}, 400, "OUT_OF_RANGE"),
    ({"decode.max_running": 65}, {}, 400, "OUT_OF_RANGE"),
    ({"router.queue_high": 60}, {"if_rev": 7}, 409, "VERSION_CONFLICT"),
    ({"transfer.backend": "tcp"}, {}, 409, "NEEDS_RESTART"),
    ({"decode.kv_low": 0.95}, {}, 409, "CONFLICTS_WITH"),
    ({"decode.queue_high": 1}, {}, 409, "CONFLICTS_WITH"),
    ({"prefill.chunk_tokens": 128, "prefill.token_budget": 64}, {}, 409, "CONFLICTS_WITH"),
]


@pytest.mark.parametrize(
    ("values", "more", "status", "code"), REFUSALS, ids=[f"{r[3]}-{i}" for i, r in enumerate(REFUSALS)]
)
async def test_refusals(start: Start, values: dict[str, Any], more: dict[str, Any], status: int, code: str) -> None:
    cluster = await start(prefill=1, decode=1)
    answer = await patch(cluster, values, **more)
    assert (answer.status, answer.json["error"]["code"]) == (status, code)
    assert (await knobs(cluster))["rev"] == 1


async def test_read_only_and_key(start: Start) -> None:
    cluster = await start(colocated=1, tune={"read_only": True})
    assert (await patch(cluster, {"router.queue_high": 5})).json["error"]["code"] == "READ_ONLY"
    assert (await cluster.request("PATCH", "/admin/knobs", {"values": {}})).status == 401
    assert (await cluster.request("POST", "/admin/knobs/undo", {}, ADMIN)).status == 403


async def test_governor(start: Start) -> None:
    cluster = await start(colocated=1, tune={"min_interval": "1h", "max_step": 0.5})
    assert (await patch(cluster, {"router.queue_high": 80})).json["error"]["code"] == "RATE_LIMITED"  # over 50 %
    assert (await patch(cluster, {"router.queue_high": 75})).status == 200
    again = await patch(cluster, {"router.queue_high": 70})
    assert (again.status, again.json["error"]["code"]) == (429, "RATE_LIMITED")
    assert 3500 < int(again.headers["retry-after"]) <= 3600
    assert (await patch(cluster, {"router.queue_high": 400}, force=True)).status == 200
    assert (await cluster.request("POST", "/admin/knobs/undo", {}, ADMIN)).json["changed"]["router.queue_high"][
        "to"
    ] == 75


async def test_dry_run(start: Start) -> None:
    cluster = await start(colocated=1)
    answer = await patch(cluster, {"router.queue_high": 5}, dry_run=True)
    assert answer.json["rev"] == 1
    assert answer.json["changed"] == {"router.queue_high": {"from": 50, "to": 5}}
    assert cluster.stack.dispatcher.queue_high == 50


async def test_undo_walks_back_and_reset(start: Start) -> None:
    cluster = await start(colocated=1)
    for value in (60, 70, 80):
        await patch(cluster, {"router.queue_high": value})
    undone = [(await cluster.request("POST", "/admin/knobs/undo", {}, ADMIN)).json for _ in range(2)]
    assert [u["changed"]["router.queue_high"]["to"] for u in undone] == [70, 60]
    assert [u["undoes"] for u in undone] == [4, 3]
    await patch(cluster, {"colocated.chunk_tokens": 64})
    answer = await cluster.request("POST", "/admin/knobs/reset", {"knobs": ["router.queue_high"]}, ADMIN)
    assert answer.json["changed"] == {"router.queue_high": {"from": 60, "to": 50}}
    assert set((await cluster.request("POST", "/admin/knobs/reset", {}, ADMIN)).json["changed"]) == {
        "colocated.chunk_tokens"
    }
    nothing = (await cluster.request("POST", "/admin/knobs/reset", {}, ADMIN)).json
    assert (nothing["changed"], nothing["rev"]) == ({}, 9)


async def test_a_value_that_is_there_is_no_change_unless_it_would_go(start: Start) -> None:
    cluster = await start(colocated=1)
    assert (await patch(cluster, {"router.queue_high": 60})).json["rev"] == 2
    same = (await patch(cluster, {"router.queue_high": 60, "colocated.max_running": 64})).json
    assert (same["rev"], same["changed"]) == (2, {})
    # undo takes back what was changed, not what was repeated
    undone = (await cluster.request("POST", "/admin/knobs/undo", {}, ADMIN)).json
    assert undone["changed"] == {"router.queue_high": {"from": 60, "to": 50}}
    # said again while a timer runs, it is to stay: that is a revision
    await patch(cluster, {"router.queue_high": 70}, revert_after_s=3600)
    kept = (await patch(cluster, {"router.queue_high": 70})).json
    assert kept["rev"] == 5


async def test_revert_timer(start: Start) -> None:
    cluster = await start(colocated=1)
    await patch(cluster, {"router.queue_high": 60}, revert_after_s=0.05)
    await until(lambda: cluster.stack.dispatcher.queue_high == 50)
    entries = (await cluster.request("GET", "/admin/audit", headers=ADMIN)).json["entries"]
    assert [e["op"] for e in entries] == ["set", "revert"]
    await patch(cluster, {"router.queue_high": 60}, revert_after_s=0.2)
    await patch(cluster, {"router.queue_high": 60})  # kept
    await asyncio.sleep(0.3)  # the timer's own time
    assert cluster.stack.dispatcher.queue_high == 60


async def test_what_is_for_a_while_twice_goes_back_to_what_it_was(start: Start) -> None:
    """1. 60 for a while, then 70 for a while: 50 comes back, whichever ends first. 2. 60 was to stay: it does."""
    cluster = await start(colocated=1)
    store = cluster.stack.tuning.store
    await patch(cluster, {"router.queue_high": 60}, revert_after_s=3600)
    rev = (await patch(cluster, {"router.queue_high": 70}, revert_after_s=3600)).json["rev"]
    assert store.revert(rev - 1, "timer", "") is None
    back = store.revert(rev, "timer", "")
    assert back is not None and back.after == {"router.queue_high": 50}
    await patch(cluster, {"router.queue_high": 60})
    rev = (await patch(cluster, {"router.queue_high": 70}, revert_after_s=3600)).json["rev"]
    back = store.revert(rev, "timer", "")
    assert back is not None and back.after == {"router.queue_high": 60}


async def test_what_is_taken_back_must_go_with_what_was_set_since(start: Start) -> None:
    """The low mark comes back to 0.8: a high one of 0.5 may not be there then. Set again to stay, it may."""
    cluster = await start(prefill=1, decode=1)
    await patch(cluster, {"decode.kv_low": 0.3}, revert_after_s=3600)
    refused = await patch(cluster, {"decode.kv_high": 0.5})
    assert (refused.status, refused.json["error"]["code"]) == (409, "CONFLICTS_WITH")
    assert "decode.kv_low is taken back" in refused.json["error"]["message"]
    assert (await patch(cluster, {"decode.kv_high": 0.85})).status == 200
    await patch(cluster, {"decode.kv_low": 0.3})
    assert (await patch(cluster, {"decode.kv_high": 0.5})).status == 200


async def test_a_revert_that_cannot_be_written_down_is_tried_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.router.tuning.RETRY_S", 0.01)
    cluster = await start(colocated=1)
    tuning = cluster.stack.tuning
    append, refusals = tuning._audit.append, [OSError("disk full")] * 2

    def full(entry: Any) -> None:
        if entry.op == "revert" and refusals:
            raise refusals.pop()
        append(entry)

    monkeypatch.setattr(tuning._audit, "append", full)
    await patch(cluster, {"router.queue_high": 60}, revert_after_s=0.05)
    await until(lambda: cluster.stack.dispatcher.queue_high == 50 and not refusals)


async def test_events(start: Start) -> None:
    cluster = await start(colocated=1)
    reader, writer = await cluster.send("GET", "/admin/events", headers=ADMIN)
    await reader.readuntil(b": watching\n\n")
    await patch(cluster, {"router.queue_high": 60}, by="alice")
    async with asyncio.timeout(5):
        event = (await reader.readuntil(b"}\n\n")).decode()
    assert "event: knobs\n" in event
    data = json.loads(event.partition("data: ")[2])
    assert (data["by"], data["after"]) == ("alice", {"router.queue_high": 60})
    assert len(cluster.stack.events._queues) == 1
    writer.close()
    await until(lambda: not cluster.stack.events._queues)  # who has left is not told any more


async def test_a_head_of_events_has_no_body(start: Start) -> None:
    cluster = await start(colocated=1)
    answer = await cluster.request("HEAD", "/admin/events", headers=ADMIN)
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert not cluster.stack.events._queues


async def test_auto_revert(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.router.guard.MIN_REQUESTS", 3)
    cluster = await start(colocated=1, tune={"auto_revert": {"if": "ttft_p95 > 2 * slo.ttft_p95", "within": "1h"}})
    await patch(cluster, {"router.queue_high": 60})
    for _ in range(4):
        await cluster.chat()
    assert cluster.stack.dispatcher.queue_high == 60  # fast enough

    cluster = await start(colocated=1, tune={"auto_revert": {"if": "ttft_p95 > 0.001ms", "within": "1h"}})
    await cluster.chat()
    await patch(cluster, {"router.queue_high": 60})
    for _ in range(3):
        await cluster.chat()
    await until(lambda: cluster.stack.dispatcher.queue_high == 50)
    last = (await cluster.request("GET", "/admin/audit", headers=ADMIN)).json["entries"][-1]
    assert (last["op"], last["by"], last["undoes"]) == ("revert", "tune.auto_revert", 2)
    for _ in range(4):
        await cluster.chat()
    assert cluster.stack.tuning.store.rev == 3  # once


def test_a_condition_that_nobody_can_read_is_refused() -> None:
    AutoRevert.model_validate({"if": "tpot_p50 > 40 ms"})
    for bad in ("ttft_p95 < 1s", "ttft_p95 > 2 * slo.speed", "rm -rf", "ttft_p95 > 3"):
        with pytest.raises(ValueError, match="condition"):
            AutoRevert.model_validate({"if": bad})


def store() -> KnobStore:
    config = Config.model_validate({"prefill": {"workers": 1}, "decode": {"workers": 1}})
    return KnobStore(config, 4096, lambda: 100.0)


def test_replay_gives_the_same_store() -> None:
    one, other = store(), store()
    for value in (60, 70):
        one.commit(one.check({"router.queue_high": value}))
    one.commit(one.undo(None))
    other.replay(one.entries)
    assert (other.rev, other.values) == (one.rev, one.values)
    assert other.values["router.queue_high"] == 60


def test_an_undo_that_no_longer_fits_is_refused() -> None:
    knobs = store()
    knobs.commit(knobs.check({"decode.kv_low": 0.1}))
    knobs.commit(knobs.check({"decode.kv_high": 0.5}))
    with pytest.raises(Refusal, match="must be under"):
        knobs.undo(2)


def test_every_knob_takes_its_boot_value() -> None:
    knobs = store()
    for name, knob in knobs.knobs.items():
        assert knobs.check({name: knob.boot}).after == {}, "not refused, and no news"


def test_the_log_is_read_again_within_a_run_only(tmp_path: Path) -> None:
    knobs, log = store(), AuditLog(tmp_path, "run-1")
    log.append(entry := knobs.check({"router.queue_high": 60}, by="alice"))
    with log.path.open("ab") as file:
        file.write(b'{"run": "run-1", "rev": 3, "a')  # cut short by a crash
    assert AuditLog(tmp_path, "run-1").read() == [entry]
    assert AuditLog(tmp_path, "run-2").read() == []


def test_drained_workers_are_remembered_within_a_run_only(tmp_path: Path) -> None:
    assert DrainRecord(tmp_path, "run-1").read() == []
    DrainRecord(tmp_path, "run-1").write(["decode-1"])
    assert DrainRecord(tmp_path, "run-1").read() == ["decode-1"]
    assert DrainRecord(tmp_path, "run-2").read() == []
