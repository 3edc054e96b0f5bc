"""The console on a real stack: what its keys change there, and whether its figures are the router's."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdctl.exits import Refused
from pdctl.rundir import StackDir
from pdctl.tui.frame import Worker
from pdctl.tui.source import StackSource
from tests.stack.harness import PD, Running, complete, eventually, running
from tests.tui.pilot import console


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("stack"), PD, model=tiny_model_dir) as stack:
        yield stack


def source_of(stack: Running, **more: Any) -> StackSource:
    return StackSource(StackDir(stack.folder), **more)


async def test_a_knob_is_really_changed_and_the_log_says_by_whom(stack: Running) -> None:
    async with console(source_of(stack)) as driver:
        # 1. stage and apply with a reason
        await driver.press("t")
        knobs = [knob.name for knob in driver.model.knobs()]
        for _ in range(knobs.index("transfer.chunk_tokens")):
            await driver.press("down")
        await driver.press("enter")
        await driver.dialog()
        await driver.type("32")
        await driver.press("enter")
        await driver.closed()
        await driver.press("A")
        await driver.dialog()
        await driver.type("smaller pushes")
        await driver.press("enter")
        await driver.settled()
        # 2. the router has it, confirmed by the workers, and knows who, when, what and why
        assert stack.admin("/admin/knobs")["knobs"]["transfer.chunk_tokens"]["now"] == 32
        entry = stack.admin("/admin/audit")["entries"][-1]
        assert entry["before"] == {"transfer.chunk_tokens": 64}
        assert entry["after"] == {"transfer.chunk_tokens": 32}
        assert entry["reason"] == "smaller pushes"
        assert "@" in entry["by"]
        assert entry["pending"] == []
        assert time.time() - entry["at"] < 60
        # 3. the screen shows it, and takes it back
        await driver.until(lambda: driver.model.frame.rev == entry["rev"])
        assert "64→32" in driver.text
        await driver.press("u")
        await driver.until(lambda: driver.model.frame.knob("transfer.chunk_tokens").now == 64)
        # 4. the workers use it: a prompt crosses in chunks of this size
        await driver.press("escape")
    assert complete(stack.url, list(range(5, 133)), max_tokens=2)["pdctl"]["chunks"] == 2


def came_back(worker: Worker, pid: int) -> bool:
    return worker.state == "ready" and worker.pid not in (0, pid)


async def test_drain_resume_restart_and_kill(stack: Running) -> None:
    async with console(source_of(stack)) as driver:
        await driver.press("2", "down")
        name = driver.model.worker().name

        async def confirm(key: str) -> None:
            await driver.press(key)
            await driver.dialog()
            await driver.type(name)
            await driver.press("enter")
            await driver.settled()

        def is_draining() -> bool:
            workers = stack.admin("/admin/state")["workers"]
            return bool(next(worker for worker in workers if worker["name"] == name)["is_draining"])

        await confirm("x")
        assert is_draining()
        await driver.until(lambda: driver.model.frame.worker(name).state in ("draining", "drained"))
        await confirm("x")
        assert not is_draining()
        await driver.until(lambda: driver.model.frame.worker(name).state == "ready")
        for key in ("R", "K"):
            pid = driver.model.frame.worker(name).pid
            await confirm(key)
            await driver.until(lambda: came_back(driver.model.frame.worker(name), pid), within_s=60)  # noqa: B023
    assert stack.cli("wait", stack.name, "--timeout", "60s").returncode == 0


async def test_read_only_leaves_the_stack_alone(stack: Running) -> None:
    before = stack.admin("/admin/knobs")["rev"]
    async with console(source_of(stack, is_read_only=True)) as driver:
        await driver.press("t", "enter", "A", "u")
        assert "read-only" in driver.text
    # The router refuses it too: the key of such a console may only look.
    source = source_of(stack, is_read_only=True)
    for change in (
        lambda: source.change({"router.queue_high": 51}, if_rev=before, reason="", revert_after_s=None),
        source.undo,
        lambda: source.drain("decode-0"),
        lambda: source.resume("decode-0"),
    ):
        with pytest.raises(Refused, match="READ_ONLY: this key may look and not change"):
            change()
    for change in (source.restart, source.kill):  # these two are the supervisor's and the kernel's
        with pytest.raises(Refused, match="READ_ONLY"):
            change("decode-0")
    assert stack.admin("/admin/knobs")["rev"] == before


async def test_history_is_there_for_a_new_console(stack: Running) -> None:
    source = source_of(stack)
    eventually(lambda: len(source.earlier()) >= 2, 10, "two samples")
    async with console(source) as driver:
        assert len(driver.model.history.points) >= 3
        assert driver.model.frame.logs


def test_top_prints_once(stack: Running) -> None:
    complete(stack.url, list(range(5, 60)), max_tokens=8)
    done = stack.cli("top", stack.name, "--once", "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert value["version"] == 1
    assert value["pools"]["decode"]["kv_high"] == 0.92
    assert value["stats"]["ttft_ms"]["n"] >= 1
    shown = stack.cli("top", stack.name, "--once").stdout
    assert "KV TRANSFER" in shown
    assert "decode-0" in shown
