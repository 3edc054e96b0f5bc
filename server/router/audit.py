"""What a router leaves for the next one of the same run: the audit log and who is drained.

The log is one JSON line a revision, written before a change is reported done, read again by the next router.

A run is one `up`. A router that restarts within a run takes up the knobs where they were; a new run starts from the
profile, and its revisions follow in the same file.
"""

import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from server.router.knobs import Entry

logger = logging.getLogger(__name__)

MAX_BYTES = 16 * 2**20


class DrainRecord:
    """Which workers an operator has drained: a router that restarts must not give them work again."""

    def __init__(self, folder: str | Path, run_id: str) -> None:
        self._path = Path(folder) / "drained.json"
        self._run_id = run_id

    def read(self) -> list[str]:
        try:
            fields: dict[str, Any] = msgspec.json.decode(self._path.read_bytes())
        except (OSError, msgspec.MsgspecError):
            return []
        return list(fields.get("workers", [])) if fields.get("run") == self._run_id else []

    def write(self, workers: list[str]) -> None:
        """Raises OSError."""
        part = self._path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode({"run": self._run_id, "workers": workers}))
        part.replace(self._path)


class AuditLog:
    def __init__(self, folder: str | Path, run_id: str) -> None:
        self.path = Path(folder) / "audit.jsonl"
        self._run_id = run_id

    def append(self, entry: Entry) -> None:
        """On disk when it returns. Raises OSError."""
        line = msgspec.json.encode({"run": self._run_id, **msgspec.to_builtins(entry)}) + b"\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, line)
            os.fsync(fd)
        finally:
            os.close(fd)

    def read(self) -> list[Entry]:
        """Of this run, oldest first. A line that was cut short by a crash is passed over."""
        if not self.path.exists():
            return []
        entries = []
        for line in self.path.read_bytes()[-MAX_BYTES:].splitlines():
            try:
                fields: dict[str, Any] = msgspec.json.decode(line)
                if fields.pop("run", "") == self._run_id:
                    entries.append(msgspec.convert(fields, Entry))
            except (msgspec.MsgspecError, AttributeError):
                logger.warning("a line of %s cannot be read", self.path)
        return entries
