"""What the views show of one moment: figures in their places, at every size, whatever is missing."""

import itertools
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdctl.snapshot import LogLine, Snapshot
from pdctl.tui import moves
from pdctl.tui.alerts import Watch
from pdctl.tui.model import VIEWS, Model
from pdctl.tui.reading import frame
from pdctl.tui.views import requests, screen
from tests.tui.fake import START, FakeSource, knobs, process, snapshot, stats

GOLDEN = Path(__file__).parent / "golden"
SIZES = [(120, 36), (80, 24)]


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def model_of(moment: Snapshot | None = None, view: str = "overview") -> Model:
    moment = moment or snapshot()
    model = Model(name="llama8b-2p2d", view=view, now=moment.at)
    for earlier in FakeSource().earlier():
        model.history.add(frame(earlier))
    model.frame = frame(moment)
    model.history.add(model.frame)
    model.watch = Watch(hold_s=0)
    model.watch.update(model.frame)
    model.lines = moves.merged_lines(model.frame, [])
    return model


def text_of(model: Model, width: int, height: int) -> str:
    return "\n".join(line.plain.rstrip() for line in screen.draw(model, width, height)) + "\n"


def assert_golden(name: str, text: str) -> None:
    """PDCTL_GOLDEN=1 writes what is drawn now; look at the difference before it is committed."""
    file = GOLDEN / name
    if os.environ.get("PDCTL_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text(), f"{file} differs from what is drawn"


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("view", VIEWS)
def test_snapshot(view: str, width: int, height: int) -> None:
    model = model_of(view=view)
    if view == "tune":
        model.staged = {"prefill.token_budget": 1024}
    if view == "requests":
        model.opened = {**FakeSource().request("chatcmpl-2"), "total_ms": 3300.0}
    assert_golden(f"{view}-{width}x{height}.txt", text_of(model, width, height))


@pytest.mark.parametrize("view", VIEWS)
def test_no_size_tears(view: str) -> None:
    model = model_of(view=view)
    model.opened = FakeSource().request("chatcmpl-2")
    for width, height in itertools.product(
        (1, 7, 20, 40, 59, 60, 79, 80, 109, 110, 119, 200), (1, 2, 3, 5, 14, 15, 24, 60)
    ):
        lines = screen.draw(model, width, height)
        assert len(lines) == height, (width, height)
        assert {line.width for line in lines} == {width}, (width, height)


def test_figures_stand_on_the_screen() -> None:
    shown = text_of(model_of(), 120, 36)
    for figure in (
        "req/s 18.4",
        "212 / 640 ms",
        "6/50",
        "workers 2/2",
        "4/8",
        "38.2k tok/s",
        "7.2 / 19 ms",
        "12.7GB/s",
        "18 / 24 ms",
        "run 48/128",
        "lo 80% ┊  hi 92% ┃",
        "81%",
        "rev 3",
        "in SLO 97%",
    ):
        assert figure in shown, figure


def test_states_are_said_in_words_too() -> None:
    shown = text_of(model_of(), 120, 36)
    assert "▲ kv>lo" in shown
    assert "◌ draining" in shown
    assert "● READY 2/2P 1/2D" in shown


def test_an_alert_names_its_knob() -> None:
    model = model_of()
    assert [(alert.key, alert.knob) for alert in model.watch.open] == [("kv:decode-0", "decode.kv_low")]
    assert "decode.max_running" in model.watch.open[0].text
    assert "▲1 alert" in text_of(model, 120, 36)
    model.watch.acknowledge()
    assert "alert" not in text_of(model, 120, 36).splitlines()[0]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"ttft_ms": {"p50": 500, "p95": 900, "n": 5}}, "ttft"),
        ({"itl_ms": {"p50": 30, "p95": 50, "n": 5}}, "itl"),
        ({"transfer_ms": {"p50": 30, "p95": 51, "n": 5}}, "transfer"),
    ],
)
def test_every_objective_has_its_alert(change: dict[str, Any], key: str) -> None:
    moment = snapshot()
    assert moment.state is not None
    moment = msgspec.structs.replace(moment, state=moment.state | {"stats": stats() | change})
    watch = Watch(hold_s=5)
    watch.update(frame(moment))
    assert watch.open == []
    watch.update(frame(msgspec.structs.replace(moment, at=START + 5)))
    assert key in [alert.key for alert in watch.open]
    watch.update(frame(snapshot(START + 6)))
    assert key not in [alert.key for alert in watch.all]


def test_what_is_not_known_is_a_dash() -> None:
    moment = snapshot()
    bare = Snapshot(moment.at, stack=moment.stack, problem="the router does not answer")
    shown = text_of(model_of(bare), 120, 36)
    assert "- / -" in shown
    assert "req/s -" in shown


def test_by_address_alone_there_are_workers_all_the_same() -> None:
    moment = snapshot()
    model = model_of(Snapshot(moment.at, stack={"name": "http://box:8000"}, state=moment.state, knobs=moment.knobs))
    shown = text_of(model, 120, 36)
    assert "decode-1" in shown
    assert "● READY" in shown


def test_a_colocated_stack_has_no_pools_of_others() -> None:
    moment = snapshot()
    assert moment.stack is not None
    stack = moment.stack | {"processes": [process("colocated-0", "colocated", 7), process("router", "router", 8)]}
    for width, height in SIZES:
        shown = text_of(model_of(msgspec.structs.replace(moment, stack=stack)), width, height)
        assert "colocated" in shown.lower()


def test_starting_shows_bars_with_stages() -> None:
    moment = snapshot()
    assert moment.stack is not None
    processes = [
        process(
            "prefill-0",
            "prefill",
            7,
            state="starting",
            stage="loading weights",
            share=0.5,
            ready_at=0,
            started_at=START - 20,
        ),
        process("router", "router", 8),
    ]
    stack = moment.stack | {"state": "starting", "processes": processes}
    shown = text_of(model_of(Snapshot(START, stack=stack)), 80, 24)
    assert "loading weights  about 00:20 left" in shown
    assert "50%" in shown
    assert "1 of 2 ready" in shown


def test_a_lost_connection_keeps_the_frame_and_says_how_old_it_is() -> None:
    model = model_of()
    model.lost_at, model.now = START, START + 42
    lines = screen.draw(model, 120, 36)
    assert "NO CONNECTION, last 00:42 ago" in lines[0].plain
    assert "18.4" in "".join(line.plain for line in lines)
    assert {role for line in lines[1:-1] for _, role in line.spans} == {"lost"}


def test_foreign_text_cannot_reach_the_terminal() -> None:
    model = model_of(view="logs")
    model.lines = [LogLine("router", START, "info", "\x1b]52;c;x\x07 \x9b31m \u202e tab\there")]
    model.wrap = True
    shown = text_of(model, 120, 36)
    assert not any(ord(char) < 32 and char != "\n" for char in shown)
    assert "\x9b" not in shown
    assert "\u202e" not in shown


def test_the_waterfall_has_each_stage_once_on_one_scale() -> None:
    opened = {**FakeSource().request("x"), "total_ms": 3300.0}
    assert requests.stages({**opened["pdctl"], "total_ms": 3300.0}) == [
        ("router", 0.0, 1.0),
        ("prefill queue", 1.0, 13.0),
        ("grant wait", 11.0, 13.0),
        ("prefill", 13.0, 200.0),
        ("KV transfer", 60.0, 219.0),
        ("first token", 0.0, 212.0),
        ("hand-over", 212.0, 240.0),
        ("decode", 240.0, 3300.0),
    ]
    assert {line.width for line in requests.waterfall(opened, 100)[2:-1]} == {100 - 28 + 24}


def test_a_router_without_knobs_shows_the_profile_to_look_at() -> None:
    moment = snapshot(knobs=None)
    assert moment.stack is not None
    profile = {"router": {"queue_high": 50}, "decode": {"kv_low": 0.8, "kv_high": 0.9}}
    shown = frame(msgspec.structs.replace(moment, stack=moment.stack | {"profile": profile}))
    assert [knob.name for knob in shown.knobs] == ["router.queue_high", "decode.kv_low", "decode.kv_high"]
    assert not any(knob.is_live for knob in shown.knobs)
    assert frame(snapshot(knobs=knobs(decode__kv_low=0.5))).pools["decode"].kv_low == 0.5


def test_a_hundred_workers_leave_room_for_the_rest() -> None:
    moment = snapshot()
    assert moment.stack is not None
    processes = [process(f"decode-{i}", "decode", 100 + i) for i in range(100)]
    model = model_of(msgspec.structs.replace(moment, stack=moment.stack | {"processes": processes}))
    model.selected["workers"] = 77
    shown = text_of(model, 120, 36)
    assert "▸decode-77" in shown
    assert "Log" in shown
    assert "Tune" in shown
