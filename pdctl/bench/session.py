"""A whole bench: modes in turn, the same loads against each, rounds interleaved.

Rounds go A B, B A, A B ...: what drifts over the minutes hits both sides alike, and a mode that ends one round begins
the next without a restart.
"""

import asyncio
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pdctl.bench import calibrate, cells
from pdctl.bench.calibrate import Calibration
from pdctl.bench.cells import Cell, Key
from pdctl.bench.driver import Driver, Run
from pdctl.bench.gauges import Gauges, watch
from pdctl.bench.loads import VOCAB, Item, Loop, Shape, endless, from_trace, items
from pdctl.bench.target import Mode, Stage, Target
from pdctl.bench.traces import read as read_trace
from pdctl.exits import UsageError
from pdctl.render import note

WARM_UP = (16, 4)  # prompt, output
MORE = 1_000_000  # to the seed of what keeps users at work


@dataclass(frozen=True, slots=True)
class Plan:
    """What a bench does. `requests` a cell and round, beside the first wave; `limit_s` ends a cell early. No run
    of a cell is begun that would last beyond `within_s` (0: no end), judged by its longest so far, or that of any."""

    modes: tuple[Mode, ...]
    keys: tuple[Key, ...]
    rounds: int = 3
    requests: int = 16
    waves: int = 2
    limit_s: float = 0.0
    within_s: float = 0.0
    ttft_s: float = 0.8
    tpot_s: float = 0.04
    is_calibrating: bool = False
    max_len: int = 0
    root: Path = field(default_factory=Path)
    key: str = "none-needed"
    model: str = ""
    seed: int = 1
    vocab: int = VOCAB

    @property
    def num_runs(self) -> int:
        return len(self.modes) * len(self.keys) * self.rounds


class Session:
    def __init__(
        self,
        plan: Plan,
        tell: Callable[[int, int, str], None],
        keep: Callable[[dict[str, Any]], None] = lambda result: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keep` gets what there is after each round of a mode, so that a bench that is cut short still counts."""
        self._plan = plan
        self._tell = tell
        self._keep = keep
        self._cells = {(m.name, k): Cell(m.name, k) for m in plan.modes for k in plan.keys}
        self._targets: dict[str, Target] = {}
        self._calibration = calibrate.empty()
        self._calibrated: set[bool] = set()  # kinds, with pools and without: a hybrid's workers are those of its pools
        self._num_done = 0
        self._clock = clock
        self._ends = clock() + plan.within_s if plan.within_s else float("inf")
        self._took: dict[Key, float] = {}  # the longest run of each, in any mode
        self._start_s = 0.0  # the longest start, warm-up included

    def run(self) -> dict[str, Any]:
        """The result. Whatever stack it started is down when this returns or raises. Raises UsageError where
        `within_s` was over before anything was measured."""
        plan, started = self._plan, time.time()
        with Stage(plan.root, plan.key, plan.model) as stage:
            for number in range(plan.rounds):
                for mode in plan.modes[:: -1 if number % 2 else 1]:
                    if not any(self._has_time(key, 0.0 if stage.has(mode) else self._start_s) for key in plan.keys):
                        continue
                    began = self._clock()
                    target, is_new = stage.on(mode)
                    self._targets[mode.name] = target
                    try:
                        asyncio.run(self._round(target, number, began if is_new else None))
                    finally:
                        self._keep(self._result(started))
        if not self._num_done:
            raise UsageError(
                f"nothing could be measured in {plan.within_s:g} s", help="--within with more than a start takes"
            )
        return self._result(started)

    def _has_time(self, key: Key, before_s: float = 0.0) -> bool:
        """Whether a run of `key` that begins in `before_s` ends in time, if it takes as long as its longest so far, or
        as any did."""
        return self._clock() + before_s + self._took.get(key, max(self._took.values(), default=0.0)) < self._ends

    async def _round(self, target: Target, number: int, began: float | None) -> None:
        """`began`: when the mode was started, if that was for this round."""
        async with Driver(target.server) as driver:
            if began is not None:
                await self._warm_up(driver, target)
                self._start_s = max(self._start_s, self._clock() - began)
            if self._plan.is_calibrating and target.has_pools not in self._calibrated:
                self._calibrated.add(target.has_pools)
                points = Calibration(driver, target, self._calibration, self._plan.vocab, note)
                await points.run(self._longest())
            for index, key in enumerate(self._plan.keys):
                if not self._has_time(key):
                    continue
                cell, began = self._cells[target.mode.name, key], self._clock()
                seed = self._plan.seed + 1000 * number + index
                load = self._load(key, seed)
                self._tell(self._num_done, self._plan.num_runs, f"{target.mode.name} {key}")
                cell.runs.append(await self._measure(driver, target, key, load, seed, cell))
                self._took[key] = max(self._took.get(key, 0.0), self._clock() - began)
                self._num_done += 1

    def _longest(self) -> int:
        """Prompt of the grid; a trace has its own lengths, and calibrates the usual ones."""
        grid = max(key.shape.longest for key in self._plan.keys)
        return grid or min(calibrate.PROMPTS[-1], self._plan.max_len or calibrate.PROMPTS[-1])

    async def _warm_up(self, driver: Driver, target: Target) -> None:
        """The smallest and the longest prompt, once for each worker of a pool: kernels chosen, memory touched."""
        loop = Loop(concurrency=max(2, target.num_readers, target.num_writers))
        for length in (WARM_UP[0], self._longest()):
            shape = Shape(length, WARM_UP[1], vocab=self._plan.vocab)
            await driver.run(items(shape, loop, loop.concurrency, seed=length), loop)

    async def _measure(self, driver: Driver, target: Target, key: Key, load: list[Item], seed: int, cell: Cell) -> Run:
        gauges = Gauges()
        watcher = asyncio.create_task(watch(target.server.url, target.server.key, gauges))
        try:
            more = () if key.loop.is_open else endless(key.shape, key.loop, seed + MORE)
            return await driver.run(load, key.loop, more=more, limit_s=self._plan.limit_s)
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            if gauges.points:
                cell.gauges.append(gauges)

    def _load(self, key: Key, seed: int) -> list[Item]:
        loop, plan = key.loop, self._plan
        if loop.trace is not None:
            return from_trace(read_trace(loop.trace, plan.requests), loop.rate, plan.max_len, seed, plan.vocab)
        count = max(plan.requests, plan.waves * loop.concurrency) + loop.first_wave
        return items(key.shape, loop, count, seed)

    def _result(self, started: float) -> dict[str, Any]:
        plan = self._plan
        found = [cell for cell in self._cells.values() if cell.runs]
        calibration = self._calibration
        if not plan.is_calibrating:
            calibration = calibrate.empty()
            derive(found, self._targets, calibration)
        return {
            "version": 1,
            "kind": "bench",
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
            "seconds": round(time.time() - started, 1),
            "box": box(),
            "slo": {"ttft_ms": plan.ttft_s * 1e3, "tpot_ms": plan.tpot_s * 1e3},
            "rounds": plan.rounds,
            "runs": [self._num_done, plan.num_runs],
            "not_measured": [f"{cell.mode} {cell.key}" for cell in self._cells.values() if not cell.runs],
            "is_whole": self._num_done == plan.num_runs,
            "modes": [self._targets[m.name].to_json() for m in plan.modes if m.name in self._targets],
            "cells": [cells.to_json(cell, plan.ttft_s, plan.tpot_s) for cell in found],
            "calibration": calibration,
        }


def derive(found: Sequence[Cell], targets: dict[str, Target], out: dict[str, Any]) -> None:
    """Without --calibrate: prompts that were read alone, and median gaps. These cells then count as fitted."""
    for cell in found:
        target, shape, loop = targets[cell.mode], cell.key.shape, cell.key.loop
        if not loop.concurrency or not target.layout or not cell.flat:
            continue
        if loop.concurrency == 1:
            cell.is_fitted = True
            for sample in cell.flat:
                calibrate.read_point(sample, target, shape.prompt, out, [])
        gaps = [g for r in cell.gaps() for g in r]
        if gaps and loop.concurrency % target.num_writers == 0:
            cell.is_fitted = True
            role, batch = "decode" if target.has_pools else "colocated", loop.concurrency // target.num_writers
            gap = sorted(gaps)[len(gaps) // 2]
            out["decode"].append(
                [role, batch, shape.prompt + shape.output / 2, round(gap, 6), int(loop.concurrency > 1)]
            )


def cpu_name() -> str:
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return name
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)


def box() -> dict[str, Any]:
    """What it ran on, as far as this machine is concerned."""
    return {
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "os": platform.platform(terse=True),
        "python": platform.python_version(),
        "load_average": [round(x, 2) for x in psutil.getloadavg()],
    }
