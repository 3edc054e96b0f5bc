"""Starting: what is ready, what is shown, and what is said when it does not work."""

import json
import os
import signal
import socket
import time

import psutil
import pytest

from pdctl.exits import Exit
from tests.process.box import Box, until


def test_up_returns_when_all_are_ready_and_says_where(box: Box) -> None:
    done = box.up()

    assert done.stdout == f"{box.stack.url}/v1\n"
    assert "pdctl down box" in done.stderr
    assert "decode-0: starting (weights)" in done.stderr
    value = box.status(Exit.OK)
    assert value["state"] == "ready"
    assert {process["name"]: process["state"] for process in value["processes"]} == {
        "prefill-0": "ready",
        "decode-0": "ready",
        "router": "ready",
    }


def test_every_process_is_its_own_group_leader_and_carries_the_run(box: Box) -> None:
    box.up()

    stack = box.stack
    pids = [process.pid for process in stack.processes]
    assert len({stack.pid, *pids}) == 4
    for process in stack.processes:
        assert os.getpgid(process.pid) == os.getsid(process.pid) == process.pid
        assert process.detail["env"]["PDCTL_RUN_ID"] == stack.run_id


def test_the_numbers_of_the_router_are_shown(box: Box) -> None:
    box.up()

    shown = box("status", "box").stdout
    assert "40%" in shown
    numbers = {process["name"]: process["numbers"] for process in box.status(Exit.OK)["processes"]}
    assert (numbers["router"]["queue"], numbers["decode-0"]["running"]) == (3, 2)


def test_a_worker_is_bound_to_its_cores_and_the_helpers_stay_off_the_decode_core(box: Box) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    box.up("--set", "prefill.cpus=[0]", "--set", "decode.cpus=[1]")

    detail = {process.name: process.detail for process in box.stack.processes}
    assert detail["prefill-0"]["cpus"] == detail["router"]["cpus"] == [cores[0]]
    assert detail["decode-0"]["cpus"] == [cores[1]]
    assert sorted(os.sched_getaffinity(box.stack.pid)) == [cores[0]]
    env = detail["decode-0"]["env"]
    assert env["OMP_NUM_THREADS"] == "1"
    assert int(env["MALLOC_MMAP_THRESHOLD_"]) > 1 << 25
    assert (env["CUDA_VISIBLE_DEVICES"], env["HF_HUB_OFFLINE"]) == ("", "1")


def test_while_it_loads_status_shows_the_stage_and_exits_6(box: Box) -> None:
    box.script(decode_0={"stages": [["weights", 0.25]], "wait_for": str(box.file("go"))})
    command = box.start("up", str(box.profile), "-d")
    until(lambda: box.dir.read() and box.state("prefill-0") == "ready" and box.stack.process("decode-0").stage)

    value = box.status(Exit.DEGRADED)
    decode = next(process for process in value["processes"] if process["name"] == "decode-0")
    assert (value["state"], decode["state"], decode["stage"]) == ("starting", "starting", "weights")

    box.file("go").touch()
    _, narration = command.communicate(timeout=20)
    assert command.returncode == 0, narration


def test_json_progress_is_one_event_a_line_on_stdout(box: Box) -> None:
    events = [json.loads(line) for line in box.up("--progress", "json").stdout.splitlines()]

    assert events[-1]["event"] == "ready"
    assert {"prefill-0", "decode-0", "router", "model"} == {e["name"] for e in events if e["event"] == "process"}


def test_a_failed_start_names_cause_and_log_and_leaves_nothing(box: Box) -> None:
    box.script(decode_0={"error": "KV cache needs 9 GiB, 4 GiB are free", "help": "lower decode.kv_bytes"})

    done = box.up(expect=Exit.PREFLIGHT)

    log = box.dir.log("decode-0")
    assert f"error[E_START]: decode-0 did not start: KV cache needs 9 GiB, 4 GiB are free (log: {log})" in done.stderr
    assert "help: lower decode.kv_bytes" in done.stderr
    assert done.stdout == ""
    assert box.left() == []
    assert box.starts("decode-0") == 1
    value = box.status(Exit.NOT_RUNNING)
    assert value["state"] == "failed"
    assert "9 GiB" in value["reason"]


def test_a_crash_while_starting_shows_the_last_line_of_its_log(box: Box) -> None:
    box.script(prefill_0={"crash": "no such tensor"})

    done = box.up(expect=Exit.FAILURE)

    assert "error[E_CRASHED]: prefill-0 did not start: exited with code 1: RuntimeError: no such tensor" in done.stderr
    assert box.starts("prefill-0") == 1
    assert box.left() == []


def test_a_model_that_cannot_be_had_is_said_before_anything_starts(box: Box) -> None:
    box.script(model={"error": "there is no model 'x'"})

    done = box.up(expect=Exit.PREFLIGHT)

    assert "error[E_MODEL]" in done.stderr
    assert "there is no model 'x'" in done.stderr
    assert box.starts("prefill-0") == 0


def test_a_taken_port_names_its_holder_before_anything_starts(box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        done = box.up("--set", f"router.port={port}", expect=Exit.PREFLIGHT)

    user = psutil.Process().username()
    assert f"error[E_PORT_IN_USE]: router port {port} is held by pid {os.getpid()} `" in done.stderr
    assert f"(user {user})" in done.stderr
    assert "help: pdctl up box --set router.port=0" in done.stderr
    assert box.starts("prefill-0") == 0
    assert not (box.dir.path / "logs" / "model.log").exists()


def test_a_start_without_progress_ends_with_124_and_the_stage(box: Box) -> None:
    box.script(decode_0={"stages": [["weights", 0.5]], "wait_for": str(box.file("never"))})

    done = box.up("--set", "supervise.ready_timeout=0.5s", expect=Exit.TIMEOUT)

    assert "decode-0 did not start: no progress for 0.5 s at stage 'weights'" in done.stderr
    assert box.left() == []


def test_a_frozen_supervisor_does_not_call_a_worker_late(box: Box) -> None:
    """1 a worker loads, 2 the supervisor stands still past ready_timeout, 3 the worker is ready meanwhile, 4 all is."""
    box.script(decode_0={"stages": [["weights", 0.5]], "wait_for": str(box.file("go"))})
    command = box.start("up", str(box.profile), "-d", "--set", "supervise.ready_timeout=3s")
    until(lambda: box.dir.read() and box.stack.process("decode-0").stage, "decode-0 loads")

    os.kill(box.stack.pid, signal.SIGSTOP)
    time.sleep(4)  # the time that nothing happens in
    box.file("go").touch()
    os.kill(box.stack.pid, signal.SIGCONT)

    _, narration = command.communicate(timeout=20)
    assert command.returncode == 0, narration
    assert box.starts("decode-0") == 1


def test_up_with_a_timeout_names_who_is_late(box: Box) -> None:
    box.script(decode_0={"wait_for": str(box.file("never"))})

    done = box.up("--timeout", "1s", expect=Exit.TIMEOUT)

    assert "not ready within 1 s: decode-0" in done.stderr
    assert box.left() == []


def test_a_core_that_is_not_there_is_refused(box: Box) -> None:
    if os.cpu_count() == 1:
        pytest.skip("one core wraps, with a warning")

    done = box.up("--set", "decode.cpus=[999]", expect=Exit.PREFLIGHT)

    assert "error[E_CPU]: decode.cpus names core 999" in done.stderr


def test_up_again_with_the_same_profile_is_its_address(box: Box) -> None:
    first = box.up()
    run_id = box.stack.run_id

    again = box.up()

    assert again.stdout == first.stdout
    assert "already up" in again.stderr
    assert box.stack.run_id == run_id


def test_up_with_another_profile_is_refused_with_the_difference(box: Box) -> None:
    box.up()

    done = box.up("--set", "decode.max_running=8", expect=Exit.REFUSED)

    assert "decode.max_running is 64, asked for 8" in done.stderr


def test_up_joins_a_start_under_way(box: Box) -> None:
    box.script(decode_0={"wait_for": str(box.file("go"))})
    first = box.start("up", str(box.profile), "-d")
    until(lambda: box.dir.read() and box.state("prefill-0") == "ready")
    second = box.start("up", str(box.profile), "-d")

    box.file("go").touch()
    answers = [command.communicate(timeout=20)[0] for command in (first, second)]

    assert answers[0] == answers[1] == f"{box.stack.url}/v1\n"


def test_ctrl_c_while_up_waits_takes_the_start_down(box: Box) -> None:
    box.script(decode_0={"wait_for": str(box.file("never"))})
    command = box.start("up", str(box.profile), "-d")
    until(lambda: box.dir.read() and box.state("prefill-0") == "ready")

    command.send_signal(signal.SIGINT)
    command.communicate(timeout=20)

    assert command.returncode == Exit.INTERRUPTED
    assert box.left() == []


def test_dry_run_shows_processes_and_starts_none(box: Box) -> None:
    shown = box("up", str(box.profile), "--dry-run").stdout
    assert "server.decode --boot" in shown
    assert not box.dir.path.exists()
    box("up", str(box.profile), "--dry-run", "--exit-code", expect=1)

    box.up()
    box("up", str(box.profile), "--dry-run", "--exit-code", expect=0)
    different = box("up", str(box.profile), "--dry-run", "--exit-code", "--set", "hybrid.threshold_tokens=0", expect=1)
    assert "hybrid.threshold_tokens: 256 -> 0" in different.stdout


def test_secrets_are_private_files_and_nowhere_else(box: Box) -> None:
    box.up()

    secret = box.dir.secret_file.read_text().strip()
    private = [box.dir.secret_file, box.dir.boot("router"), box.dir.path / "stack.json"]
    assert all(file.stat().st_mode & 0o077 == 0 for file in private)
    assert box.dir.path.stat().st_mode & 0o077 == 0
    for pid in box.left():
        process = psutil.Process(pid)
        assert secret not in " ".join(process.cmdline()) + str(process.environ())
    assert all(secret not in log.read_text() for log in (box.dir.path / "logs").iterdir())
    assert secret not in (box.dir.path / "stack.json").read_text()
