"""A console over N workers that never were, for measuring what it costs: python -m tests.tui.fake_console N"""

import sys
import time

import msgspec

from pdctl.snapshot import Snapshot
from pdctl.tui.app import Console
from tests.tui.fake import FakeSource, load, process, snapshot, worker


class Many(FakeSource):
    """Every figure moves with every frame, as it would under load."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self._frames = 0

    def poll(self) -> Snapshot:
        self._frames += 1
        turn, now = self._frames, time.time()
        names = [f"decode-{i}" for i in range(self._count)]
        workers = [
            worker(name, "decode", "connected", load(i % 4, (i + turn) % 60, (i * 37 + turn * 13) % 1000))
            for i, name in enumerate(names)
        ]
        first = snapshot(now, 100 + turn * 7)
        assert first.stack is not None and first.state is not None
        processes = [process(name, "decode", 100 + i) for i, name in enumerate(names)]
        processes.append(process("router", "router", 9))
        return msgspec.structs.replace(
            first,
            stack=first.stack | {"processes": processes},
            state=first.state | {"workers": workers},
            logs=[msgspec.structs.replace(line, at=now) for line in first.logs * 100],
        )

    def earlier(self) -> list[Snapshot]:
        return []


if __name__ == "__main__":
    Console(Many(int(sys.argv[1]))).run()
