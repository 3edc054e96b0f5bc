"""A result as one HTML file: tables, plots and the verdict; nothing is fetched, so it can be mailed and kept."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from pdctl.bench import compare
from pdctl.bench.svg import Series, axis, bars, lines

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 1em;color:#1a1a1a;background:#fff}
h1{font-size:1.5em;margin:0}h2{font-size:1.15em;margin:2em 0 .5em;border-bottom:1px solid #ccc}
p.facts{color:#555;margin:.2em 0}table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}
th,td{padding:3px 6px;text-align:right;border-bottom:1px solid #e4e4e4;white-space:nowrap}
th,td.list{white-space:normal}th{vertical-align:bottom}td.list{min-width:104px}
th{background:#f3f3f3}td:first-child,th:first-child{text-align:left}.scroll{overflow-x:auto}
.better{background:#d9efe5}.worse{background:#fbe0d0}
.verdict{background:#f3f6fa;border-left:4px solid #0072B2;padding:.6em 1em}
.verdict p{margin:.3em 0}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:14px;align-items:start}
figure{margin:0;border:1px solid #e4e4e4;padding:6px}svg{width:100%;height:auto;display:block}
.title{font-weight:600;font-size:13px}.tick{font-size:11px;fill:#444}.label{font-size:12px;fill:#222}
.mid{text-anchor:middle}.end{text-anchor:end}.grid{stroke:#e6e6e6}.mark{stroke:#888;stroke-dasharray:2 3}
.legend{font-size:12px;display:flex;flex-wrap:wrap;gap:2px 14px;padding:2px 8px 4px}
.legend i{display:inline-block;width:22px;
margin-right:5px;vertical-align:middle}
""".strip()
PARTS = ("router", "wait for grant and turn", "prefill", "rest of KV transfer", "to second token")


def html(result: dict[str, Any]) -> str:
    box, modes = result["box"], [m["name"] for m in result["modes"]]
    facts = [
        f"{result['started']}, {result['seconds'] / 60:.1f} minutes, {result['rounds']} rounds interleaved"
        + ("" if result.get("is_whole", True) else ", cut short"),
        f"{box['cpu']}, {box['cores']} cores, {box['memory_gib']} GiB, {box['os']}",
        f"objectives: TTFT {result['slo']['ttft_ms']:g} ms, TPOT {result['slo']['tpot_ms']:g} ms",
        "; ".join(f"{m['name']} = {m['what']} {' '.join(m.get('sets') or ())}" for m in result["modes"]),
    ]
    base = compare.base_of(modes)
    tables = "".join(_comparison(result, base, other) for other in modes if other != base)
    verdict = "".join(f"<p>{escape(line)}</p>" for line in result.get("verdict") or compare.verdict(result))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>pdctl bench</title><style>{STYLE}</style><h1>pdctl bench</h1>"
        + "".join(f'<p class="facts">{escape(fact)}</p>' for fact in facts)
        + f'<h2>Verdict</h2><div class="verdict">{verdict}</div>{tables}{_everything(result)}'
        + f'<h2>Plots</h2><div class="plots">{"".join(_plots(result))}</div></html>\n'
    )


def _comparison(result: dict[str, Any], base: str, other: str) -> str:
    head = (
        "concurrency",
        "prompt",
        f"{base} TTFT ms",
        f"{other} TTFT ms",
        "change",
        "TPOT ms",
        "p99 ITL ms",
        "req/s",
        "goodput/s",
    )
    rows = []
    for p in compare.pairs(result, base, other):
        a, b = p.base, p.other
        is_clear = p.is_clear("ttft_ms")
        tone = "" if not is_clear else ("better" if p.change("ttft_ms") < 0 else "worse")
        cells = [
            (compare.name_of(a), ""),
            (compare.prompt_of(a), ""),
            (_interval(a["ttft_ms"]), ""),
            (_interval(b["ttft_ms"]), ""),
            (f"{p.change('ttft_ms'):+.0%}{'' if is_clear else ' ~'}", tone),
            (f"{a['tpot_ms']['mean']:.1f} → {b['tpot_ms']['mean']:.1f}", _tone(p, "tpot_ms")),
            (f"{a['itl_ms']['p99']:.0f} → {b['itl_ms']['p99']:.0f}", ""),
            (f"{a['requests_s']:.3g} → {b['requests_s']:.3g}", ""),
            (f"{a['goodput']:.3g} → {b['goodput']:.3g}", ""),
        ]
        rows.append("".join(f'<td class="{c}">{escape(text)}</td>' for text, c in cells))
    return (
        f"<h2>{escape(base)} against {escape(other)}</h2>{_table(head, rows)}"
        '<p class="facts">Means with 95 % intervals (bootstrap over requests); ~: they overlap, no clear difference.'
        " Green: clearly better; orange: clearly worse.</p>"
    )


def _tone(pair: compare.Pair, quantity: str) -> str:
    if not pair.is_clear(quantity):
        return ""
    return "better" if pair.change(quantity) < 0 else "worse"


def _interval(spread: dict[str, float]) -> str:
    return f"{spread['mean']:.0f} [{spread['low']:.0f}, {spread['high']:.0f}]"


def _everything(result: dict[str, Any]) -> str:
    head = (
        "mode", "load", "prompt", "TTFT p50 / p99", "TPOT p50", "ITL p50 / p99 / max", "2nd token", "tok/s", "in SLO",
        "KV transfer / wait ms", "wait of TTFT", "busy", "paths", "requests", "failed",
    )  # fmt: skip
    rows = []
    for c in result["cells"]:
        t, itl = c.get("transfer"), c["itl_ms"]
        cells = [
            c["mode"],
            compare.name_of(c),
            compare.prompt_of(c),
            f"{c['ttft_ms']['p50']:.0f} / {c['ttft_ms']['p99']:.0f}",
            f"{c['tpot_ms']['p50']:.1f}",
            f"{itl['p50']:.1f} / {itl['p99']:.0f} / {itl['max']:.0f}",
            f"{c['second_token_ms']['p50']:.0f}",
            f"{c['output_tok_s']:.4g}",
            f"{c['attained']:.0%}",
            f"{t['mean_ms']:.1f} / {t['exposed_ms'] or 0:.1f}" if t else "–",
            f"{t['share_of_ttft']:.0%}" if t else "–",
            " ".join(f"{role} {share:.0%}" for role, share in c["utilisation"].items()) or "–",
            compare.paths_of(c),
            str(c["requests"]),
            str(c["errors"] or "–"),
        ]
        lists = (head.index("busy"), head.index("paths"))
        rows.append("".join(f"<td{' class=list' * (i in lists)}>{escape(text)}</td>" for i, text in enumerate(cells)))
    return f"<h2>Every cell</h2>{_table(head, rows)}"


def _table(head: Sequence[str], rows: Sequence[str]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="scroll"><table><tr>{top}</tr>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>'


# Plots


def _plots(result: dict[str, Any]) -> list[str]:
    slo = result["slo"]
    out = []
    for prompt in sorted({c["prompt"] for c in result["cells"]}):
        cells = [c for c in result["cells"] if c["prompt"] == prompt and c["requests"]]
        if cells:
            name = compare.prompt_of(cells[0])
            out.append(_cdf(f"TTFT, prompt {name}", cells, "ttft_cdf", slo["ttft_ms"]))
            out.append(_cdf(f"Gaps between tokens, prompt {name}", cells, "itl_cdf", slo["tpot_ms"]))
    out += [_curve(result, "goodput", "goodput, requests/s"), *_frontiers(result), *_timelines(result)]
    return [plot for plot in [*out, _waterfall(result)] if plot]


def _modes(result: dict[str, Any]) -> dict[str, int]:
    return {mode["name"]: i for i, mode in enumerate(result["modes"])}


def _cdf(title: str, cells: list[dict[str, Any]], name: str, objective: float) -> str:
    """The lightest and the heaviest load of each mode; the lighter one dashed."""
    modes = list(dict.fromkeys(c["mode"] for c in cells))
    series = []
    for colour, mode in enumerate(modes):
        own = sorted((c for c in cells if c["mode"] == mode and c[name]), key=_weight)
        for cell in {id(c): c for c in (*own[:1], *own[-1:])}.values():
            is_light = len(own) > 1 and cell is own[0]
            load = compare.name_of(cell)
            label = f"{mode}, {'concurrency ' + load if cell['concurrency'] else load}"
            series.append(Series(label, [(v, s) for v, s in cell[name]], colour, int(is_light), is_step=True))
    x = axis("ms", [v for s in series for v, _ in s.points], is_log=True)
    return lines(title, series, x, axis("share of them", [1.0], high=1.02), [(objective, "objective")])


def _weight(cell: dict[str, Any]) -> float:
    return float(cell["concurrency"] or cell["rate"] or 0)


def _curve(result: dict[str, Any], quantity: str, label: str) -> str:
    """Against concurrency, or rate where the loop is open; a line a mode and prompt."""
    is_open = all(not c["concurrency"] for c in result["cells"])
    series, prompts = [], sorted({c["prompt"] for c in result["cells"]})
    for mode, colour in _modes(result).items():
        for dash, prompt in enumerate(prompts):
            own = [
                c
                for c in result["cells"]
                if c["mode"] == mode and c["prompt"] == prompt and bool(c["concurrency"]) != is_open
            ]
            points = sorted((_weight(c), float(c[quantity])) for c in own)
            if points:
                name = compare.prompt_of(own[0])
                series.append(Series(f"{mode}, prompt {name}", points, colour, dash, has_dots=True))
    x = axis("requests/s sent" if is_open else "concurrency", [v for s in series for v, _ in s.points])
    y = axis(label, [v for s in series for _, v in s.points])
    return lines(f"Goodput against {'rate' if is_open else 'concurrency'}", series, x, y)


def _frontiers(result: dict[str, Any]) -> list[str]:
    """Requests/s against p99 gap: up and to the left is better. A mode's line goes over its concurrencies or rates;
    where a budget was swept, over the budgets at each load."""
    groups = compare.families(result)
    prompts = sorted({c["prompt"] for c in result["cells"]})
    is_swept = max(map(len, groups.values())) > 1
    out = []
    for prompt in prompts:
        series = []
        for colour, (family, modes) in enumerate(groups.items()):
            cells = _tailed(result, modes, prompt)
            if not is_swept:
                series += [_front(family, cells, colour, 0, compare.name_of)] if cells else []
                continue
            for dash, load in enumerate(sorted({_weight(c) for c in cells})):
                own = [c for c in cells if _weight(c) == load]
                budget = _budget_of(family) if len(modes) > 1 else (lambda cell: "")
                series.append(_front(f"{family}, {compare.name_of(own[0])}", own, colour, dash, budget))
        if series:
            name = compare.prompt_of(next(c for c in result["cells"] if c["prompt"] == prompt))
            over = "budgets" if is_swept else "loads"
            out.append(_front_lines(f"Frontier over {over}, prompt {name}: left and up is better", series))
    return out


def _tailed(result: dict[str, Any], modes: Sequence[str], prompt: int) -> list[dict[str, Any]]:
    return [c for c in result["cells"] if c["mode"] in modes and c["prompt"] == prompt and c["itl_ms"]["p99"]]


def _budget_of(family: str) -> Callable[[dict[str, Any]], str]:
    return lambda cell: str(cell["mode"]).removeprefix(f"{family}-")


def _front(
    label: str, cells: list[dict[str, Any]], colour: int, dash: int, name: Callable[[dict[str, Any]], str]
) -> Series:
    cells = sorted(cells, key=lambda c: c["itl_ms"]["p99"])
    points = [(float(c["itl_ms"]["p99"]), float(c["requests_s"])) for c in cells]
    return Series(label, points, colour, dash, has_dots=True, names=[name(c) for c in cells])


def _front_lines(title: str, series: list[Series]) -> str:
    x = axis("p99 gap between tokens, ms", [v for s in series for v, _ in s.points], is_log=True)
    return lines(title, series, x, axis("requests/s", [v for s in series for _, v in s.points]))


def _waterfall(result: dict[str, Any]) -> str:
    rows = []
    for c in sorted(result["cells"], key=lambda c: (c["prompt"], _weight(c))):
        s = c["stages_ms"]
        if "first_token_ms" not in s:
            continue
        moments = [
            0.0,
            s.get("queue_ms", 0.0),
            s.get("prefill_start_ms"),
            s.get("prefill_end_ms"),
            s.get("kv_ready_ms"),
        ]
        moments.append(s.get("second_token_ms"))
        parts, last = [], 0.0
        for name, moment in zip(PARTS, moments[1:], strict=True):
            if moment is not None and moment > last:
                parts.append((name, last, float(moment)))
                last = float(moment)
        rows.append((f"{compare.prompt_of(c)} × {compare.name_of(c)}, {c['mode']}", parts))
    return bars("Where the time goes (median, to the second token)", rows, "ms from arrival", PARTS) if rows else ""


def _timelines(result: dict[str, Any]) -> list[str]:
    """Queues and blocks under the heaviest load of each mode."""
    out = []
    for mode in _modes(result):
        own = [c for c in result["cells"] if c["mode"] == mode and len(c.get("timeline") or ()) > 2]
        if not own:
            continue
        cell = max(own, key=lambda c: (_weight(c), c["prompt"]))
        where = f"{mode}, prompt {compare.prompt_of(cell)} × {compare.name_of(cell)}"
        out.append(_gauges(f"Queues: {where}", cell["timeline"], ("waiting", "running"), "sequences"))
        out.append(_gauges(f"KV blocks: {where}", _shares(cell["timeline"]), ("used", "granted"), "share of the pool"))
    return out


def _shares(timeline: list[dict[str, float]]) -> list[dict[str, float]]:
    out = []
    for point in timeline:
        totals = {k.partition(".")[0]: v for k, v in point.items() if k.endswith(".blocks_total") and v}
        shares = {
            f"{role}.{part}": point.get(f"{role}.blocks_{part}", 0.0) / total
            for role, total in totals.items()
            for part in ("used", "granted")
        }
        out.append({"t": point["t"], **shares})
    return out


def _gauges(title: str, timeline: list[dict[str, float]], names: tuple[str, ...], label: str) -> str:
    keys = sorted({k for point in timeline for k in point if k.partition(".")[2] in names})
    series = [
        Series(k.replace(".", " "), [(p["t"], p[k]) for p in timeline if k in p], i, i % 2, is_step=True)
        for i, k in enumerate(keys)
    ]
    x = axis("seconds", [p["t"] for p in timeline])
    return lines(title, series, x, axis(label, [v for s in series for _, v in s.points]))
