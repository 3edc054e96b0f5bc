"""What dies is started again, with patience and with a limit; whoever asks hears of it within two seconds."""

import os
import signal

import pytest

from pdctl.exits import Exit
from pdctl.restart import RestartPolicy
from tests.process.box import Box, until


def test_the_wait_doubles_up_to_its_limit_and_then_it_is_given_up() -> None:
    policy = RestartPolicy("on-failure", 4, 2.0, 10.0)
    waits = [policy.after_exit(is_clean=False, ready_for_s=0.0) for _ in range(5)]
    assert waits == [2.0, 4.0, 8.0, 10.0, None]


def test_a_long_life_starts_the_count_anew() -> None:
    policy = RestartPolicy("on-failure", 1, 2.0, 10.0)
    assert policy.after_exit(is_clean=False, ready_for_s=1.0) == 2.0
    assert policy.after_exit(is_clean=False, ready_for_s=11.0) == 2.0
    assert policy.after_exit(is_clean=False, ready_for_s=9.0) is None
    policy.reset()
    assert policy.after_exit(is_clean=False, ready_for_s=0.0) == 2.0


@pytest.mark.parametrize(
    ("restart", "is_clean", "restarts"),
    [
        ("no", False, False),
        ("no", True, False),
        ("on-failure", True, False),
        ("on-failure", False, True),
        ("always", True, True),
        ("always", False, True),
    ],
)
def test_which_ends_are_followed_by_a_start(restart: str, is_clean: bool, restarts: bool) -> None:
    policy = RestartPolicy(restart, 3, 2.0, 10.0)  # type: ignore[arg-type]
    assert (policy.after_exit(is_clean=is_clean, ready_for_s=0.0) is not None) == restarts


@pytest.mark.parametrize("name", ["decode-0", "router"])
def test_a_killed_process_comes_back_as_a_new_one(box: Box, name: str) -> None:
    box.up()
    before, port = box.pid(name), box.stack.port

    os.kill(before, signal.SIGKILL)
    until(lambda: box.starts(name) == 2 and box.state(name) == "ready")

    assert box.pid(name) != before
    info = box.stack.process(name)
    assert info is not None
    assert (info.restarts, info.exits[-1].code) == (1, -signal.SIGKILL)
    assert "killed by SIGKILL" in info.exits[-1].reason
    assert box.stack.port == port
    until(lambda: box.stack.state == "ready")
    box("smoke", "box")  # the port is the same socket
    assert "start 1" in box("logs", name, "--prev", "-n", "box").stdout
    assert "start 2" in box("logs", name, "-n", "box").stdout


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "router"])
def test_status_says_at_once_that_a_process_was_killed(box: Box, name: str) -> None:
    box.up("--set", "supervise.backoff=30s..60s")
    os.kill(box.pid(name), signal.SIGKILL)

    value = box.status(Exit.DEGRADED)

    assert value["state"] == "degraded"
    process = next(process for process in value["processes"] if process["name"] == name)
    assert process["state"] == "restarting"
    if process["last_exit"]:
        assert "SIGKILL" in process["last_exit"]["reason"]


def test_status_says_at_once_that_the_supervisor_was_killed(box: Box) -> None:
    box.up()
    os.kill(box.stack.pid, signal.SIGKILL)

    value = box.status(Exit.UNREACHABLE)

    assert value["supervisor"]["state"] == "dead"
    assert {process["state"] for process in value["processes"]} == {"ready"}
    assert "pdctl down box" in box("status", "box", expect=Exit.UNREACHABLE).stdout


def test_a_frozen_worker_is_called_frozen(box: Box) -> None:
    box.up()
    os.kill(box.pid("decode-0"), signal.SIGSTOP)
    value = box.status(Exit.DEGRADED)
    assert next(p["state"] for p in value["processes"] if p["name"] == "decode-0") == "frozen"
    box("down")  # it is woken, so that it can end
    assert "got SIGTERM" in box.log("decode-0")


def test_ready_means_that_the_router_can_use_it(box: Box) -> None:
    """A restarted worker says ready before the router has found it again."""
    box.script(router={"no_worker_while": str(box.file("lost"))})
    box.up()
    box.file("lost").touch()
    value = box.status(Exit.DEGRADED)
    assert next(p["state"] for p in value["processes"] if p["name"] == "router") == "no worker"
    box("wait", "--for", "ready", "--timeout", "0.2s", expect=Exit.TIMEOUT)
    box.file("lost").unlink()
    box("wait", "--for", "ready", "--timeout", "5s")


def test_after_max_restarts_it_stays_dead_and_the_rest_goes_on(box: Box) -> None:
    box.script(decode_0={"starts": [{}, {"crash": "again"}]})
    box.up()

    os.kill(box.pid("decode-0"), signal.SIGKILL)
    until(lambda: box.state("decode-0") == "dead")

    assert box.starts("decode-0") == 3  # once, and max_restarts = 2
    value = box.status(Exit.DEGRADED)
    states = {process["name"]: process["state"] for process in value["processes"]}
    assert states == {"prefill-0": "ready", "decode-0": "dead", "router": "ready"}
    assert "RuntimeError: again" in box("status", "box", expect=Exit.DEGRADED).stdout


def test_restart_brings_back_what_was_given_up(box: Box) -> None:
    box.script(decode_0={"starts": [{}, {"crash": "once"}, {}]})
    box.up("--set", "supervise.max_restarts=1")
    os.kill(box.pid("decode-0"), signal.SIGKILL)
    until(lambda: box.state("decode-0") == "dead")

    box("restart", "decode-0", "-n", "box")

    until(lambda: box.stack.state == "ready")
    box("wait", "box", "--for", "ready", "--timeout", "5s")


def test_restart_of_a_running_worker_is_a_new_process(box: Box) -> None:
    box.up()
    before = box.pid("decode-0")
    box("restart", "decode-0")
    until(lambda: box.pid("decode-0") != before and box.state("decode-0") == "ready")
    assert "got SIGTERM" in box.dir.log("decode-0").with_suffix(".log.prev").read_text()
    assert "there are: prefill-0, decode-0, router" in box("restart", "decode-9", expect=Exit.USAGE).stderr
