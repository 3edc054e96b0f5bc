"""The tables that more than one view shows: workers, knobs, log lines."""

import json
import re
import time
from collections.abc import Sequence
from typing import Any

from pdctl.snapshot import LogLine
from pdctl.tui import charts, numbers
from pdctl.tui.frame import Knob, Worker
from pdctl.tui.lines import Line, cell, window
from pdctl.tui.model import Model
from pdctl.tui.views.common import Column, glyph, table

_ID = re.compile(r"id=(?:chatcmpl|cmpl)-([0-9a-f]{6})[0-9a-f]+")
_BRIEF = (
    ("/v1/chat/completions ", "chat "), ("/v1/completions ", "completion "), ("status=", ""), ("path=", ""),
    ("workers=", ""), ("ttft_ms=", "ttft="), ("total_ms=", "total="),
    ("prompt_tokens=", "prompt="), ("output_tokens=", "output="),
)  # fmt: skip
LEVEL_ROLES = {"error": "bad", "critical": "bad", "warn": "warn", "warning": "warn", "debug": "dim"}


_COLUMNS: tuple[Column, ...] = (
    ("ROLE", 8), ("STATE", 10), ("ON", 6), ("PID", -7), ("QUEUE", -5), ("RUN", -7), ("KV%", -4), ("60s KV", 8),
    ("TOK/S", -7), ("P95ms", -6), ("XFER95", -6), ("BUSY", -5), ("UP", -6), ("RESTARTS", -8),
)  # fmt: skip
# What is missed most, first.
_NEEDED = (
    "ID", "STATE", "QUEUE", "RUN", "KV%", "TOK/S", "P95ms", "PID", "ON", "XFER95", "BUSY", "ROLE", "60s KV", "UP",
    "RESTARTS",
)  # fmt: skip


def _fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """Those that fit, in the order of the table."""
    widths = dict(columns)
    kept, room = set(), width - 1
    for title in _NEEDED:
        if (size := abs(widths[title]) + 1) <= room:
            kept.add(title)
            room -= size
    return [column for column in columns if column[0] in kept]


def state_of(model: Model, worker: Worker) -> tuple[str, str, str]:
    """(glyph, word, role): a ready worker over a watermark says that."""
    mark, role = glyph(worker.state)
    pool = model.frame.pools.get(worker.role) if model.frame else None
    if worker.state == "ready" and pool is not None and worker.kv is not None:
        if pool.kv_high is not None and worker.kv >= pool.kv_high:
            return "▲", "kv>hi", "bad"
        if pool.kv_low is not None and worker.kv >= pool.kv_low:
            return "▲", "kv>lo", "warn"
    word = f"{worker.stage or 'starting'}" if worker.state == "starting" else worker.state
    return mark, word, role


def workers(model: Model, width: int, height: int, *, has_focus: bool) -> list[Line]:
    """Header and as many rows and whole columns as there is room for."""
    rows = model.workers()
    id_width = max(9, min(14, max((len(worker.name) for worker in rows), default=9)))
    columns = _fitting([("ID", id_width), *_COLUMNS], width)
    selected = model.index("workers", len(rows))
    shown = window(len(rows), selected, max(0, height - 1))
    titles = [title for title, _ in columns]
    body = [[_worker_cell(model, rows[i], title) for title in titles] for i in shown]
    return table(columns, body, selected=selected, first=shown.start, has_focus=has_focus)


def _worker_cell(model: Model, worker: Worker, title: str) -> tuple[str, str]:
    is_router = worker.role == "router"
    match title:
        case "ID":
            return worker.name, "bold"
        case "ROLE":
            return worker.role, "dim"
        case "STATE":
            mark, word, role = state_of(model, worker)
            return f"{mark} {word}", role
        case "ON":
            return worker.where, "dim"
        case "PID":
            return str(worker.pid or "-"), "dim"
        case "QUEUE":
            return numbers.count(worker.queue), "warn" if worker.queue else ""
        case "RUN":
            limit = f"/{worker.running_max}" if worker.running_max is not None and worker.role != "prefill" else ""
            return f"{numbers.count(worker.running)}{limit if worker.running is not None else ''}", ""
        case "KV%":
            pool = model.frame.pools.get(worker.role) if model.frame else None
            role = charts.level_role(worker.kv, pool.kv_low, pool.kv_high) if pool else "dim"
            return ("-" if worker.kv is None else f"{worker.kv * 100:.0f}"), role
        case "60s KV":
            return charts.spark(model.history.last(60, 8, lambda point: point.kv.get(worker.name)), 8, 1.0), "spark"
        case "TOK/S":
            return f"{numbers.count(worker.tok_s)}{'/s' if is_router and worker.tok_s is not None else ''}", ""
        case "P95ms":
            return numbers.ms(worker.step.p95), ""
        case "XFER95":
            return numbers.ms(worker.transfer.p95), ""
        case "BUSY":
            return numbers.share(worker.busy), ""
        case "UP":
            return (numbers.clock(worker.up_s) if worker.up_s else "-"), "dim"
    return str(worker.restarts or "-"), "warn" if worker.restarts else "dim"


def value(shown: Any, unit: str = "") -> str:
    text = (
        json.dumps(shown)
        if isinstance(shown, dict | list)
        else f"{shown:g}"
        if isinstance(shown, float)
        else str(shown)
    )
    return text + (f" {unit}" if unit and unit != "share" else "")


def knobs(model: Model, width: int, height: int, *, has_focus: bool) -> list[Line]:
    """Knob, value now and staged, range, when it applies."""
    rows = model.knobs()
    is_full = width >= 96
    columns: list[Column] = [("KNOB", 24), ("NOW", -8), ("→ NEW", 10), ("RANGE", 14), ("APPLIES", 9)]
    if is_full:
        columns += [("BOOT", -9), ("UNIT", 12)]
    selected = model.index("tune", len(rows))
    shown = window(len(rows), selected, max(0, height - 1))
    body = [[_knob_cell(model, rows[i], title) for title, _ in columns] for i in shown]
    return table(columns, body, selected=selected, first=shown.start, has_focus=has_focus)


def _knob_cell(model: Model, knob: Knob, title: str) -> tuple[str, str]:
    match title:
        case "KNOB":
            return knob.name, "bold" if knob.name in model.staged else ""
        case "NOW":
            return value(knob.now), "accent" if knob.now != knob.boot else ""
        case "→ NEW":
            return (f"→ {value(model.staged[knob.name])} *", "warn") if knob.name in model.staged else ("", "")
        case "RANGE":
            return knob.range or "-", "dim"
        case "APPLIES":
            return knob.applies or "-", "dim"
        case "BOOT":
            return value(knob.boot), "dim"
    return knob.unit, "dim"


def log_lines(lines: Sequence[LogLine], width: int, *, wrap: bool = False, is_brief: bool = False) -> list[Line]:
    """Time, process, level, text; a line that is too long is cut, or goes on under its text.

    Brief: ids and endpoints shortened, for the few lines of the overview.
    """
    names = max((len(line.process) for line in lines), default=6)
    out: list[Line] = []
    for entry in lines:
        clock = time.strftime("%H:%M:%S", time.localtime(entry.at)) if entry.at else " " * 8
        role = LEVEL_ROLES.get(entry.level, "")
        head = Line(f"{clock} ", "dim").add(cell(entry.process, names), "accent").add(" │ ", "border")
        head.add(f"{entry.level.upper()[:5]:<5} ", role or "dim")
        room = max(1, width - head.width)
        text = _brief(entry.text) if is_brief else entry.text
        text = text.replace("\t", "    ")
        for number, part in enumerate(text.splitlines() or [""]):
            pieces = [part[i : i + room] for i in range(0, len(part), room)] or [""] if wrap else [part]
            for index, piece in enumerate(pieces):
                is_first = number == 0 and index == 0
                out.append((head if is_first else Line(" " * head.width)).add(safe(piece), role))
            if not wrap:
                break
    return out


def _brief(text: str) -> str:
    """A request's line by its values: the figures come before the right edge also in eighty columns."""
    if not _ID.search(text):
        return text
    for word, shorter in _BRIEF:
        text = text.replace(word, shorter)
    return _ID.sub(r"\1…", text)


def safe(text: str) -> str:
    """What comes from elsewhere is foreign text: no control character of it may reach the terminal."""
    return "".join(char if char.isprintable() else "·" for char in text)
