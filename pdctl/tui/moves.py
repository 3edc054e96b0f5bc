"""Keys that only look: they change the model and nothing else."""

from pdctl.snapshot import LogLine
from pdctl.tui.frame import Frame
from pdctl.tui.model import LEVELS, REFRESHES_S, SORTS, WINDOWS_S, Model
from pdctl.tui.views.tables import value


def move(model: Model, rows: int) -> None:
    table = model.table
    count = model.count(table)
    if table == "logs":
        if model.follow:
            model.selected["logs"] = count - 1
        model.follow = False
    model.select(table, model.index(table, count) + rows)
    if table == "logs" and model.selected["logs"] == count - 1 and rows > 0:
        model.follow = True


def sort(model: Model, by: int) -> None:
    table = "workers" if model.view == "overview" else model.view
    model.anchors.pop(table, None)  # who sorts wants to see the top
    model.sort[table] = (model.sort.get(table, 0) + by) % len(SORTS[table])


def window(model: Model, by: int) -> None:
    index = WINDOWS_S.index(model.window_s) + by
    model.window_s = WINDOWS_S[min(max(0, index), len(WINDOWS_S) - 1)]


def refresh_rate(model: Model, by: int) -> None:
    nearest = min(range(len(REFRESHES_S)), key=lambda i: abs(REFRESHES_S[i] - model.refresh_s))
    model.refresh_s = REFRESHES_S[min(max(0, nearest + by), len(REFRESHES_S) - 1)]


def level(model: Model) -> None:
    model.level = (model.level + 1) % len(LEVELS)


def next_error(model: Model) -> bool:
    """Goes back through the errors, and round again; False where there is none."""
    lines = model.logs()
    errors = [i for i, line in enumerate(lines) if line.level in ("error", "critical")]
    if not errors:
        return False
    before = len(lines) if model.follow else model.index("logs", len(lines))
    model.follow = False
    model.selected["logs"] = max((i for i in errors if i < before), default=errors[-1])
    return True


def back(model: Model) -> None:
    """One thing at a time: what is open, the filter, the size, then the overview."""
    table = "workers" if model.view == "overview" else model.view
    if model.opened is not None or model.opened_worker:
        model.opened, model.opened_worker = None, ""
    elif model.filters.get(table):
        model.filters[table] = ""
    elif model.is_maximised:
        model.is_maximised = False
    else:
        model.view, model.panel = "overview", "workers"


def select_text(model: Model, text: str) -> None:
    """A click on a line selects the row that this line shows."""
    for index, worker in enumerate(model.workers()):
        if f" {worker.name} " in text and model.view in ("overview", "workers"):
            model.panel = "workers"
            model.select("workers", index)
            return
    for index, knob in enumerate(model.knobs()):
        if knob.name in text and model.view in ("overview", "tune"):
            model.panel = "tune"
            model.select("tune", index)
            return
    for index, row in enumerate(model.requests()):
        if str(row.get("id"))[:18] in text and model.view == "requests":
            model.select("requests", index)


def selected_text(model: Model) -> str:
    """What `c` copies."""
    match model.table:
        case "workers":
            worker = model.worker()
            return worker.name if worker else ""
        case "requests":
            return str((model.request() or {}).get("id", ""))
        case "tune":
            knob = model.knob()
            return f"{knob.name}={value(knob.now)}" if knob else ""
    lines = model.logs()
    at = len(lines) - 1 if model.follow else model.index("logs", len(lines))
    return f"{lines[at].process} {lines[at].level} {lines[at].text}" if lines else ""


def staged_diff(model: Model) -> str:
    """One line a knob: name, old -> new, and how far that is from the start's value."""
    rows = []
    for name, new in model.staged.items():
        knob = model.frame.knob(name) if model.frame else None
        old = value(knob.now) if knob else "?"
        boot = f"   boot {value(knob.boot)}   applies {knob.applies}" if knob else ""
        rows.append(f"{name}\n  - {old}\n  + {value(new)}{boot}")
    return "\n".join(rows)


def merged_lines(frame: Frame, alerts: list[LogLine]) -> list[LogLine]:
    """The log with changes and alerts at their times: cause and effect read in order."""
    changes = [
        LogLine(
            "audit",
            change.at,
            "info",
            f"{change.who} {change.op} "
            + ", ".join(f"{name} {value(old)}→{value(new)}" for name, old, new in change.changes)
            + f"  rev {change.rev}"
            + (f"  “{change.reason}”" if change.reason else ""),
        )
        for change in frame.changes
    ]
    return sorted([*frame.logs, *changes, *alerts], key=lambda line: line.at)
