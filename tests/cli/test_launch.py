"""Where processes are put: cores, GPUs, environment, ports and key files."""

from pathlib import Path
from typing import Any

import pytest

from pdctl.launch import Machine, check_keys, listen, plan
from server.boot import Boot
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
    assert placed.launches[-1].cpus == (0, 1)


HOSTS = {
    "left": {"address": "10.0.0.1", "workers": ["prefill-0"], "router": True},
    "right": {"address": "10.0.0.2", "port": 7500, "workers": ["decode-0"]},
}
OVER_TWO = {**PD, "decode": {"workers": 1, "cpus": [0]}, "hosts": HOSTS, "secret_file": "/x"}


def test_of_several_machines_each_starts_its_own_part() -> None:
    """Cores count anew on each: nothing is shared, and nothing is said of it."""
    over_two = config(**OVER_TWO)
    left = plan(over_two, Machine((0, 1), (), 1 << 34, frozenset({"127.0.0.1", "10.0.0.1"})))
    right = plan(over_two, Machine((0, 1), (), 1 << 34, frozenset({"127.0.0.1", "10.0.0.2"})))
    assert [launch.name for launch in left.launches] == ["prefill-0", "router"]
    assert [launch.name for launch in right.launches] == ["decode-0"]
    assert left.warnings == right.warnings == ()
    assert over_two.hosts["right"].control("decode-0") == "tcp:10.0.0.2:7500"
    with pytest.raises(StartError, match=r"none of the profile's hosts is this machine: left \(10.0.0.1\), right"):
        plan(over_two, machine())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hosts": {"left": HOSTS["left"]}}, "decode-0 is on 0 hosts; each worker is on one"),
        ({"hosts": {**HOSTS, "third": HOSTS["right"]}}, "decode-0 is on 2 hosts"),
        ({"hosts": {**HOSTS, "third": {"address": "c", "workers": ["decode-7"]}}}, "there is no worker decode-7"),
        ({"hosts": {**HOSTS, "third": {"address": "c", "router": True}}}, "set router = true on one of them"),
        ({"secret_file": None}, "hosts need secret_file"),
    ],
)
def test_hosts_that_do_not_add_up_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        config(**{**OVER_TWO, **change})


def test_a_worker_offers_the_address_of_its_control_connection(tmp_path: Path) -> None:
    def offered(address: str, **transfer: str) -> str:
        whole = config(**PD, transfer=transfer)
        return Boot("decode-0", whole, "", str(tmp_path), "", {"decode-0": address}).transfer.host

    assert offered("unix:/tmp/x.sock") == "127.0.0.1"
    assert offered("tcp:10.0.0.2:7400") == "10.0.0.2"
    assert offered("tcp:[fd00::2]:7400") == "fd00::2"
    assert offered("tcp:10.0.0.2:7400", host="192.168.7.2") == "192.168.7.2"


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
    with pytest.raises(StartError, match=r"core 7; pdctl may use 2 cores here, which count as 0..1") as caught:
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
    env = placed.workers[1].env({"CUDA_VISIBLE_DEVICES": "4,5"})
    assert env["CUDA_VISIBLE_DEVICES"] == "5"
    assert "OMP_WAIT_POLICY" not in env
    assert placed.helpers == ()


def test_threads_that_wait_for_each_other_leave_their_core_to_others() -> None:
    for profile in (PD, {"prefill": {"workers": 1}, "decode": {"workers": 1}}):
        for worker in plan(config(**profile), machine()).workers:
            assert worker.env({})["OMP_WAIT_POLICY"] == "passive"


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
