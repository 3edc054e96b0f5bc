"""The console as a page on this machine, through textual-serve, which asks nobody for a password: loopback only.

1. A free port, or the one asked for; never the router's.
2. textual-serve starts one console a page. They are in our process group, and end with the page or with the server:
   one that textual-serve leaves behind is ended here.
3. Read-only, unless the admin key stands in PDCTL_ADMIN_KEY: whoever can open the page could use it.
"""

import contextlib
import os
import shlex
import signal
import socket
import sys

from pdctl.exits import Exit, UsageError
from pdctl.render import note
from pdctl.tui.start import ADMIN_KEY, Order

HOST = "127.0.0.1"


def serve(order: Order, port: int) -> int:
    """Until Ctrl-C. Raises UsageError."""
    try:
        from textual_serve.server import Server
    except ImportError as error:
        raise UsageError("tui --web needs textual-serve", help="pip install 'pdctl[web]'") from error
    port = port or _free_port()
    note(f"the console is at http://{HOST}:{port}  (Ctrl-C ends it; the servers keep running)")
    # A group of our own, so that everything textual-serve starts can be ended with it.
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    try:
        Server(command(order), host=HOST, port=port, title="pdctl").serve()
    finally:
        _end_group()
    return Exit.OK


def command(order: Order) -> str:
    """What a page runs."""
    words = [sys.executable, "-P", "-m", "pdctl", "--state-dir", str(order.root), "tui"]
    words += [order.name] if order.name else []
    is_read_only = order.is_read_only or not os.environ.get(ADMIN_KEY)
    words += ["--read-only"] if is_read_only else []
    words += ["--replay", order.replay] if order.replay else []
    words += ["--theme", order.theme] if order.theme else []
    return shlex.join(words)


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def _end_group() -> None:
    """Whatever is left of our group but us."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpgrp(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
