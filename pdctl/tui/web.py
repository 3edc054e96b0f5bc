"""The console as a page on this machine, through textual-serve, which asks nobody for a password: loopback only.

1. A free port, or the one asked for; never the router's.
2. textual-serve runs in a process group of its own and starts one console a page in it. It waits long for open pages
   and can leave a console spinning: when we end, for whatever reason, the whole group does.
3. Read-only, unless the admin key stands in PDCTL_ADMIN_KEY: whoever can open the page could use it.
"""

import contextlib
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from types import FrameType

from pdctl.exits import Exit, UsageError
from pdctl.render import note
from pdctl.tui.start import ADMIN_KEY, Order

HOST = "127.0.0.1"
GRACE_S = 1.0
_PR_SET_PDEATHSIG = 1


def serve(order: Order, port: int) -> int:
    """Until Ctrl-C or SIGTERM. Raises UsageError."""
    if find_spec("textual_serve") is None:
        raise UsageError("tui --web needs textual-serve", help="pip install 'pdctl[web]'")
    port = port or _free_port()
    argv = [sys.executable, "-P", "-m", "pdctl.tui.web", str(port), command(order)]
    signal.signal(signal.SIGTERM, _interrupt)
    server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    note(f"the console is at http://{HOST}:{port}  (Ctrl-C ends it; the servers keep running)")
    try:
        return Exit.FAILURE if server.wait() else Exit.OK
    except KeyboardInterrupt:
        return Exit.OK
    finally:
        _end_group(server)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end_group(server: "subprocess.Popen[bytes]") -> None:
    """SIGTERM, a moment, SIGKILL, to textual-serve and every console that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def command(order: Order) -> str:
    """What a page runs."""
    words = [sys.executable, "-P", "-m", "pdctl", "--state-dir", str(order.root), "tui"]
    words += [order.name] if order.name else []
    words += ["--host", order.host] if order.host else []
    is_read_only = order.is_read_only or not os.environ.get(ADMIN_KEY)
    words += ["--read-only"] if is_read_only else []
    words += ["--replay", order.replay] if order.replay else []
    words += ["--theme", order.theme] if order.theme else []
    return shlex.join(words)


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def _main(port: int, command: str) -> None:
    """textual-serve itself. It hears of our end even where we were killed."""
    from textual_serve.server import Server

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    Server(command, host=HOST, port=port, title="pdctl").serve()


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
