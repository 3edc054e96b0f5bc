"""One row for every exit code and command of docs/cli.md; a code or command there without a row here fails.

Most rows are a command line against one of three boxes: nothing runs, a whole stack runs, its supervisor was killed.
"""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer

from pdctl import doctor
from pdctl.cli.app import _load_commands, app
from pdctl.doctor import Finding
from pdctl.exits import Exit, TimedOut
from tests.cli.test_profile_edit import edited
from tests.process.box import Box, until

DOC = Path(__file__).parents[2] / "docs" / "cli.md"
UP = ("up", "box.toml", "-d")
LINES: dict[str, list[tuple[int, tuple[str, ...]]]] = {
    "nothing": [
        *((3, (command,)) for command in ("chat", "env", "get", "history", "info", "logs", "reset", "smoke", "status")),
        *((3, (command,)) for command in ("tui", "undo", "wait")),
        *((3, (command, "decode-0")) for command in ("drain", "restart", "resume")),
        (3, ("role", "decode-0", "prefill")),
        (3, ("scale", "decode=2")),
        (3, ("set", "router.queue_high=9")),
        (3, ("top", "--once")),
        (0, ("down",)),
        (0, ("ls",)),
        (0, ("completion", "bash")),
        (0, ("config", "schema")),
        (0, ("config", "show", "demo")),
        (0, ("config", "validate", "demo")),
        (0, ("profile", "ls")),
        (0, ("profile", "show", "demo")),
        (0, ("profile", "new", "mine")),
        (2, ("profile", "new", "other", "--set", "name.a=1")),
        (2, ("config", "schema", "-o", "/no/such/folder/schema.json")),
        (2, ("down", "--drain", "soon")),
        (2, ("wait", "--timeout", "0")),
        (0, ("plan", "--prompt", "2000", "--output", "99", "--rate", "1", "--prefill-tok-s", "9000",
             "--decode-tok-s", "900", "--requests", "20")),
    ],
    "whole": [
        *((0, (command,)) for command in ("env", "get", "history", "info", "logs", "reset", "smoke", "status", "undo")),
        (0, ("chat", "-m", "hello")),
        (0, ("drain", "decode-0")),
        (0, ("resume", "decode-0")),
        (0, ("scale", "decode=1")),
        (0, ("set", "router.queue_high=9")),
        (0, ("top", "--once")),
        (0, UP),
        (0, ("wait",)),
        (1, (*UP[:2], "--dry-run", "--exit-code", "--set", "decode.max_running=8")),
        (7, (*UP, "--set", "decode.max_running=8")),
        (7, ("drain", "decode-7")),
        *((7, ("drain", name)) for name in ("dëcode-0", "a b", "", "../knobs", "decode-0?x")),
        (7, ("scale", "decode=99999999999999999999")),
        (7, ("reset", "no.such")),
        (7, ("resume", "decode-7")),
        (7, ("role", "decode-0", "prefill")),
        (7, ("scale", "prefill=2")),
        (7, ("set", "router.queue_high=0")),
        (7, ("undo", "99")),
        (124, ("drain", "decode-0", "--wait", "--timeout", "0.1s")),
        (124, ("wait", "--for", "stopped", "--timeout", "0.1s")),
    ],
    "headless": [
        *((4, (command,)) for command in ("env", "get", "history", "info", "reset", "smoke", "status", "undo", "wait")),
        *((4, (command, "decode-0")) for command in ("drain", "restart", "resume")),
        (4, ("chat", "-m", "hello")),
        (4, ("role", "decode-0", "prefill")),
        (4, ("scale", "decode=2")),
        (4, ("set", "router.queue_high=9")),
        (4, ("top", "--once")),
        (4, UP),
    ],
}  # fmt: skip
ROWS: dict[tuple[int, str], Callable[[Box], Any]] = {}


def name_of(line: tuple[str, ...]) -> str:
    return " ".join(line[: 2 if line[0] in ("config", "profile") else 1])


def row(code: int, *commands: str) -> Callable[[Any], Any]:
    """`function(box)`, or `function(box, command)` where it stands for several."""

    def keep(function: Any) -> Any:
        for command in commands:
            ROWS[code, command] = function if len(commands) == 1 else lambda box, c=command: function(box, c)
        return function

    return keep


def commands() -> dict[str, set[str]]:
    """Every command of the command line, with its options."""
    _load_commands()
    found: dict[str, set[str]] = {}

    def walk(group: Any, prefix: str) -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                walk(command, f"{name} ")
            else:
                found[prefix + name] = {option for parameter in command.params for option in parameter.opts}

    walk(typer.main.get_command(app), "")
    return found


def documented() -> dict[int, set[str]]:
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| (.+) \|$", DOC.read_text(), re.MULTILINE)
    return {
        int(code): set(commands()) if cell == "every command" else set(re.findall(r"`([^`]+)`", cell))
        for code, cell in rows
    }


# -- rows that need more than a command line --------------------------------------------------------------------------


@contextlib.contextmanager
def open_console(box: Box) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A console that shows something, and the other end of its terminal."""
    box.up()
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (36, 120))
    argv = [sys.executable, "-P", "-m", "pdctl", "tui", "--read-only"]
    env = box.env | {"TERM": "xterm-256color"}
    console = subprocess.Popen(argv, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        seen = b""
        while b"Quit" not in seen:
            seen += os.read(ours, 65536)
        yield console, ours
    finally:
        console.kill()
        console.wait()


@row(0, "tui")
def a_console_that_is_left(box: Box) -> None:
    with open_console(box) as (console, terminal):
        os.write(terminal, b"q")
        with contextlib.suppress(OSError):  # what it still writes must go somewhere, or it waits; then its end is gone
            while os.read(terminal, 65536):
                pass
        assert console.wait(20) == 0
        os.close(terminal)
    assert box.stack.state == "ready"


def test_a_console_ends_with_its_terminal(box: Box) -> None:
    """Nobody could press q, and reading from a terminal that is gone would keep a core busy."""
    with open_console(box) as (console, terminal):
        os.close(terminal)
        assert console.wait(20) == -signal.SIGHUP


@row(0, "profile edit")
def an_editor_that_changes_nothing(box: Box) -> None:
    assert edited(box, "box.toml", "true")[0] == 0


@row(0, "restart")
def restart_of_a_worker(box: Box) -> None:
    box.up()
    box("restart", "decode-0")


@row(0, "doctor")
def nothing_is_wrong_with_this_machine(box: Box) -> None:
    with mock.patch.object(doctor, "examine", return_value=([Finding("python", "ok", "3")], {})):
        box("doctor")


@row(5, "doctor")
def an_allocator_that_breaks_registration(box: Box) -> None:
    box.env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    box("doctor", "--no-measure", expect=5)


def result(box: Box, name: str, requests: int) -> str:
    cell = {"mode": "a", "prompt": 1, "output": 1, "requests": requests, "first_error": "refused"}
    box.file(name).write_text(json.dumps({"kind": "bench", "version": 1, "modes": [], "cells": [cell]}))
    return name


@row(0, "bench")
def two_results_compared(box: Box) -> None:
    with mock.patch("pdctl.bench.compare.between", return_value=[]):
        box("bench", "--compare", result(box, "a.json", 1), result(box, "b.json", 1))


@row(8, "bench")
def a_result_in_which_nothing_was_served(box: Box) -> None:
    with mock.patch("pdctl.bench.compare.between", return_value=[]):
        box("bench", "--compare", result(box, "a.json", 1), result(box, "b.json", 0), expect=8)


def ends(box: Box, *command: str, expect: int, number: signal.Signals | None = None) -> None:
    """A command in the foreground, that is sent a signal once its stack is ready."""
    process = box.start(*command)
    if number is not None:
        until(lambda: box.dir.read() and box.stack.state == "ready")
        process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == expect, said
    assert "Traceback" not in said


@row(0, "run")
def sigterm_after_which_everything_ended(box: Box) -> None:
    ends(box, "run", "box.toml", expect=0, number=signal.SIGTERM)


@row(1, "run")
def run_of_what_crashes(box: Box) -> None:
    box.script(decode_0={"crash": "no such tensor"})
    ends(box, "run", "box.toml", expect=1)


@row(5, "up", "run")
def a_core_that_is_not_there(box: Box, command: str) -> None:
    ends(box, command, "box.toml", "--set", "decode.cpus=[999]", expect=5)


@row(7, "run")
def run_of_what_runs_with_another_profile(box: Box) -> None:
    box.up()
    ends(box, "run", "box.toml", "--set", "decode.max_running=8", expect=7)


@row(4, "run")
def run_of_what_was_left_behind(box: Box) -> None:
    behead(box)
    ends(box, "run", "box.toml", expect=4)


def degrade(box: Box) -> None:
    box.up("--set", "supervise.restart=no")
    os.kill(box.pid("decode-0"), signal.SIGKILL)
    until(lambda: box.stack.state == "degraded")


@row(6, "status")
def status_of_a_stack_that_lacks_a_worker(box: Box) -> None:
    degrade(box)
    box("status", "box", expect=6)


@row(6, "top")
def top_of_a_stack_that_lacks_a_worker(box: Box) -> None:
    degrade(box)
    box("top", "box", "--once", expect=6)


@row(8, "smoke")
def smoke_where_nothing_crosses(box: Box) -> None:
    box.script(router={"kv_bytes": 0})
    box.up()
    box("smoke", expect=8)


@row(124, "up", "run")
def a_start_that_takes_too_long(box: Box, command: str) -> None:
    box.script(decode_0={"wait_for": str(box.file("never"))})
    ends(box, command, "box.toml", "--set", "supervise.ready_timeout=0.5s", expect=124)


@row(124, "scale")
def a_worker_more_that_takes_too_long(box: Box) -> None:
    box.script(decode_1={"wait_for": str(box.file("never"))})
    box.up()
    box("scale", "decode=2", "--timeout", "0.1s", expect=124)


@row(0, "role")
def a_role_that_was_taken(box: Box) -> None:
    """The workers of a box know one role each; tests/stack/test_role.py turns real ones."""
    box.up()
    with mock.patch("pdctl.control.ask", return_value={"ok": True}), mock.patch("pdctl.scale.wait", return_value=""):
        box("role", "decode-0", "prefill")


@row(124, "role")
def a_role_that_takes_too_long(box: Box) -> None:
    box.up()
    late = mock.patch("pdctl.scale.wait", side_effect=TimedOut("not over after 0.1 s"))
    with mock.patch("pdctl.control.ask", return_value={"ok": True}), late:
        box("role", "decode-0", "prefill", "--timeout", "0.1s", expect=124)


@row(130, "up", "run")
def ctrl_c_while_it_starts(box: Box, command: str) -> None:
    box.script(decode_0={"wait_for": str(box.file("never"))})
    process = box.start(command, "box.toml", *(["-d"] if command == "up" else []))
    until(lambda: box.dir.read() and box.state("prefill-0") == "ready")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said


@row(130, "status", "logs")
def ctrl_c_while_it_shows(box: Box, command: str) -> None:
    box.up()
    process = box.start(command, {"status": "-w", "logs": "-f"}[command])
    assert process.stdout is not None
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "")


@row(130, "wait", "drain")
def ctrl_c_while_it_waits(box: Box, command: str) -> None:
    box.up()
    with mock.patch("time.sleep", side_effect=KeyboardInterrupt):
        box(command, *{"wait": ["--for", "stopped"], "drain": ["decode-0", "--wait"]}[command], expect=130)


@row(143, "up", "run")
def sigterm_that_cuts_the_drain_short(box: Box, command: str) -> None:
    box.script(router={"ignore_term": 1})
    ends(box, command, "box.toml", "--set", "supervise.stop_timeout=0.3s", expect=143, number=signal.SIGTERM)
    assert box.left() == []


# -- the boxes that rows share ----------------------------------------------------------------------------------------


def behead(box: Box) -> None:
    box.up()
    pid = box.stack.pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: pid not in box.left())


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Box]]:
    found = {state: Box(tmp_path_factory.mktemp(state)) for state in LINES}
    try:
        found["whole"].up()
        behead(found["headless"])
        yield found
    finally:
        for box in found.values():
            box("down", "box", "--force")
            assert box.left() == []


# -- what is tested ---------------------------------------------------------------------------------------------------


def test_every_code_is_in_the_table_and_every_row_of_it_here() -> None:
    table = documented()
    assert table.keys() == {int(code) for code in Exit}
    lines = {(code, name_of(line)) for rows in LINES.values() for code, line in rows}
    everywhere = {(2, command) for command in commands()}
    assert {(code, command) for code, names in table.items() for command in names} == lines | everywhere | ROWS.keys()


def test_every_command_that_asks_a_stack_says_when_there_is_none() -> None:
    starting = {"up", "run", "down"}
    assert documented()[3] == {name for name, options in commands().items() if "--name" in options} - starting


@pytest.mark.parametrize("command", commands())
def test_a_wrong_command_line_is_2(boxes: dict[str, Box], command: str) -> None:
    answer = boxes["nothing"](*command.split(), "--no-such-option", expect=2)
    assert "No such option" in answer.stderr
    assert answer.stdout == ""


@pytest.mark.parametrize(
    ("state", "code", "line"),
    [(state, *each) for state, rows in LINES.items() for each in rows],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_line(boxes: dict[str, Box], state: str, code: int, line: tuple[str, ...]) -> None:
    answer = boxes[state](*line, expect=code)
    if code:
        assert re.search(r"^error\[E_[A-Z_]+\]: ", answer.stderr, re.MULTILINE) or name_of(line) in (
            "status",
            "top",
            "up",
        )


@pytest.mark.parametrize(("code", "command"), ROWS, ids=str)
def test_row(box: Box, code: int, command: str) -> None:
    ROWS[code, command](box)
