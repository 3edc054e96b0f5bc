"""What the knob commands do beside asking the router: who asks, which knobs to show, waiting."""

import difflib
import getpass
import math
import os
import platform
import time
from collections.abc import Mapping
from typing import Any

from pdctl.client import Client
from pdctl.exits import Refused, TimedOut, UsageError


def who() -> str:
    """For the history: the user, and the machine the command was typed on."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{platform.node() or 'localhost'}"


def narrow(knobs: Mapping[str, Any], wanted: str | None) -> dict[str, Any]:
    """One knob or a section of them; without `wanted` all. Raises UsageError with near names."""
    chosen = {name: knob for name, knob in knobs.items() if wanted in (None, name, name.partition(".")[0])}
    if not chosen:
        close = difflib.get_close_matches(str(wanted), knobs, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else "pdctl get"
        raise UsageError(f"there is no knob {wanted!r} here", help=hint)
    return chosen


def wait_drained(client: Client, worker: str, timeout_s: float | None) -> None:
    """Returns when `worker` holds nothing. Raises TimedOut; Refused when somebody gave it work again."""
    deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    while True:
        found = next((w for w in client.get("/admin/state")["workers"] if w["name"] == worker), None)
        if found is None:
            raise Refused(f"{worker} was taken away while it drained")
        if not found["is_draining"]:
            raise Refused(f"{worker} was resumed while it drained")
        if found["state"] == "drained" or (not found["open"] and found["load"] is None):
            return
        if time.monotonic() > deadline:
            raise TimedOut(f"{worker} still has {found['open']} sequences")
        time.sleep(0.2)
