"""Log files of a stack, one a process: JSON lines from our processes, and whatever else ends up in them.

Every line is read as a Line; a line without a time of its own (a traceback, a library's print) belongs to the moment of
the line before it.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pdctl.exits import UsageError

LEVELS = {"debug": 10, "info": 20, "warn": 30, "warning": 30, "error": 40, "critical": 50}
TAIL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One line of one process's log."""

    process: str
    at: float
    level: str
    text: str
    raw: str = field(compare=False, default="")


class JsonFormatter(logging.Formatter):
    """The supervisor's own log, in the shape of `server.logs`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "t": round(record.created, 3),
            "level": record.levelname.lower(),
            "process": "supervisor",
        }
        line["message"] = record.getMessage()
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def parse(process: str, raw: str, before: float = 0.0) -> Line:
    """Raw text -> Line; `before` is the time of the line above."""
    if raw.startswith("{"):
        try:
            record = json.loads(raw)
            at, level, message = float(record.pop("t")), str(record.pop("level")), str(record.pop("message"))
        except (ValueError, KeyError, TypeError, AttributeError):
            return Line(process, before, "", raw, raw)
        record.pop("process", None)
        traceback = record.pop("traceback", "")
        fields = "".join(f" {key}={value}" for key, value in record.items())
        return Line(process, at, level, f"{message}{fields}" + (f"\n{traceback}" if traceback else ""), raw)
    return Line(process, before, "", raw, raw)


def last_line(log: Path) -> str:
    """The last thing that was said, as plain text on one line; "" where nothing was."""
    lines = _tail(log, 8192)
    last = next((line for line in reversed(lines) if line.strip()), "")
    return parse("", last).text.strip().rpartition("\n")[2]


def read(files: Sequence[tuple[str, Path]], count: int, is_wanted: Callable[[Line], bool] | None = None) -> list[Line]:
    """The last `count` wanted lines of all files together, merged by time."""
    lines: list[Line] = []
    for process, file in files:
        raws = _tail(file, TAIL_BYTES)
        lines += filter(is_wanted, _parsed(process, raws)) if is_wanted else _parsed(process, raws[-count:])
    return sorted(lines, key=lambda line: line.at)[-count:]


def _parsed(process: str, raws: Sequence[str]) -> Iterator[Line]:
    at = 0.0
    for raw in raws:
        line = parse(process, raw, at)
        at = line.at
        yield line


def _tail(file: Path, size: int) -> list[str]:
    try:
        with file.open("rb") as log:
            length = log.seek(0, 2)
            log.seek(max(0, length - size))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[1:] if length > size else lines


def follow(
    files: Sequence[tuple[str, Path]], *, pause: Callable[[float], None] = time.sleep, is_over: Callable[[], bool]
) -> Iterator[Line]:
    """New lines as they come, over rotations, until `is_over`."""
    followers = [Follower(process, file) for process, file in files]
    try:
        ended = False
        while not ended:
            ended = is_over()
            for follower in followers:
                yield from follower.new()
            if not ended:
                pause(0.2)
    finally:
        for follower in followers:
            follower.close()


class Follower:
    """One log file over its rotations, from where it ends now."""

    def __init__(self, process: str, file: Path) -> None:
        self._process = process
        self._path = file
        self._file: BinaryIO | None = None
        self._rest = b""
        self._open(at_end=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def new(self) -> Iterator[Line]:
        yield from self._drain()
        if self._is_rotated():
            self._open(at_end=False)
            yield from self._drain()

    def _drain(self) -> Iterator[Line]:
        if self._file is None:
            return
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        yield from _parsed(self._process, [raw.decode(errors="replace") for raw in whole])

    def _is_rotated(self) -> bool:
        try:
            found = self._path.stat()
        except OSError:
            return False
        return self._file is None or found.st_ino != _inode(self._file)

    def _open(self, *, at_end: bool) -> None:
        self.close()
        self._rest = b""
        try:
            self._file = self._path.open("rb")
        except OSError:
            self._file = None
            return
        if at_end:
            self._file.seek(0, 2)


def _inode(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_ino


def check_filters(level: str, grep: str) -> None:
    """Raises UsageError for a level that is none, or an expression that does not compile."""
    if level and level not in LEVELS:
        raise UsageError(f"--level {level}: no such level", help="debug | info | warn | error")
    try:
        re.compile(grep)
    except re.error as error:
        raise UsageError(
            f"--grep {grep}: {error}", help="a Python regular expression; quote what is meant literally"
        ) from error


def wanted(line: Line, *, level: str = "", grep: str = "", since: float = 0.0) -> bool:
    """The filters of `pdctl logs`. A line without a level passes that filter: it may be a traceback."""
    if level and line.level and LEVELS.get(line.level, 20) < LEVELS.get(level, 0):
        return False
    return line.at >= since and (not grep or re.search(grep, line.text) is not None)
