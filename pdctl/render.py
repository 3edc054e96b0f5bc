"""What a person sees: errors, tables, progress. stdout is data, stderr is narration; colour only on a terminal."""

import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any, TextIO

from pdctl.logs import Line
from server.errors import PdctlError

BAR = 24
COLOURS = {
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
    "dim": "2",
    "bold": "1",
}
STATE_COLOURS = {"ready": "green", "dead": "red", "failed": "red", "frozen": "red", "restarting": "yellow"}
MODES = ("auto", "tty", "plain", "json", "quiet")


class Style:
    """Colours for one stream; none without a terminal, with NO_COLOR or --no-color."""

    is_off = False

    def __init__(self, stream: TextIO) -> None:
        self.is_on = stream.isatty() and not Style.is_off and not os.environ.get("NO_COLOR")

    def __call__(self, text: str, colour: str) -> str:
        return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m" if self.is_on and colour in COLOURS else text


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_error(error: PdctlError) -> None:
    """error[E_CODE]: what / help: what to do; every problem of a profile has its own pair."""
    problems = getattr(error, "problems", None) or [error]
    for problem in problems:
        print_failure(error.code, problem.message, problem.help)


def print_failure(code: str, message: str, help: str) -> None:
    style = Style(sys.stderr)
    note(f"{style(f'error[{code}]', 'red')}: {message}")
    if help:
        note(f"{style('help', 'cyan')}: {help}")


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Columns two spaces apart, as wide as they need to be."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join(padded)


def table_or_list(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """A table; on a terminal that is too narrow for it, a paragraph for each row, and nothing is cut."""
    text = table(rows, header)
    width = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or max(map(len, text.splitlines())) <= width:
        return text
    wrap = textwrap.TextWrapper(width, initial_indent="  ", subsequent_indent="  ", break_long_words=False)
    return "\n".join(line for name, *cells in rows for line in (name, *map(wrap.fill, filter(None, cells))))


def duration(seconds: float) -> str:
    """7 -> "7s", 134 -> "2m14s", 7980 -> "2h13m"."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return (
        f"{whole // 3600}h{whole % 3600 // 60:02}m" if whole < 86400 else f"{whole // 86400}d{whole % 86400 // 3600}h"
    )


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


class Progress:
    """Shows a supervisor's events. tty redraws bars, plain writes a line a change, json the events themselves."""

    def __init__(self, mode: str, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._mode = (
            ("tty" if self._stream.isatty() and os.environ.get("TERM") != "dumb" else "plain")
            if mode == "auto"
            else mode
        )
        self._style = Style(self._stream)
        self._rows: dict[str, tuple[str, str, float]] = {}
        self._drawn = 0
        self._drawn_at = 0.0
        self._started = time.monotonic()
        self._was_ready = False

    @property
    def is_json(self) -> bool:
        return self._mode == "json"

    def event(self, event: dict[str, Any]) -> None:
        if self._mode == "json":
            print(json.dumps(event), flush=True)
            return
        match event["event"]:
            case "process":
                self._process(event)
            case "ready":
                self._ready(event)
            case "failed":
                self._erase()
                print_failure(event["code"], event["message"], event["help"])
            case "warning":
                self._line(f"{self._style('warning', 'yellow')}: {event['text']}", is_always=True)
            case "draining" | "note":
                self._line(event["text"])
            case "stopped":
                self._line(f"stopped ({event['text']})")

    def _process(self, event: dict[str, Any]) -> None:
        name, row = event["name"], (event["state"], event["stage"], event["share"])
        before = self._rows.get(name)
        self._rows[name] = row
        if self._was_ready or self._mode == "plain":
            if before is None or before[:2] != row[:2]:
                detail = event.get("reason") or (
                    event["stage"] if event["state"] == "starting" or name == "model" else ""
                )
                self._line(f"{name}: {event['state']}{f' ({detail})' if detail else ''}")
        elif self._mode == "tty" and (
            before is None or before[:2] != row[:2] or time.monotonic() - self._drawn_at > 0.1
        ):
            self._draw()

    def _ready(self, event: dict[str, Any]) -> None:
        if self._mode == "tty":
            self._draw()
        self._drawn, self._was_ready = 0, True
        self._line(f"ready after {time.monotonic() - self._started:.1f} s")

    def _line(self, text: str, *, is_always: bool = False) -> None:
        if self._mode == "quiet" and not is_always:
            return
        self._erase()
        print(text, file=self._stream, flush=True)
        if self._mode == "tty" and not self._was_ready:
            self._draw()

    def _draw(self) -> None:
        self._erase()
        width = max(len(name) for name in self._rows) if self._rows else 0
        for name, (state, stage, share) in self._rows.items():
            is_ready = state == "ready"
            filled = BAR if is_ready else int(BAR * min(1.0, share))
            bar = "█" * filled + "░" * (BAR - filled)
            text = f"{name:<{width}}  {bar}  {'ready' if is_ready else stage or state}"
            print(self._style(text[:100], STATE_COLOURS.get(state, "")), file=self._stream)
        self._drawn, self._drawn_at = len(self._rows), time.monotonic()
        self._stream.flush()

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write(f"\x1b[{self._drawn}F\x1b[J")
            self._drawn = 0


class LogPrinter:
    """Log lines under coloured names, the same colour for the same name."""

    def __init__(self, names: Sequence[str], *, has_prefix: bool, has_date: bool, is_json: bool) -> None:
        colours = ("cyan", "yellow", "green", "magenta", "blue", "red")
        self._colours = {name: colours[i % len(colours)] for i, name in enumerate(names)}
        self._width = max((len(name) for name in names), default=0)
        self._has_prefix, self._is_json = has_prefix, is_json
        self._format = "%Y-%m-%d %H:%M:%S" if has_date else "%H:%M:%S"
        self._style = Style(sys.stdout)

    def show(self, line: Line) -> None:
        if self._is_json:
            record = {"process": line.process, "t": line.at, "level": line.level, "message": line.text}
            print(json.dumps(record), flush=True)
            return
        clock = time.strftime(self._format, time.localtime(line.at)) if line.at else " " * 8
        level = f"{line.level.upper()[:5]:<5} " if line.level else ""
        head = (
            f"{self._style(line.process.ljust(self._width), self._colours[line.process])} │ "
            if self._has_prefix
            else ""
        )
        for text in line.text.splitlines() or [""]:
            print(f"{clock} {head}{level}{text}", flush=True)
