"""The router process: `python -P -m server.router --boot FILE`.

1. Read Boot, load the tokenizer, listen (on the inherited socket, else on the profile's port): 503 from here on.
2. Connect to the workers, probe every route, say `ready` on status_fd.
3. First SIGTERM or SIGINT: drain. New work gets 503 with Retry-After, what runs may end within supervise.stop_timeout.
   Second one: stop now.
4. Exit 0; 1 with an `error` line on status_fd when it could not start.
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Self

import uvicorn
import uvloop
from starlette.types import ASGIApp

from server import logs
from server.boot import Boot, Status
from server.errors import PdctlError, StartError
from server.router.protocol import Protocol
from server.router.stack import Stack

logger = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_S = (
    75  # longer than clients' pools keep a connection, so that they close first and never write to a dead one
)


class HttpServer(uvicorn.Server):
    """uvicorn without its own ideas about signals: draining comes before it stops accepting."""

    @classmethod
    def of(cls, app: ASGIApp) -> Self:
        return cls(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )

    async def end(self, *, now: bool) -> None:
        """Stops accepting; a last response has a second to be read. `now` cuts what runs: its aborts go out first."""
        if now:
            self.config.timeout_graceful_shutdown = 0
        self.should_exit = True
        running = list(self.server_state.tasks)
        if now:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Shutdown:
    """First signal: drain. Second: force."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.force = asyncio.Event()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal)

    def on_signal(self) -> None:
        (self.force if self.drain.is_set() else self.drain).set()


async def serve(boot: Boot, status: Status, shutdown: Shutdown) -> None:
    """Raises StartError."""
    listener = open_listener(boot)
    stack = Stack.create(boot, status)
    gc.freeze()  # tokenizer and libraries stay: looking through them again and again takes a twentieth of the time
    server = HttpServer.of(stack.app)
    http = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    stack.start()
    ready = asyncio.create_task(_announce(stack, boot, status), name="ready")
    draining = asyncio.create_task(shutdown.drain.wait())
    try:
        await asyncio.wait((http, draining, stack.prober.failed), return_when=asyncio.FIRST_COMPLETED)
        if stack.prober.failed.done():
            raise stack.prober.failed.result()
        stack.health.is_draining = True
        await _drained(stack, shutdown, boot.config.supervise.stop_timeout)
        stack.events.close()  # watchers stay for as long as there is something to see
    finally:
        for task in (ready, draining):
            task.cancel()
        await asyncio.gather(
            server.end(now=stack.dispatcher.in_flight > 0), http, ready, draining, return_exceptions=True
        )
        await stack.stop()


async def _announce(stack: Stack, boot: Boot, status: Status) -> None:
    await stack.prober.started.wait()
    status.ready({"models": boot.config.served_names, "routes": stack.prober.detail})
    logger.info("ready", extra={"fields": {"routes": len(stack.dispatcher.routes)}})


async def _drained(stack: Stack, shutdown: Shutdown, timeout_s: float) -> None:
    """Until nothing is in flight, the time is over, or a second signal."""
    logger.info("draining", extra={"fields": {"in_flight": stack.dispatcher.in_flight}})
    waits = (asyncio.create_task(stack.dispatcher.idle.wait()), asyncio.create_task(shutdown.force.wait()))
    _, pending = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    if stack.dispatcher.in_flight:
        logger.warning("cut short", extra={"fields": {"in_flight": stack.dispatcher.in_flight}})


def open_listener(boot: Boot) -> socket.socket:
    """Raises StartError."""
    if boot.listen_fd is not None:
        listener = socket.socket(fileno=boot.listen_fd)
        listener.setblocking(False)
        return listener
    router = boot.config.router
    family = socket.AF_INET6 if ":" in router.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((router.host, router.port))
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on {router.host} port {router.port}: {error}") from error
    return listener


async def run(boot: Boot, status: Status) -> None:
    shutdown = Shutdown()
    shutdown.install()
    await serve(boot, status, shutdown)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -P -m server.router")
    parser.add_argument("--boot", required=True, help="the file that the supervisor wrote")
    logs.setup("router")
    status = Status(None)
    try:
        boot = Boot.load(parser.parse_args(argv).boot)
        status = Status(boot.status_fd)
        uvloop.run(run(boot, status))
    except PdctlError as error:
        status.error(error.message, error.help)
        logger.error("%s", error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
