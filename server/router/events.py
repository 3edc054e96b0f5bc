"""What happens in the stack, for those who watch: `GET /admin/events`, one server-sent event each.

Watchers that do not read are cut off, not waited for.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

MAX_BEHIND = 1000


class Events:
    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._number = itertools.count(1)

    def say(self, kind: str, **fields: Any) -> None:
        data = msgspec.json.encode({"version": 1, "at": round(time.time(), 3), **fields})
        event = b"id: %d\nevent: %s\ndata: %s\n\n" % (next(self._number), kind.encode(), data)
        for queue in list(self._queues):
            if queue.qsize() >= MAX_BEHIND:
                self._queues.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(event)

    def close(self) -> None:
        """Ends every watcher's stream."""
        for queue in self._queues:
            queue.put_nowait(None)

    async def watch(self) -> AsyncGenerator[bytes, None]:
        with self._queue() as queue:
            yield b": watching\n\n"  # so that a watcher knows at once that it is heard
            while (event := await queue.get()) is not None:
                yield event

    @contextlib.contextmanager
    def _queue(self) -> Iterator[asyncio.Queue[bytes | None]]:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)
