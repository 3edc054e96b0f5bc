"""What the screen shows besides the frame: which view, which row, what is staged.

The app changes it, the views read it.
"""

from dataclasses import dataclass, field
from typing import Any

from pdctl.snapshot import Json, LogLine
from pdctl.tui import alerts
from pdctl.tui.frame import Frame, Knob, Worker
from pdctl.tui.history import History

VIEWS = ("overview", "workers", "requests", "tune", "logs")
WINDOWS_S = (60, 300, 900, 3600, 7200)
REFRESHES_S = (0.5, 1.0, 2.0, 5.0, 10.0)
SORTS = {
    "overview": ("name", "kv", "queue", "tok/s", "p95"),
    "workers": ("name", "kv", "queue", "tok/s", "p95"),
    "requests": ("age", "ttft", "tpot", "prompt", "output"),
    "tune": ("name",),
    "logs": ("time",),
}
LEVELS = ("debug", "info", "warn", "error")
_LEVEL_OF = {"debug": 0, "": 1, "info": 1, "warn": 2, "warning": 2, "error": 3, "critical": 3}


def _sort_value(worker: Worker, key: str) -> float | None:
    return {"kv": worker.kv, "queue": worker.queue, "tok/s": worker.tok_s, "p95": worker.step.p95}[key]


@dataclass
class Model:
    name: str = "stack"
    frame: Frame | None = None
    history: History = field(default_factory=History)
    watch: alerts.Watch = field(default_factory=alerts.Watch)
    view: str = "overview"
    panel: str = "workers"  # overview only: workers or tune has the cursor
    is_read_only: bool = False
    is_replay: bool = False
    is_maximised: bool = False
    refresh_s: float = 1.0
    window_s: int = 60
    lost_at: float = 0.0  # since when no frame came; 0: connected
    lost_why: str = ""
    now: float = 0.0
    paused: bool = False
    scrub: int = 0  # frames back from the newest
    scrub_count: int = 0
    selected: dict[str, int] = field(default_factory=dict)
    anchors: dict[str, str] = field(default_factory=dict)  # the selected row by name: rows come and go around it
    filters: dict[str, str] = field(default_factory=dict)
    sort: dict[str, int] = field(default_factory=dict)
    staged: dict[str, Any] = field(default_factory=dict)
    opened: Json | None = None  # the request whose waterfall is shown
    opened_worker: str = ""
    follow: bool = True
    wrap: bool = False
    level: int = 1
    message: str = ""
    message_role: str = "dim"
    busy: str = ""
    recording: str = ""
    lines: list[LogLine] = field(default_factory=list)  # the frame's logs with changes and alerts among them

    def index(self, table: str, count: int) -> int:
        """The selected row, inside a table of `count` rows."""
        anchor = self.anchors.get(table)
        if anchor is not None and anchor in (names := self.names(table)):
            return names.index(anchor)
        return min(max(0, self.selected.get(table, 0)), max(0, count - 1))

    def filter_of(self, view: str) -> str:
        return self.filters.get(view, "")

    def sort_of(self, view: str) -> str:
        names = SORTS[view]
        return names[self.sort.get(view, 0) % len(names)]

    # rows as they are shown, so that keys and views agree on which one is selected

    def workers(self) -> list[Worker]:
        if self.frame is None:
            return []
        word = self.filter_of("workers").lower()
        rows = [w for w in self.frame.workers if word in f"{w.name} {w.role} {w.state}".lower()]
        key = self.sort_of("workers")
        if key == "name":
            return rows
        return sorted(rows, key=lambda worker: -(_sort_value(worker, key) or 0.0))

    def worker(self) -> Worker | None:
        rows = self.workers()
        return rows[self.index("workers", len(rows))] if rows else None

    def requests(self) -> list[Json]:
        if self.frame is None:
            return []
        word = self.filter_of("requests").lower()
        rows = [r for r in self.frame.requests if word in " ".join(map(str, r.values())).lower()]
        key = {
            "age": "",
            "ttft": "ttft_ms",
            "tpot": "tpot_ms",
            "prompt": "prompt_tokens",
            "output": "output_tokens",
        }[self.sort_of("requests")]
        return sorted(rows, key=lambda row: -(row.get(key) or 0.0)) if key else rows

    def request(self) -> Json | None:
        rows = self.requests()
        return rows[self.index("requests", len(rows))] if rows else None

    def knobs(self) -> list[Knob]:
        if self.frame is None:
            return []
        word = self.filter_of("tune").lower()
        return [knob for knob in self.frame.knobs if word in knob.name.lower()]

    def knob(self) -> Knob | None:
        rows = self.knobs()
        return rows[self.index("tune", len(rows))] if rows else None

    def logs(self) -> list[LogLine]:
        word = self.filter_of("logs").lower()
        lines = [line for line in self.lines if _LEVEL_OF.get(line.level, 1) >= self.level]
        return [line for line in lines if word in f"{line.process} {line.level} {line.text}".lower()] if word else lines

    @property
    def table(self) -> str:
        """Which table the arrows move in."""
        return self.panel if self.view == "overview" else self.view

    def names(self, table: str) -> list[str]:
        match table:
            case "workers":
                return [worker.name for worker in self.workers()]
            case "requests":
                return [str(row.get("id")) for row in self.requests()]
            case "tune":
                return [knob.name for knob in self.knobs()]
        return []

    def select(self, table: str, index: int) -> None:
        count = self.count(table)
        self.selected[table] = min(max(0, index), max(0, count - 1))
        if names := self.names(table):
            self.anchors[table] = names[self.selected[table]]

    def count(self, table: str) -> int:
        match table:
            case "workers":
                return len(self.workers())
            case "requests":
                return len(self.requests())
            case "tune":
                return len(self.knobs())
        return len(self.logs())
