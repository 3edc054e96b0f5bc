"""From the command line to a running console: which source, which settings."""

import os
from dataclasses import dataclass
from pathlib import Path

from pdctl.client import Client
from pdctl.exits import Exit, UsageError
from pdctl.rundir import find
from pdctl.tui.source import ReplaySource, RouterSource, Source, StackSource
from server.viewing import view_twin

ADMIN_KEY = "PDCTL_ADMIN_KEY"


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for."""

    name: str | None
    root: Path
    is_read_only: bool = False
    host: str = ""
    replay: str = ""
    theme: str = ""
    is_ascii: bool = False
    refresh_s: float | None = None
    has_mouse: bool = True


def run(order: Order) -> int:
    """Until `q`. Raises PdctlError."""
    import sys

    if order.host.startswith("ssh://"):
        return _over_ssh(order)
    source, tui = source_of(order)
    # Under textual-serve the page is the terminal.
    if not sys.stdout.isatty() and "TEXTUAL_DRIVER" not in os.environ:
        source.close()
        raise UsageError("the console needs a terminal", help="pdctl top --once, or pdctl status")
    if sys.stdout.isatty():
        for name in ("COLUMNS", "LINES"):  # the terminal knows its size; what a parent once exported may be another's
            os.environ.pop(name, None)
    from pdctl.tui.app import Console
    from pdctl.tui.themes import NAMES

    theme = order.theme or str(tui.get("theme") or "dark")
    if theme not in NAMES:
        raise UsageError(f"--theme {theme}: expected {', '.join(NAMES)}")
    refresh_s = order.refresh_s or float(str(tui.get("refresh") or 1.0))
    keymap = tui.get("keymap")
    app = Console(
        source,
        refresh_s=max(0.2, refresh_s),
        theme=theme,
        is_ascii=order.is_ascii,
        keymap=keymap if isinstance(keymap, dict) else None,
        has_terminal=True,
    )
    try:
        app.run(mouse=order.has_mouse)
    finally:
        source.close()
    return int(app.return_code or Exit.OK)


def source_of(order: Order) -> tuple[Source, dict[str, object]]:
    """And the profile's [tui], as far as it is known."""
    if order.replay:
        return ReplaySource(Path(order.replay).expanduser()), {}
    if order.host:
        url = order.host if "://" in order.host else f"http://{order.host}"
        key = os.environ.get(ADMIN_KEY, "")
        if not key:
            raise UsageError(f"--host {order.host} needs an admin or a view key in {ADMIN_KEY}")
        sent = view_twin(key.encode()).decode() if order.is_read_only else key
        return RouterSource(Client(url, sent, timeout_s=5.0), is_read_only=order.is_read_only), {}
    stack_dir = find(order.root, order.name)
    stack = stack_dir.read()
    tui = dict(stack.profile.get("tui") or {}) if stack is not None else {}
    return StackSource(stack_dir, is_read_only=order.is_read_only), tui


def _over_ssh(order: Order) -> int:
    """The console runs there, beside the supervisor's socket and the logs; only its screen travels."""
    box = order.host.removeprefix("ssh://").strip("/")
    if not box or box.startswith("-"):
        raise UsageError(f"--host {order.host}: expected ssh://[user@]box")
    words = ["pdctl", "tui", *([order.name] if order.name else [])]
    words += ["--read-only"] if order.is_read_only else []
    words += ["--ascii"] if order.is_ascii else []
    words += ["--theme", order.theme] if order.theme else []
    os.execvp("ssh", ["ssh", "-t", box, *words])  # noqa: S606 - the words above are ours


def web(order: Order, port: int) -> int:
    from pdctl.tui.web import serve

    return serve(order, port)
