"""A server whose times are known: a whole router before a played worker that says its tokens by the clock.

The first token leaves `--ttft` ms after the worker has heard of a prompt, and then one each `--tpot` ms. Every moment
is counted from the first, so delays do not add up. What the router takes comes on top, as it does in any stack; its
record of a request (/admin/requests) says what the two were together.

    python -m bench.steady [--ttft 100] [--tpot 20] [--streams 8] [--core 0]

Says its URL and its admin key, and ends with its stdin; then says how late tokens left, p50 and p99 in ms.
"""

import argparse
import asyncio
import gc
import os
import selectors
import sys
from typing import Any, Protocol

from bench.router import SECRET, PlayedWorker, router_before
from server.sequence import SeqId, Token


class Clock(Protocol):
    """What is wanted of an event loop."""

    def time(self) -> float: ...
    def call_at(self, when: float, callback: Any, *args: Any) -> Any: ...


class SteadyWorker(PlayedWorker):
    """`ttft` and `tpot` in seconds. `late`: how far behind its moment each token left."""

    def __init__(self, facts: dict[str, str], words: list[Token], clock: Clock, ttft: float, tpot: float) -> None:
        super().__init__(facts, words)
        self.late: list[float] = []
        self._clock, self._ttft, self._tpot = clock, ttft, tpot

    def begin(self, id: SeqId) -> None:
        due = self._clock.time() + self._ttft
        self._clock.call_at(due, self._say, id, due)

    def _say(self, id: SeqId, due: float) -> None:
        if id not in self.tokens:  # aborted
            return
        self.late.append(self._clock.time() - due)
        self.step([id])
        if id in self.tokens:
            self._clock.call_at(due + self._tpot, self._say, id, due + self._tpot)


async def serve(args: argparse.Namespace) -> None:
    clock = asyncio.get_running_loop()

    def played(facts: dict[str, str], words: list[Token]) -> SteadyWorker:
        return SteadyWorker(facts, words, clock, args.ttft / 1e3, args.tpot / 1e3)

    async with router_before(played, core=args.core, streams=args.streams) as (worker, _, port):
        gc.freeze()
        print(f"http://127.0.0.1:{port}", SECRET.decode(), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        late = sorted(worker.late) or [0.0]
        print(*(f"{1e3 * late[int(share * len(late))]:.2f}" for share in (0.5, 0.99)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ttft", type=float, default=100.0, help="ms")
    parser.add_argument("--tpot", type=float, default=20.0, help="ms")
    parser.add_argument("--streams", type=int, default=8, help="at most at once")
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)), help="of worker and router")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    # select() waits to the microsecond, epoll to the next millisecond.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(serve(args))


if __name__ == "__main__":
    main()
