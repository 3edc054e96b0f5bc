"""`python -P -m pdctl.supervise ORDER`: the supervisor as a process. `pdctl up` becomes it, `pdctl up -d` starts it."""

from pdctl.quiet import quiet_until_ready

quiet_until_ready()  # until the supervisor listens for Ctrl-C itself

import asyncio
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from pdctl.exits import Exit, exit_of
from pdctl.logs import JsonFormatter
from pdctl.render import Progress, note
from pdctl.rundir import Order, StackDir
from pdctl.supervisor import Emit, Supervisor
from server.config import Config
from server.errors import PdctlError


class PipeSink:
    """Events for a `pdctl up -d` that waits at the other end; it may leave at any time."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.set_blocking(fd, False)

    def __call__(self, event: dict[str, Any]) -> None:
        if self._fd < 0:
            return
        try:
            os.write(self._fd, msgspec.json.encode(event) + b"\n")
        except BlockingIOError:
            pass  # a stopped terminal; the state is in stack.json all the same
        except OSError:
            os.close(self._fd)
            self._fd = -1


def main(argv: list[str]) -> int:
    file = Path(argv[0])
    order = msgspec.json.decode(file.read_bytes(), type=Order)
    file.unlink()
    stack_dir = StackDir(Path(order.stack_dir))
    handler = logging.FileHandler(stack_dir.log("supervisor"))
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    emit = _sink(order)
    try:
        return int(asyncio.run(_run(order, stack_dir, emit)))
    except PdctlError as error:
        logging.getLogger("pdctl").error("%s", error.message)
        return int(exit_of(error))
    except Exception as error:
        # Nobody reads a detached supervisor's traceback but in its log; who waits gets one line.
        logging.getLogger("pdctl").exception("the supervisor failed")
        log = stack_dir.log("supervisor")
        emit({"event": "failed", "code": "E_FAILED", "message": f"{error} (log: {log})", "help": "", "exit": 1})
        return int(Exit.FAILURE)


async def _run(order: Order, stack_dir: StackDir, emit: Emit) -> Exit:
    supervisor = Supervisor(
        stack_dir,
        Config.model_validate(order.config),
        emit,
        run_id=order.run_id,
        profile_file=order.profile_file,
        start_timeout_s=order.start_timeout_s,
    )
    return await supervisor.run()


def _sink(order: Order) -> Emit:
    if order.events_fd >= 0:
        return PipeSink(order.events_fd)
    progress = Progress(order.progress)

    def emit(event: dict[str, Any]) -> None:
        progress.event(event)
        if event["event"] == "ready":
            if order.progress != "json":
                print(f"{event['url']}/v1", flush=True)
                note("Ctrl-C stops it; pdctl status, logs and smoke from another terminal")
            _notify("READY=1")
        elif event["event"] == "draining":
            _notify("STOPPING=1")

    return emit


def _notify(text: str) -> None:
    """Tells systemd, where it asked to be told."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            sock.sendall(text.encode())
    except OSError:
        logging.getLogger("pdctl").warning("systemd's socket %s does not answer", address)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
