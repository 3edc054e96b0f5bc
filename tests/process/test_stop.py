"""Stopping: what may end first, what is forced, and that nothing is left whoever died before."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from pdctl.down import take_down
from pdctl.exits import Exit
from pdctl.process import Identity, sweep
from pdctl.rundir import ProcessInfo, Stack
from tests.process.box import Box, until


def foreground(box: Box, *arguments: str) -> "subprocess.Popen[str]":
    command = box.start("up", str(box.profile), *arguments)
    until(lambda: box.dir.read() and box.stack.state == "ready", "the stack is ready")
    return command


def test_in_the_foreground_the_command_is_the_supervisor(box: Box) -> None:
    command = foreground(box)

    assert box.stack.pid == command.pid
    assert command.stdout is not None
    assert command.stdout.readline() == f"{box.stack.url}/v1\n"
    command.send_signal(signal.SIGINT)
    command.communicate(timeout=20)


def test_ctrl_c_lets_the_router_drain_before_the_workers_hear_of_it(box: Box) -> None:
    box.script(router={"drain_until": str(box.file("drained"))})
    command = foreground(box)

    command.send_signal(signal.SIGINT)
    until(lambda: "got SIGTERM" in box.log("router"))
    assert box.stack.state == "draining"
    assert "got SIGTERM" not in box.log("decode-0")

    box.file("drained").touch()
    _, narration = command.communicate(timeout=20)
    assert command.returncode == Exit.INTERRUPTED
    assert "letting requests finish" in narration
    assert "got SIGTERM" in box.log("decode-0")
    assert box.left() == []


def test_a_second_ctrl_c_ends_it_at_once(box: Box) -> None:
    box.script(router={"ignore_term": True}, decode_0={"ignore_term": True})
    command = foreground(box)

    command.send_signal(signal.SIGINT)
    until(lambda: "got SIGTERM" in box.log("router"))
    forced_at = time.monotonic()
    command.send_signal(signal.SIGINT)
    command.communicate(timeout=20)

    assert command.returncode == Exit.INTERRUPTED
    assert time.monotonic() - forced_at < 5
    assert box.left() == []


def test_sigterm_ends_clean_with_0(box: Box) -> None:
    command = foreground(box)
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=20)
    assert command.returncode == Exit.OK


def test_down_ends_all_and_says_so(box: Box) -> None:
    box.up()
    assert "box: down" in box("down", "box").stderr
    assert box.left() == []
    assert box.status(Exit.NOT_RUNNING)["state"] == "stopped"
    assert not os.path.exists(box.stack.socket_dir)


def test_down_on_nothing_is_fine(box: Box) -> None:
    box("down")
    box("down", "nosuch")
    box.up()
    box("down")
    assert "nothing was running" in box("down").stderr


def test_down_force_does_not_wait_for_who_ignores_it(box: Box) -> None:
    box.script(router={"ignore_term": True}, prefill_0={"ignore_term": True})
    box.up()
    started = time.monotonic()
    box("down", "--force")
    assert time.monotonic() - started < 5
    assert box.left() == []


def test_helpers_that_left_their_group_are_ended_too(box: Box) -> None:
    box.script(prefill_0={"child": True})
    box.up()
    helper = int((box.dir.path / "helper.prefill-0").read_text())
    assert psutil.pid_exists(helper)

    box("down")

    assert helper not in box.left()
    assert box.left() == []


def test_after_the_supervisor_was_killed_down_leaves_nothing(box: Box) -> None:
    box.script(decode_0={"child": True})
    box.up()
    pids = [process.pid for process in box.stack.processes]
    os.kill(box.stack.pid, signal.SIGKILL)
    until(lambda: box.stack.pid not in box.left())

    assert set(pids) < set(box.left())
    assert "its processes live on" in box.up(expect=Exit.UNREACHABLE).stderr
    assert "left behind" in box("down").stderr

    assert box.left() == []
    box.status(Exit.NOT_RUNNING)
    box.up()  # and it can start again


@pytest.mark.parametrize("killed", [["supervisor"], ["decode-0"], ["supervisor", "decode-0"]], ids="+".join)
def test_whoever_was_killed_no_orphan_stays(box: Box, killed: list[str]) -> None:
    """decode-0 has a helper in a session of its own, which nobody but the run's id leads to."""
    box.script(decode_0={"child": True})
    box.up()
    helper = int((box.dir.path / "helper.decode-0").read_text())
    # 1. One, the other or both are killed; a supervisor that lives starts the worker again.
    pids = {name: box.stack.pid if name == "supervisor" else box.pid(name) for name in killed}
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    until(lambda: not set(pids.values()) & set(box.left()), "they are gone")
    assert helper in box.left()
    if "supervisor" not in killed:
        until(lambda: box.stack.state == "ready" and box.starts("decode-0") == 2, "it runs again")
    # 2. Nothing of the run is left, helpers of the dead among it.
    box("down")
    assert box.left() == []
    # 3. Nor is anything that would be in the way of the next one.
    box.script()
    box.up()
    box("down")
    assert box.left() == []


def test_down_orphans_finds_the_stacks_without_a_supervisor(box: Box) -> None:
    box.up()
    os.kill(box.stack.pid, signal.SIGKILL)
    until(lambda: box.stack.pid not in box.left())
    box("down", "--orphans")
    assert box.left() == []


def test_down_orphans_spares_what_is_supervised(box: Box) -> None:
    box.up()
    box("down", "--orphans")
    box.status(Exit.OK)


def test_a_frozen_supervisor_is_no_obstacle(box: Box) -> None:
    box.up()
    os.kill(box.stack.pid, signal.SIGSTOP)
    assert box.status(Exit.UNREACHABLE)["supervisor"]["state"] == "frozen"
    box("down")
    assert box.left() == []


def test_a_reused_pid_is_never_signalled(box: Box) -> None:
    """1. A stranger has the pid that the record names. 2. Neither a wrong start time nor a missing run id convinces."""
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        real = psutil.Process(stranger.pid).create_time()
        for create_time in (real - 1000.0, real):
            box.dir.create()
            process = ProcessInfo("decode-0", "decode", "ready", stranger.pid, create_time)
            stack = Stack("box", "0123456789ab", pid=stranger.pid, create_time=create_time, state="ready")
            stack.processes = [process]
            box.dir.write(stack)
            said: list[str] = []
            assert take_down(box.dir, said.append, is_forced=True) is False
            assert stranger.poll() is None
            assert box.stack.state == "stopped"
    finally:
        stranger.kill()
        stranger.wait()


def test_sweep_checks_start_time_even_where_the_run_id_agrees() -> None:
    env = {**os.environ, "PDCTL_RUN_ID": "test-sweep"}
    ours = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env, start_new_session=True)
    try:
        create_time = psutil.Process(ours.pid).create_time()
        assert not Identity(ours.pid, create_time - 10, "test-sweep").is_alive
        assert not Identity(ours.pid, create_time, "other").is_alive
        assert Identity(ours.pid, create_time, "test-sweep").is_alive
        found = sweep("test-sweep", grace_s=5.0)
        assert [identity.pid for identity in found] == [ours.pid]
        assert ours.wait(timeout=5) == -signal.SIGTERM
    finally:
        ours.kill()
        ours.wait()
