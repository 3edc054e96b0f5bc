"""View 3: the last requests, newest first, and the waterfall of one: where its time went."""

from pdctl.snapshot import Json
from pdctl.tui import numbers
from pdctl.tui.lines import Line, box, cell, window
from pdctl.tui.model import Model
from pdctl.tui.views.common import Column, fill, table

_GLYPHS = {"done": ("✓", "good"), "running": ("●", "accent"), "waiting": ("◌", "warn")}


def draw(model: Model, width: int, height: int) -> list[Line]:
    opened = model.opened
    size = height if opened is None or model.is_maximised else max(6, height - 17)
    rows = model.requests()
    wide = width >= 110
    columns: list[Column] = [("ID", 34 if wide else 18), ("STATE", 9), ("PATH", 9), ("PROMPT", -6), ("OUT", -5)]
    columns += [("TTFT", -7), ("TPOT", -6), ("TOTAL", -7)]
    if wide:
        columns += [("WORKERS", 24), ("AGE", -6)]
    selected = model.index("requests", len(rows))
    shown = window(len(rows), selected, max(0, size - 3))
    body = [[_cell(rows[i], title) for title, _ in columns] for i in shown]
    lines = table(columns, body, selected=selected, first=shown.start)
    word = model.filter_of("requests")
    out = box(
        f"Requests ({len(rows)})", lines, width, size, f"sort {model.sort_of('requests')} <>  filter {word or '/'}"
    )
    if not rows:
        out[2:3] = [
            Line("│ ", "border")
            .extend(Line("none yet: pdctl chat, or any OpenAI client", "dim").fit(width - 4).spans)
            .add(" │", "border")
        ]
    if opened is not None and height > size:
        out += box(f"{opened.get('id')}", waterfall(opened, width - 4), width, height - size, "esc")
    return fill(out, width, height)


def _cell(row: Json, title: str) -> tuple[str, str]:
    match title:
        case "ID":
            return str(row.get("id")), ""
        case "STATE":
            state = str(row.get("state"))
            reason = str(row.get("reason") or state)
            mark, role = _GLYPHS.get(state, ("?", ""))
            is_bad = reason in ("aborted", "error")
            return f"{'✗' if is_bad else mark} {reason}", "bad" if is_bad else role
        case "PATH":
            return str(row.get("path") or "-"), "dim"
        case "PROMPT":
            return numbers.count(row.get("prompt_tokens")), ""
        case "OUT":
            return numbers.count(row.get("output_tokens")), ""
        case "TTFT" | "TPOT" | "TOTAL":
            return numbers.ms(row.get(f"{title.lower()}_ms")), ""
        case "WORKERS":
            return " → ".join(filter(None, (row.get("prefill"), row.get("decode")))) or "-", "dim"
    return numbers.clock(float(row.get("age_s") or 0)), "dim"


def stages(record: Json) -> list[tuple[str, float, float]]:
    """(stage, from, to) in ms from arrival; only what was reported."""

    def at(name: str) -> float | None:
        value = record.get(f"{name}_ms")
        return None if value is None else float(value)

    sent, start, end = at("queue"), at("prefill_start"), at("prefill_end")
    first, second, chunk, ready = at("first_token"), at("second_token"), at("first_chunk"), at("kv_ready")
    grant = at("grant_wait")
    spans: list[tuple[str, float | None, float | None]] = [
        ("router", 0.0, sent),
        ("prefill queue", sent, start),
        ("grant wait", None if start is None or grant is None else start - grant, start),
        ("prefill", start, end),
        ("KV transfer", chunk, ready),
        ("first token", 0.0, first),
        ("hand-over", first, second),
        ("decode", second, at("total")),
    ]
    return [(name, low, high) for name, low, high in spans if low is not None and high is not None and high >= low]


def waterfall(opened: Json, width: int) -> list[Line]:
    """One bar a stage on one scale of ms."""
    record: Json = {**(opened.get("pdctl") or {}), "total_ms": opened.get("total_ms")}
    spans = stages(record)
    if not spans:
        return [Line("no stage has been reported yet", "dim")]
    top = max(high for _, _, high in spans) or 1.0
    room = max(10, width - 28)
    where = Line(f"path {record.get('path')}  {record.get('prefill') or '-'} → {record.get('decode') or '-'}  ")
    where.add(f"prompt {record.get('prompt_tokens')}  cached {record.get('cached_tokens')}  ", "dim")
    moved = f"KV {numbers.size(record.get('kv_bytes'))} in {record.get('chunks') or 0} chunks  "
    moved += f"overlap {numbers.share(record.get('overlap'))}  resent {record.get('resends') or 0}"
    lines = [where.add(moved, "dim")] if where.width + len(moved) <= width else [where, Line(moved, "dim")]
    for name, low, high in spans:
        begin = min(room - 1, int(low / top * room))
        length = max(1, min(room - begin, round((high - low) / top * room)))
        role = "spark" if name in ("prefill", "decode") else "accent" if name == "KV transfer" else "dim"
        line = Line(cell(name, 14), "bold").add("·" * begin, "dim").add("█" * length, role)
        lines.append(line.fit(14 + room).add(cell(numbers.span(high - low), -10)))
    return [*lines, Line(" " * 14 + "0".ljust(room - 6) + numbers.span(top).rjust(6), "dim")]
