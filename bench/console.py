"""What an open `pdctl tui` costs, and how soon it answers a key: the real command in a real terminal (tmux, 120x36).

It looks at a router that is played here, over HTTP as at any other, once a second; every figure moves with every frame.

    python -m bench.console [--seconds 60] [--check]

`--check` ends with 1 where 8 workers take 4 % of a core, or 100 take 15 %, or the median key is answered after 100 ms.
Run it on an otherwise idle machine.
"""

import argparse
import contextlib
import http.server
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.stack.harness import ROOT, eventually
from tests.tui.fake import load, request, snapshot, worker
from tests.tui.terminal import Terminal

# A key, and what stands on the screen once it was answered.
KEYS = (("2", "prefill-0 "), ("3", "Requests ("), ("4", "History"), ("5", "lines"), ("1", "p50/p95"))
LIMITS = {8: 0.04, 100: 0.15}
KEY_LIMIT_S = 0.1


@dataclass(frozen=True, slots=True)
class Cost:
    """`cpu`: share of a core. `keys_s`: from a key sent to its screen seen, tmux's own few ms in it."""

    workers: int
    frames: int
    cpu: float
    keys_s: tuple[float, ...]

    @property
    def misses(self) -> list[str]:
        said = (
            [f"{self.cpu:.1%} of a core is over {LIMITS[self.workers]:.0%}"] if self.cpu >= LIMITS[self.workers] else []
        )
        median = statistics.median(self.keys_s)
        return said + ([f"a key took {median * 1000:.0f} ms"] if median >= KEY_LIMIT_S else [])


class Router(http.server.ThreadingHTTPServer):
    """The admin API of a stack of so many workers, in figures that move."""

    daemon_threads = True

    def __init__(self, count: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self._count = count
        self.frames = 0

    def answer(self, path: str) -> Any:
        first = snapshot(time.time(), 100 + self.frames * 7)
        match path.partition("?")[0]:
            case "/admin/state":
                self.frames += 1
                return {**(first.state or {}), "workers": [self._worker(i) for i in range(self._count)]}
            case "/admin/requests":
                return {"requests": [request(f"chatcmpl-{self.frames + i:024x}") for i in range(100)]}
            case "/admin/knobs":
                return first.knobs
            case "/admin/audit":
                return {"rev": 3, "entries": first.audit}
        return None

    def _worker(self, i: int) -> Any:
        role = "prefill" if i % 4 == 0 else "decode"
        turn = self.frames
        figures = load(i % 4, (i + turn) % 60, (i * 37 + turn * 13) % 1000)
        return worker(f"{role}-{i}", role, "connected", figures)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Router

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        body = json.dumps(self.server.answer(self.path)).encode()
        self.send_response(200 if body != b"null" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def console(count: int) -> Iterator[tuple[Terminal, Router]]:
    router = Router(count)
    threading.Thread(target=router.serve_forever, daemon=True).start()
    command = [sys.executable, "-P", "-m", "pdctl", "tui", "--host", f"http://127.0.0.1:{router.server_port}"]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        terminal = Terminal(Path(folder), command, {"PDCTL_ADMIN_KEY": "any", "PYTHONPATH": path})
        try:
            eventually(lambda: "READY" in terminal.screen(), 30, "the first frame")
            yield terminal, router
        finally:
            terminal.close()
            router.shutdown()
            router.server_close()


def measure(count: int, seconds: float) -> Cost:
    with console(count) as (terminal, router):
        frames, before = router.frames, terminal.process.cpu_times()
        time.sleep(seconds)
        frames, after = router.frames - frames, terminal.process.cpu_times()
        cpu = (after.user + after.system - before.user - before.system) / seconds
        if frames < 0.8 * seconds:
            raise SystemExit(f"{frames} frames in {seconds:g} s: this machine is too busy to measure on")
        return Cost(count, frames, cpu, tuple(_answered(terminal, *key) for key in KEYS * 4))


def _answered(terminal: Terminal, key: str, said: str) -> float:
    started = time.monotonic()
    terminal.press(key)
    while said not in terminal.screen():
        if time.monotonic() - started > 10:
            raise SystemExit(f"{key}: no answer within 10 s\n{terminal.screen()}")
    return time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    misses = []
    print("workers  frames  CPU of a core  key p50   key max")
    for count in LIMITS:
        cost = measure(count, asked.seconds)
        median, most = statistics.median(cost.keys_s), max(cost.keys_s)
        print(
            f"{count:>7}  {cost.frames:>6}  {cost.cpu:>13.1%}  {median * 1000:>4.0f} ms  {most * 1000:>5.0f} ms",
            flush=True,
        )
        misses += [f"{count} workers: {said}" for said in cost.misses]
    for said in misses:
        print(f"missed: {said}", file=sys.stderr)
    return int(asked.check and bool(misses))


if __name__ == "__main__":
    sys.exit(main())
