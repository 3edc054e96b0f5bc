"""One row for every exit code and command of docs/cli.md; a code or command there without a row here fails."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pdctl.exits import Exit
from tests.process.box import Box, until

DOC = Path(__file__).parents[2] / "docs" / "cli.md"
Row = Callable[[Box], object]
ROWS: dict[tuple[int, str], Row] = {}


def table() -> dict[int, set[str]]:
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| (.+) \|$", DOC.read_text(), re.MULTILINE)
    return {int(code): set(re.findall(r"`([^`]+)`", commands)) for code, commands in rows}


def plain(code: int, *command: str, is_up: bool = False) -> None:
    """A command that gives `code` with nothing, or with a whole stack, running."""
    name = " ".join(command[:2]) if command[0] == "config" else command[0]

    def row(box: Box) -> None:
        if is_up:
            box.up()
        box(*command, expect=code)

    ROWS[code, name] = row


def row(code: int, command: str) -> Callable[[Row], Row]:
    def keep(function: Row) -> Row:
        ROWS[code, command] = function
        return function

    return keep


for _command in ("status", "info", "top"):
    plain(0, *([_command] if _command != "top" else ["top", "--once"]), is_up=True)
    plain(3, *([_command, "box"] if _command != "top" else ["top", "box", "--once"]))
plain(0, "down")
plain(0, "completion", "bash")
plain(2, "up", "no-such-profile")
plain(2, "config", "validate", "no-such-profile")
plain(2, "status", "--no-such-option")
plain(2, "restart")
plain(2, "logs", "decode-7", is_up=True)
plain(2, "top", is_up=True)  # without --once
plain(2, "tui", is_up=True)  # without a terminal
plain(2, "completion", "csh")
plain(3, "chat", "-m", "hello")
plain(3, "env")
plain(3, "restart", "decode-0")
plain(3, "tui", "--read-only")


@row(1, "up")
def up_of_what_crashes(box: Box) -> None:
    box.script(decode_0={"crash": "no such tensor"})
    box.up(expect=Exit.FAILURE)


@row(4, "status")
def status_without_a_supervisor(box: Box) -> None:
    _behead(box)
    box("status", "box", expect=4)


@row(4, "info")
def info_without_a_supervisor(box: Box) -> None:
    _behead(box)
    box("info", "box", expect=4)


@row(4, "restart")
def restart_without_a_supervisor(box: Box) -> None:
    _behead(box)
    box("restart", "-n", "box", "decode-0", expect=4)


def _behead(box: Box) -> None:
    box.up()
    os.kill(box.stack.pid, signal.SIGKILL)
    until(lambda: _is_gone(box.stack.pid))


def _is_gone(pid: int) -> bool:
    try:
        return "zombie" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


@row(5, "up")
def up_on_a_core_that_is_not_there(box: Box) -> None:
    box.up("--set", "decode.cpus=[999]", expect=5)


def _degraded(box: Box) -> None:
    box.up("--set", "supervise.restart=no")
    os.kill(box.pid("decode-0"), signal.SIGKILL)
    until(lambda: box.stack.state == "degraded")


@row(6, "status")
def status_of_a_stack_that_lacks_a_worker(box: Box) -> None:
    _degraded(box)
    box("status", "box", expect=6)


@row(6, "top")
def top_of_a_stack_that_lacks_a_worker(box: Box) -> None:
    _degraded(box)
    box("top", "box", "--once", expect=6)


@row(7, "up")
def up_with_another_profile(box: Box) -> None:
    box.up()
    box.up("--set", "decode.max_running=8", expect=7)


@row(8, "smoke")
def smoke_where_nothing_crosses(box: Box) -> None:
    box.script(router={"kv_bytes": 0})
    box.up()
    box("smoke", expect=8)


@row(124, "up")
def up_that_takes_too_long(box: Box) -> None:
    box.script(decode_0={"wait_for": str(box.file("never"))})
    box.up("--set", "supervise.ready_timeout=0.5s", expect=124)


@row(124, "wait")
def wait_that_takes_too_long(box: Box) -> None:
    box.up()
    box("wait", "--for", "stopped", "--timeout", "0.2s", expect=124)


@row(130, "up")
def ctrl_c_while_it_starts(box: Box) -> None:
    box.script(decode_0={"wait_for": str(box.file("never"))})
    command = box.start("up", str(box.profile), "-d")
    until(lambda: box.dir.read() and box.state("prefill-0") == "ready")
    command.send_signal(signal.SIGINT)
    command.communicate(timeout=30)
    assert command.returncode == 130


@row(143, "run")
def sigterm_that_cuts_the_drain_short(box: Box) -> None:
    box.script(router={"ignore_term": True})
    command = box.start("run", str(box.profile), "--set", "supervise.stop_timeout=0.3s")
    until(lambda: box.dir.read() and box.stack.state == "ready")
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=30)
    assert command.returncode == 143


def test_every_code_is_in_the_table_and_every_row_of_it_here() -> None:
    documented = table()
    assert documented.keys() == {int(code) for code in Exit}
    assert {(code, command) for code, commands in documented.items() for command in commands} == ROWS.keys()


@pytest.mark.parametrize(("code", "command"), ROWS, ids=lambda value: str(value))
def test_row(box: Box, code: int, command: str) -> None:
    ROWS[code, command](box)
