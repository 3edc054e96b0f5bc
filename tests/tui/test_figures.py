"""What stands on a real terminal over a real stack under load is what /metrics says.

A screen says when its figures were read, for its header has the stack's age in seconds; /metrics is asked twenty times
a second beside it. Every gauge has to lie within what /metrics said in the refresh in which it was read, give or take
5 %; a counter that stands still has to be equal.
"""

import math
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdctl.rundir import StackDir
from tests.stack.harness import PD, Running, complete, eventually, running
from tests.tui.terminal import Terminal

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
REFRESH_S = 1.0
Values = dict[str, float]  # "pdctl_worker_running decode-0": 3.0
Read = Callable[[Values], float]


class Metrics:
    """What /metrics says, from the moment this is made."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/metrics"
        self._samples: list[tuple[float, Values]] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        with httpx.Client(timeout=10) as client:
            while not self._ends.wait(0.05):
                asked_at = time.time()
                values = parsed(client.get(self._url).text)
                self._samples += [(asked_at, values), (time.time(), values)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(10)

    @property
    def begun_at(self) -> float:
        return self._samples[0][0] if self._samples else math.inf

    @property
    def newest_at(self) -> float:
        return self._samples[-1][0] if self._samples else -math.inf

    def between(self, low: float, high: float, read: Read) -> list[float]:
        return [read(values) for at, values in self._samples if low <= at <= high]


def parsed(text: str) -> Values:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [sample.labels[key] for key in ("worker", "le") if key in sample.labels]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


def of(name: str, *workers: str) -> Read:
    return lambda values: sum(values[f"pdctl_worker_{name} {worker}"] for worker in workers)


def plus(*parts: Read) -> Read:
    return lambda values: sum(part(values) for part in parts)


def kv_percent(worker: str) -> Read:
    used, total = plus(of("blocks_used", worker), of("blocks_granted", worker)), of("blocks_total", worker)
    return lambda values: 100 * used(values) / total(values)


P, D = "prefill-0", "decode-0"
# Box of the overview, where in it the figure stands, and what of /metrics it is.
GAUGES: dict[str, tuple[int, str, Read]] = {
    "router queue": (0, r"queue .* (\d+)/50", lambda values: values["pdctl_requests_waiting"]),
    "router running": (0, r"run (\d+)", lambda values: values["pdctl_requests_running"]),
    "prefill queue": (1, r"queue .* (\d+)/8", plus(of("waiting", P), of("receiving", P))),
    "prefill running": (1, r"run (\d+) ", of("running", P)),
    "prefill kv": (1, r"kv .* (\d+)%", kv_percent(P)),
    "in flight": (2, r"in flight (\d+)", of("receiving", D)),
    "not granted": (2, r"wait (\d+)", of("expected", D)),
    "ring": (2, r"ring .*?(\d+)/\d+", lambda values: of("slots_total", D)(values) - of("slots_free", D)(values)),
    "resent": (2, r"resent (\d+)", lambda values: values["pdctl_kv_transfer_resends_total"]),
    "decode running": (3, r"run (\d+)/64", of("running", D)),
    "decode queue": (3, r"wait (\d+)", plus(of("waiting", D), of("receiving", D))),
    "decode kv": (3, r"kv .* (\d+)%", kv_percent(D)),
    "preempted": (3, r"preempted (\d+)", of("preemptions", D)),
}


def boxes(screen: str) -> list[str]:
    """The four boxes of the overview, each as its lines."""
    rows = [line[1:-1].split("││") for line in screen.splitlines() if line.count("││") == 3]
    assert len(rows) == 8, screen
    return ["\n".join(column) for column in zip(*rows, strict=True)]


def figure(box: str, pattern: str) -> float:
    found = re.search(pattern, box)
    assert found is not None, f"no {pattern} in\n{box}"
    return float(found[1])


def read_at(screen: str, ready_at: float) -> float:
    """When, at the earliest, the figures on the screen were read; within a second of it they were."""
    found = re.search(r" up (\d+):(\d\d) ", screen)
    assert found is not None, screen
    return ready_at + 60 * int(found[1]) + int(found[2])


@pytest.fixture
def stack(tmp_path: Path, tiny_model_dir: Path) -> Iterator[Running]:
    """Its KV pools are so small that the load shows in them."""
    with running(tmp_path, PD, model=tiny_model_dir, kv_bytes="4MiB") as stack:
        yield stack


@pytest.fixture
def terminal(stack: Running, tmp_path: Path) -> Iterator[Terminal]:
    command = [sys.executable, "-P", "-m", "pdctl", "tui", stack.name]
    env = {key: stack.env[key] for key in ("PDCTL_STATE_DIR", "PYTHONPATH")}
    # A size that somebody exported before is not this terminal's.
    it = Terminal(tmp_path, command, env | {"COLUMNS": "80", "LINES": "24"})
    eventually(lambda: "READY" in it.screen(), 30, "the first frame")
    yield it
    it.close()


def test_figures_on_a_real_terminal_are_those_of_metrics(stack: Running, terminal: Terminal) -> None:
    url, ends = stack.url, threading.Event()
    record = StackDir(stack.folder).read()
    assert record is not None
    ready_at = record.ready_at
    before = parsed(httpx.get(f"{url}/metrics").text)

    def load(seed: int) -> None:
        while not ends.is_set():
            complete(url, [(seed * 37 + i) % 500 for i in range(200)], max_tokens=800 + 150 * (seed % 5))
            seed += 6

    threads = [threading.Thread(target=load, args=(seed,), daemon=True) for seed in range(4)]
    seen: dict[str, set[float]] = {name: set() for name in GAUGES}

    def look(metrics: Metrics) -> float:
        """One screen, every figure of it; returns when it was read, 0 for one from before /metrics was watched."""
        screen = terminal.screen()
        at = read_at(screen, ready_at)
        low, high = at - REFRESH_S, at + 1 + REFRESH_S
        if low <= metrics.begun_at:
            return 0.0
        eventually(lambda: metrics.newest_at >= high, 10, "metrics of the moment after")
        for name, (box, pattern, read) in GAUGES.items():
            shown, said = figure(boxes(screen)[box], pattern), metrics.between(low, high, read)
            # Workers report five times a second, so nothing of theirs is missed; the router's own counts are of the
            # moment: one request may have come or gone between two looks. Half is what rounding takes.
            slack = 1.0 if name.startswith("router") else 0.5
            assert min(said) * 0.95 - slack <= shown <= max(said) * 1.05 + slack, (name, shown, said, screen)
            seen[name].add(shown)
        return at

    try:
        # 1. Under load: six frames, each whole.
        for thread in threads:
            thread.start()
        frames: set[float] = set()
        with Metrics(url) as metrics:
            eventually(lambda: frames.add(look(metrics)) or len(frames - {0.0}) >= 6, 60, "six frames")
        assert all(max(seen[name]) > 0 for name in ("router running", "decode running", "decode kv")), seen
        # 2. The transfer's figures of the minute are those of the same transfers in /metrics.
        screen = terminal.screen()
        after = parsed(httpx.get(f"{url}/metrics").text)
        moved, count = (
            after[name] - before[name] for name in ("pdctl_kv_transfer_bytes_total", "pdctl_kv_transfer_seconds_count")
        )
        size = figure(boxes(screen)[2], r"size +([\d.]+) KiB/req")
        assert size * 1024 == pytest.approx(moved / count, rel=0.05)
        # 3. A watermark that is moved moves on the screen, and so says the router.
        assert "lo 80% ┊  hi 92% ┃" in boxes(screen)[3]
        stack.admin("/admin/knobs", "PATCH", {"values": {"decode.kv_low": 0.3, "decode.kv_high": 0.4}}, url)
        eventually(lambda: "lo 30% ┊  hi 40% ┃" in boxes(terminal.screen())[3], 10, "the marks moved")
    finally:
        ends.set()
        for thread in threads:
            thread.join(60)
    # 4. At rest every counter stands still: all that the screen shows of decode-0 are equal.
    eventually(lambda: re.search(r"run 0\b", terminal.screen()), 15, "nothing runs")
    terminal.press("2", "Down", "Down", "Enter")
    eventually(lambda: "received_bytes" in terminal.screen(), 10, "the counters of decode-0")

    def both() -> tuple[dict[str, float], dict[str, float]]:
        values = parsed(httpx.get(f"{url}/metrics").text)
        shown = {name: float(value) for name, value in re.findall(r"│ ([a-z_]+) +(\d+) +│", terminal.screen())}
        said = {name: values[key] for name in shown if (key := f"pdctl_worker_{name} {D}") in values}
        return {name: shown[name] for name in said}, said

    eventually(lambda: len({tuple(figures.items()) for figures in both()}) == 1, 10, "the frame after the last count")
    shown, _ = both()
    assert {"received", "resends", "checksum_failures", "lost", "preemptions"} < shown.keys()
    assert shown["received"] > 0
    # 5. Leaving leaves the servers.
    terminal.press("q")
    eventually(lambda: "left 0" in terminal.screen(), 10, "the console left")
    assert stack.status()["state"] == "ready"
