"""What a change of a pool leaves behind where a step of it fails: the configuration names the workers there are."""

import asyncio
from typing import Any

import pytest

from pdctl import scale
from pdctl.exits import TimedOut
from pdctl.launch import Machine
from pdctl.scale import Scaler
from server.config import Config
from server.errors import PdctlError, StartError

FOUR = Machine(cpus=(4, 5, 6, 7), gpus=(), memory=1 << 34)


class Stack:
    """A supervisor and the router's admin API, as far as a Scaler knows them."""

    def __init__(self, machine: Machine = FOUR, **pools: Any) -> None:
        self.config = Config.model_validate(
            {name: {"workers": len(cpus), "cpus": cpus} for name, cpus in pools.items()}
        )
        self.machine = machine
        self.max_prefill = 4
        self.running = {spec.name for spec in self.config.workers}
        self.known = set(self.running)
        self.drained: set[str] = set()
        self.fails: set[str] = set()  # do not start
        self.is_stuck: set[str] = set()  # do not end what they have

    def use(self, config: Config) -> None:
        self.config = config

    def address(self, name: str) -> str:
        return f"unix:{name}"

    async def start_worker(self, name: str) -> None:
        assert name in {spec.name for spec in self.config.workers}
        if name in self.fails:
            raise StartError(f"{name}: no memory")
        self.running.add(name)

    async def end_worker(self, name: str) -> None:
        self.running.discard(name)

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        match [method, *path.strip("/").split("/")[1:]]:
            case ["POST", "workers"]:
                self.known.add(body["name"])
            case ["POST", "workers", name, "drain"]:
                self.drained.add(name)
            case ["POST", "workers", name, "resume"]:
                self.drained.discard(name)
            case ["DELETE", "workers", name]:
                self.known.discard(name)
            case ["GET", "state"]:
                states = {name: "drained" if name in self.drained - self.is_stuck else "up" for name in self.known}
                return {"workers": [{"name": name, "state": state} for name, state in states.items()]}
        return {}

    @property
    def configured(self) -> set[str]:
        return {spec.name for spec in self.config.workers}

    def change(self, step: str, *args: Any) -> None:
        scaler = Scaler(self, self)  # type: ignore[arg-type]
        asyncio.run(getattr(scaler, step)(*args))


def test_cores_that_nobody_has_come_first() -> None:
    stack = Stack(prefill=[0], decode=[1])
    stack.change("scale", "decode", 3)
    assert stack.config.decode.cpus == [1, 2, 3]
    stack.change("scale", "decode", 4)
    assert stack.config.decode.cpus == [1, 2, 3, 1], "then those of the pool are shared"


def test_a_worker_that_does_not_start_leaves_those_before_it() -> None:
    """1. Of two more the second does not start. 2. What there is can be scaled down, and up again."""
    stack = Stack(prefill=[0], decode=[1])
    stack.fails = {"decode-2"}
    with pytest.raises(StartError, match="no memory"):
        stack.change("scale", "decode", 3)
    assert stack.configured == stack.running == stack.known == {"prefill-0", "decode-0", "decode-1"}
    stack.change("scale", "decode", 1)
    stack.fails = set()
    stack.change("scale", "decode", 3)
    assert stack.configured == stack.running == stack.known == {"prefill-0", *(f"decode-{i}" for i in range(3))}


def test_a_worker_that_does_not_drain_carries_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "DRAIN_S", 0.5)
    stack = Stack(prefill=[0], decode=[1, 2, 3])
    stack.is_stuck = {"decode-1"}
    with pytest.raises(TimedOut, match="decode-1"):
        stack.change("scale", "decode", 1)
    assert stack.configured == stack.running == stack.known == {"prefill-0", "decode-0", "decode-1"}
    assert not stack.drained - {"decode-2"}


def test_a_role_that_cannot_be_placed_is_refused_before_anybody_drains() -> None:
    stack = Stack(Machine(cpus=(4, 5), gpus=(), memory=1 << 34), prefill=[0, 1], decode=[2, 3])
    with pytest.raises(PdctlError, match="core"):
        stack.change("turn", "prefill-1", "decode")
    assert stack.configured == stack.running == stack.known
    assert not stack.drained
