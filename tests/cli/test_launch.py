"""Where processes are put: cores, GPUs, environment, ports and key files."""

from pathlib import Path
from typing import Any

import pytest

from pdctl.launch import Machine, check_keys, listen, plan
from server.config import Config
from server.errors import ConfigError, StartError


def machine(cpus: tuple[int, ...] = (0, 1), gpus: tuple[str, ...] = ()) -> Machine:
    return Machine(cpus, gpus, 1 << 34)


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


PD = {"prefill": {"workers": 1, "cpus": [0]}, "decode": {"workers": 1, "cpus": [1]}}


def test_router_and_helpers_share_the_prefill_core() -> None:
    placed = plan(config(**PD), machine())
    assert {launch.name: launch.cpus for launch in placed.launches} == {
        "prefill-0": (0,),
        "decode-0": (1,),
        "router": (0,),
    }
    assert placed.helpers == (0,)
    assert placed.warnings == ()


def test_core_numbers_count_what_this_process_may_use() -> None:
    placed = plan(config(**PD), machine(cpus=(4, 5)))
    assert [launch.cpus for launch in placed.workers] == [(4,), (5,)]


def test_colocated_workers_share_all_cores_with_the_router() -> None:
    placed = plan(config(colocated={"workers": 2, "cpus": [0, 1]}), machine())
    assert placed.router.cpus == (0, 1)


def test_without_cores_or_gpus_nothing_is_bound() -> None:
    placed = plan(config(prefill={"workers": 1}, decode={"workers": 1}), machine())
    assert all(launch.cpus == () for launch in placed.launches)
    assert "OMP_NUM_THREADS" not in placed.workers[0].env({})


def test_one_core_runs_it_all_with_a_warning() -> None:
    placed = plan(config(**PD), machine(cpus=(0,)))
    assert [launch.cpus for launch in placed.workers] == [(0,), (0,)]
    assert "one core only: decode-0" in placed.warnings[0]


def test_a_core_or_gpu_that_is_not_there_is_refused_with_a_way_out() -> None:
    far = {**PD, "decode": {"workers": 1, "cpus": [7]}}
    with pytest.raises(StartError, match=r"decode.cpus names core 7; this machine has cores 0..1") as caught:
        plan(config(**far), machine())
    assert caught.value.help == "pdctl up ... --set 'decode.cpus=[1]'"
    with pytest.raises(StartError, match="decode.gpus names GPU 1; this machine has no GPU"):
        plan(config(prefill={"workers": 1, "cpus": [0]}, decode={"workers": 1, "gpus": [1]}), machine())


def test_devices_shared_by_two_workers_are_said() -> None:
    one_gpu = {"prefill": {"workers": 1, "gpus": [0]}, "decode": {"workers": 1, "gpus": [0]}}
    assert plan(config(**one_gpu), machine(gpus=("3",))).warnings == ("prefill-0 and decode-0 share GPU 3",)
    same = {"prefill": {"workers": 1, "cpus": [0]}, "decode": {"workers": 1, "cpus": [0]}}
    assert plan(config(**same), machine()).warnings == ("prefill-0 and decode-0 share core 0",)


def test_a_gpu_worker_sees_its_own_gpu_only() -> None:
    two = {"prefill": {"workers": 1, "gpus": [0]}, "decode": {"workers": 1, "gpus": [1]}}
    placed = plan(config(**two), machine(gpus=("4", "5")))
    assert placed.workers[1].env({"CUDA_VISIBLE_DEVICES": "4,5"})["CUDA_VISIBLE_DEVICES"] == "5"
    assert placed.helpers == ()


def test_the_profile_s_environment_wins_and_overrides_are_not_passed_on() -> None:
    placed = plan(config(**{**PD, "decode": {"workers": 1, "cpus": [1], "env": {"OMP_NUM_THREADS": "7"}}}), machine())
    env = placed.workers[1].env({"PDCTL__ROUTER__PORT": "1", "HOME": "/h"})
    assert (env["OMP_NUM_THREADS"], env["HOME"]) == ("7", "/h")
    assert "PDCTL__ROUTER__PORT" not in env


def test_visible_gpus_follow_the_environment() -> None:
    assert Machine.here({"CUDA_VISIBLE_DEVICES": "2, GPU-abc"}).gpus == ("2", "GPU-abc")
    assert Machine.here({"CUDA_VISIBLE_DEVICES": ""}).gpus == ()


def test_the_port_is_ours_once_it_is_bound() -> None:
    with listen("127.0.0.1", 0, "x") as mine, pytest.raises(StartError) as caught:
        listen("127.0.0.1", mine.getsockname()[1], "x")
    assert caught.value.code == "E_PORT_IN_USE"


def test_key_files_are_private(tmp_path: Path) -> None:
    key = tmp_path / "key"
    wanted = config(**PD, router={"api_key_file": str(key)})
    with pytest.raises(ConfigError, match="router.api_key_file"):
        check_keys(wanted)
    key.write_text("k")
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others") as caught:
        check_keys(wanted)
    assert caught.value.help == f"chmod 600 {key}"
    key.chmod(0o600)
    check_keys(wanted)
