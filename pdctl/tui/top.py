"""`pdctl top --once`: the overview as plain text, or the frame behind it as JSON. No terminal, no Textual."""

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from pdctl.exits import Exit
from pdctl.render import print_json
from pdctl.rundir import find
from pdctl.snapshot import LogTail, Reader
from pdctl.tui.frame import Frame
from pdctl.tui.model import Model
from pdctl.tui.reading import frame
from pdctl.tui.views import overview

GAP_S = 1.0


def run(root: Path, name: str | None, *, as_json: bool) -> int:
    """Two readings a second apart, for a rate needs two. Exit 4: no supervisor, 6: something is not ready."""
    stack_dir = find(root, name)
    reader = Reader(stack_dir)
    model = Model(name=stack_dir.name)
    model.history.add(frame(reader.read()))
    time.sleep(GAP_S)
    tail = LogTail(stack_dir, 40)
    snapshot = msgspec.structs.replace(reader.read(), logs=tail.read())
    tail.close()
    model.frame = seen = frame(snapshot)
    model.history.add(seen)
    model.lines = list(seen.logs)
    if as_json:
        print_json(to_json(seen))
    else:
        size = shutil.get_terminal_size((120, 40)) if sys.stdout.isatty() else (120, 40)
        print("\n".join(line.plain.rstrip() for line in overview.draw(model, size[0], size[1] - 1)).rstrip())
    if seen.supervisor != "ready":
        return Exit.UNREACHABLE
    return Exit.OK if seen.state == "ready" else Exit.DEGRADED


def to_json(seen: Frame) -> dict[str, Any]:
    """Figures only: logs, requests and the audit log have commands of their own."""
    value: dict[str, Any] = msgspec.to_builtins(seen)
    for key in ("logs", "requests", "changes", "knobs"):
        del value[key]
    return {"version": 1, **value}
