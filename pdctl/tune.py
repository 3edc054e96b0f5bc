"""What the knob commands do beside asking the router: choosing which to show, and writing a change into the profile."""

import difflib
import getpass
import math
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.items import Table

from pdctl.client import Client
from pdctl.exits import Refused, TimedOut, UsageError
from pdctl.profile import is_shipped, own_folder
from pdctl.rundir import Stack


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


def save(stack: Stack, values: Mapping[str, Any]) -> Path:
    """Writes `values` into the stack's profile; everything else in the file stays as it is.

    A profile that came with pdctl is left alone: this user's own copy, which is found before it, is written instead.
    """
    source = Path(stack.profile_file)
    if source.suffix != ".toml":
        raise UsageError(f"{source} is not TOML: only TOML is written back")
    target = own_folder() / source.name if is_shipped(source) else source
    try:
        document = tomlkit.parse(source.read_text(encoding="utf-8"))
        for name, value in values.items():
            section, _, key = name.rpartition(".")
            _table(document, section)[key] = value
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}")
        part.write_text(tomlkit.dumps(document), encoding="utf-8")
        if target.exists():
            part.chmod(target.stat().st_mode & 0o777)
        part.replace(target)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error
    return target


def wait_drained(client: Client, worker: str, timeout_s: float | None) -> None:
    """Returns when `worker` holds nothing. Raises TimedOut; Refused when somebody gave it work again."""
    deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    while True:
        found = next(w for w in client.get("/admin/state")["workers"] if w["name"] == worker)
        if not found["is_draining"]:
            raise Refused(f"{worker} was resumed while it drained")
        if found["state"] == "drained" or (not found["open"] and found["load"] is None):
            return
        if time.monotonic() > deadline:
            raise TimedOut(f"{worker} still has {found['open']} sequences")
        time.sleep(0.2)


def _table(document: tomlkit.TOMLDocument, section: str) -> Any:
    found = document.get(section)
    if isinstance(found, Table):
        return found
    if found is None:
        document[section] = tomlkit.table()
    return document[section]
