"""Changes of the pools: which cores a new worker gets, and what is left when a step fails."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from pdctl.exits import Exit, Refused, Unreachable
from pdctl.launch import Machine
from pdctl.scale import Scaler, resized
from server.config import Config
from server.errors import PdctlError, StartError
from tests.process.box import Box


def config(prefill: list[int], decode: list[int]) -> Config:
    pools = {"prefill": prefill, "decode": decode}
    return Config.model_validate({role: {"workers": len(cpus), "cpus": cpus} for role, cpus in pools.items()})


def machine(cores: int) -> Machine:
    return Machine(tuple(range(cores)), (), 1 << 30)


class Stack:
    """A supervisor and its router in one: what each of them knows. `fails`: calls that do not work."""

    max_prefill = 2

    def __init__(self, config: Config, cores: int, *fails: str) -> None:
        self.config = config
        self.machine = machine(cores)
        self.known = {spec.name for spec in config.workers}
        self.running = set(self.known)
        self.draining: set[str] = set()
        self.fails = set(fails)
        self.heard: list[str] = []
        self.looks_away = 0  # so many looks at who drains find no router
        self.end_of_patience: Callable[[], None] = lambda: None

    @property
    def configured(self) -> set[str]:
        return {spec.name for spec in self.config.workers}

    def use(self, config: Config) -> None:
        self.config = config

    def address(self, name: str) -> str:
        return f"unix:{name}"

    async def start_worker(self, name: str) -> None:
        self._may(f"start {name}")
        assert name in self.configured
        self.running.add(name)

    async def end_worker(self, name: str) -> None:
        self.running.discard(name)

    def _may(self, what: str) -> None:
        self.heard.append(what)
        if what in self.fails:
            raise PdctlError(f"{what} failed")

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        _, _, _, *rest = path.split("/")
        if method == "GET":
            if self.looks_away and self.draining:
                self.looks_away -= 1
                raise Unreachable("the router does not answer")
            return {"workers": [{"name": name, "state": self._state(name)} for name in self.known]}
        name = rest[0] if rest else body["name"]
        self._may(f"{rest[1] if rest[1:] else method} {name}")
        if not rest:
            self.known.add(name)
        elif name not in self.known:
            raise Refused(f"UNKNOWN_WORKER: {name}")
        elif method == "DELETE":
            self.known.remove(name)
            self.draining.discard(name)
        else:
            if f"finish {name}" in self.fails:
                self.end_of_patience()
            (self.draining.add if rest[1] == "drain" else self.draining.discard)(name)
        return {}

    def _state(self, name: str) -> str:
        if name not in self.draining:
            return "connected"
        return "draining" if f"finish {name}" in self.fails else "drained"


def scaler(stack: Stack) -> Scaler:
    return Scaler(stack, stack)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prefill", "decode", "cores", "count", "cpus"),
    [
        ([0], [1], 4, 3, [1, 2, 3]),  # those that nobody has
        ([0], [1], 3, 4, [1, 2, 1, 2]),  # then the pool's own, in turn
        ([0], [1], 2, 2, [1, 1]),
        ([2, 3], [0, 1], 4, 3, [0, 1, 0]),  # never another pool's
    ],
)
def test_cores_of_more_workers(prefill: list[int], decode: list[int], cores: int, count: int, cpus: list[int]) -> None:
    assert resized(config(prefill, decode), "decode", count, machine(cores)).decode.cpus == cpus


def test_a_new_worker_gets_a_core_of_its_pool(box: Box) -> None:
    """The supervisor is bound to the prefill core by then, the machine is as large as before."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    box.up("--set", "prefill.cpus=[0]", "--set", "decode.cpus=[1]")

    box("scale", "decode=2", expect=Exit.OK)

    detail = {process.name: process.detail for process in box.stack.processes}
    assert detail["decode-0"]["cpus"] == [cores[1]]
    assert detail["decode-1"]["cpus"] == [cores[2 if len(cores) > 2 else 1]]


async def test_a_role_that_has_no_place_is_refused_before_the_drain() -> None:
    stack = Stack(config([0, 5], [1]), 2)

    with pytest.raises(StartError, match="names core 5"):
        await scaler(stack).turn("prefill-1", "decode")

    assert stack.heard == []
    assert stack.configured == {"prefill-0", "prefill-1", "decode-0"}


async def test_more_workers_of_which_one_does_not_start() -> None:
    stack = Stack(config([0], [1]), 4, "start decode-2")

    # 1. Of two more the first works and stays, and the second is gone from everywhere.
    with pytest.raises(PdctlError, match="start decode-2 failed"):
        await scaler(stack).scale("decode", 3)
    assert stack.configured == stack.known == stack.running == {"prefill-0", "decode-0", "decode-1"}

    # 2. Asked again once it can start, only that one is missing.
    stack.fails.clear()
    await scaler(stack).scale("decode", 3)
    assert stack.configured == stack.known == stack.running == {"prefill-0", "decode-0", "decode-1", "decode-2"}


@pytest.mark.parametrize("failing", ["finish decode-1", "DELETE decode-1"])
async def test_fewer_workers_of_which_one_stays(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(config([0], [1, 2, 3]), 4, failing)
    stack.end_of_patience = lambda: monkeypatch.setattr("pdctl.scale.DRAIN_S", 0.0)

    # 1. One of two goes; the other does not come free, and gets work again.
    with pytest.raises(PdctlError, match="decode-1"):
        await scaler(stack).scale("decode", 1)
    assert stack.configured == stack.known == stack.running == {"prefill-0", "decode-0", "decode-1"}
    assert stack.draining == set()


async def test_a_router_that_restarts_while_a_worker_drains() -> None:
    stack = Stack(config([0], [1, 2]), 4)
    stack.looks_away = 1

    await scaler(stack).scale("decode", 1)

    assert stack.configured == stack.known == stack.running == {"prefill-0", "decode-0"}
    assert stack.looks_away == 0


async def test_a_worker_that_the_router_has_forgotten_before() -> None:
    stack = Stack(config([0], [1, 2]), 4)
    stack.known.remove("decode-1")

    await scaler(stack).scale("decode", 1)

    assert stack.configured == stack.known == stack.running == {"prefill-0", "decode-0"}
