"""Snapshots in a SQLite file: two hours of a stack, written once a second by its supervisor, read by `tui --replay`.

One row a snapshot, zlib over JSON: 3 to 5 KB each, 30 MB a file. No WAL: the one file is whole at any moment, so that
`cp` and a mail attachment carry all of it.
"""

import sqlite3
import zlib
from pathlib import Path

import msgspec

from pdctl.exits import UsageError
from pdctl.snapshot import Snapshot

KEPT_S = 7200.0
TRIM_EVERY = 60
SCHEMA = 1


class Writer:
    """Adds snapshots and lets the old ones go. Used by one thread."""

    def __init__(self, file: Path, *, kept_s: float = KEPT_S) -> None:
        self._kept_s = kept_s
        self._count = 0
        file.touch(mode=0o600)
        self._db = sqlite3.connect(file, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = TRUNCATE")
        self._db.execute("PRAGMA synchronous = OFF")  # a sample lost with the machine's power is no loss
        self._db.execute("CREATE TABLE IF NOT EXISTS samples (at REAL PRIMARY KEY, data BLOB NOT NULL)")
        self._db.execute(f"PRAGMA user_version = {SCHEMA}")

    def add(self, snapshot: Snapshot) -> None:
        data = zlib.compress(msgspec.json.encode(snapshot), 1)
        self._db.execute("INSERT OR REPLACE INTO samples VALUES (?, ?)", (snapshot.at, data))
        self._count += 1
        if self._count % TRIM_EVERY == 1:
            self._db.execute("DELETE FROM samples WHERE at < ?", (snapshot.at - self._kept_s,))

    def close(self) -> None:
        self._db.close()


class Samples:
    """A recorded file, by time."""

    def __init__(self, file: Path) -> None:
        """Raises UsageError."""
        if not file.is_file():
            raise UsageError(f"{file}: no such file")
        # Readers come from the interface's worker threads, one at a time.
        self._db = sqlite3.connect(f"file:{file}?mode=ro", uri=True, check_same_thread=False)
        try:
            self.times = [at for (at,) in self._db.execute("SELECT at FROM samples ORDER BY at")]
        except sqlite3.DatabaseError as error:
            raise UsageError(f"{file} is no recording: {error}") from error
        if not self.times:
            raise UsageError(f"{file} holds no samples")

    def read(self, index: int) -> Snapshot:
        row = self._db.execute("SELECT data FROM samples WHERE at = ?", (self.times[index],)).fetchone()
        return msgspec.json.decode(zlib.decompress(row[0]), type=Snapshot)

    def close(self) -> None:
        self._db.close()
