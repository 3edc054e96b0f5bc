"""Two sides of a result beside each other: the table that people know, and a verdict in words.

Colocated is the base where there is one, else the first mode. A difference counts when the 95 % intervals of the two
means do not touch.
"""

from dataclasses import dataclass
from statistics import median
from typing import Any

from pdctl.bench import loads
from pdctl.exits import UsageError
from pdctl.render import table

UNLIKE = 0.01  # token counts further apart than this are not the same load
UNLIKE_MIX = 0.15  # nor of mixes, which a limit cuts where it falls
ADVICE = 1 / 3  # of TTFT
ATTAINED = 0.9
ENOUGH = 5  # requests


@dataclass(frozen=True, slots=True)
class Pair:
    """One load, both sides."""

    base: dict[str, Any]
    other: dict[str, Any]

    def change(self, quantity: str) -> float:
        a, b = _value(self.base, quantity), _value(self.other, quantity)
        return b / a - 1 if a else 0.0

    def is_clear(self, quantity: str) -> bool:
        """A handful of samples shows nothing, whatever its interval."""
        a, b = self.base[quantity], self.other[quantity]
        enough = min(self.base["requests"], self.other["requests"]) >= ENOUGH
        return enough and bool(a["high"] < b["low"] or b["high"] < a["low"])


def _value(cell: dict[str, Any], quantity: str) -> float:
    value = cell[quantity]
    return float(value["mean"] if isinstance(value, dict) else value)


def load_of(cell: dict[str, Any]) -> tuple[Any, ...]:
    """What makes two cells comparable."""
    names = ("prompt", "output", "shared", "turns", "concurrency", "rate", "burst", "trace")
    return *(cell.get(name) for name in names), *(cell.get("mix") or ())


def prompt_of(cell: dict[str, Any]) -> str:
    return loads.name_of(cell["prompt"], cell.get("mix") or ())


def paths_of(cell: dict[str, Any]) -> str:
    """Share of the requests on each path."""
    return " ".join(f"{path} {share:.0%}" for path, share in (cell.get("paths") or {}).items()) or "-"


def name_of(cell: dict[str, Any]) -> str:
    if cell["concurrency"]:
        return str(cell["concurrency"])
    rate = f"{cell['rate']:g}/s" if cell["rate"] else ""
    return " ".join(filter(None, (rate, cell.get("trace"))))


def base_of(modes: list[str]) -> str:
    return next((m for m in modes if m.startswith("colocated")), modes[0])


def pairs(result: dict[str, Any], base: str, other: str) -> list[Pair]:
    """By prompt, then by load."""
    by_load = {load_of(c): c for c in result["cells"] if c["mode"] == other}
    found = [match(c, by_load[load_of(c)]) for c in result["cells"] if c["mode"] == base and load_of(c) in by_load]
    return sorted(found, key=lambda p: (p.base["prompt"], p.base["concurrency"], p.base["rate"]))


def match(a: dict[str, Any], b: dict[str, Any]) -> Pair:
    """Raises UsageError where the two sides did not do the same work."""
    for name in ("prompt_tokens", "output_tokens"):
        one, two = a[name], b[name]
        unlike = UNLIKE_MIX if a.get("mix") else UNLIKE
        if a["requests"] and b["requests"] and abs(one - two) > unlike * max(one, two):
            raise UsageError(
                f"unlike loads: at {a['prompt']}/{a['output']} {name_of(a)}, {a['mode']} had {one:g} {name} a request "
                f"and {b['mode']} {two:g}",
                help="both must use the same tokenizer and honour ignore_eos; a comparison would mislead",
            )
    return Pair(a, b)


def between(a: dict[str, Any], b: dict[str, Any]) -> list[Pair]:
    """--compare: cells of the same mode and load in two results."""
    by_load = {(c["mode"], load_of(c)): c for c in b["cells"]}
    found = [
        match(cell, other) for cell in a["cells"] if (other := by_load.get((cell["mode"], load_of(cell)))) is not None
    ]
    if not found:
        raise UsageError("the two results have no mode and load in common")
    return found


# The table


def show(result: dict[str, Any]) -> str:
    """One table a pair of modes; a single mode alone."""
    modes = [mode["name"] for mode in result["modes"]]
    base = base_of(modes)
    parts = [comparison(pairs(result, base, other), base, other) for other in modes if other != base]
    return "\n\n".join([*parts, everything(result)])


def comparison(found: list[Pair], base: str, other: str) -> str:
    rows = []
    for p in found:
        mark = "" if p.is_clear("ttft_ms") else " ~"
        rows.append(
            [
                name_of(p.base),
                prompt_of(p.base),
                _ms(p.base["ttft_ms"]),
                _ms(p.other["ttft_ms"]),
                f"{p.change('ttft_ms'):+.0%}{mark}",
                f"{p.base['itl_ms']['p99']:.0f} / {p.other['itl_ms']['p99']:.0f}",
                f"{p.base['tpot_ms']['mean']:.0f} / {p.other['tpot_ms']['mean']:.0f}",
                f"{p.base['requests_s']:.3g} / {p.other['requests_s']:.3g}",
                f"{p.base['goodput']:.3g} / {p.other['goodput']:.3g}",
            ]
        )
    header = ("CONC", "PROMPT", f"{base} TTFT", f"{other} TTFT", "CHANGE", "ITL P99", "TPOT", "REQ/S", "GOODPUT/S")
    note = f"times in ms, {base} / {other}; mean with its 95 % interval; ~ the intervals overlap: no clear difference"
    return f"{table(rows, header)}\n{note}"


def _ms(spread: dict[str, float]) -> str:
    return f"{spread['mean']:.0f} [{spread['low']:.0f}, {spread['high']:.0f}]"


def everything(result: dict[str, Any]) -> str:
    rows = []
    for c in result["cells"]:
        t = c.get("transfer")
        moved = f"{t['exposed_ms'] or 0:.1f} ({t['share_of_ttft']:.0%})" if t else "-"
        use = " ".join(f"{role[0].upper()} {share:.0%}" for role, share in c["utilisation"].items()) or "-"
        itl = c["itl_ms"]
        rows.append(
            [
                c["mode"],
                prompt_of(c),
                name_of(c),
                f"{c['ttft_ms']['p50']:.0f} / {c['ttft_ms']['p99']:.0f}",
                f"{c['tpot_ms']['p50']:.1f}",
                f"{itl['p50']:.1f} / {itl['p99']:.0f} / {itl['max']:.0f}",
                f"{c['second_token_ms']['p50']:.0f}",
                f"{c['output_tok_s']:.4g}",
                f"{c['attained']:.0%}",
                moved,
                use,
                paths_of(c),
                f"{c['requests']}" + (f" ({c['errors']} failed)" if c["errors"] else ""),
            ]
        )
    header = (
        "MODE",
        "PROMPT",
        "CONC",
        "TTFT P50/P99",
        "TPOT",
        "ITL P50/P99/MAX",
        "2ND",
        "TOK/S",
        "IN SLO",
        "TRANSFER",
        "BUSY",
        "PATHS",
        "N",
    )
    return table(rows, header)


# Words


def verdict(result: dict[str, Any]) -> list[str]:
    """A sentence for each mode against the base, then advice."""
    modes = [mode["name"] for mode in result["modes"]]
    base = base_of(modes)
    lines = [_side(pairs(result, base, other), base, other) for other in modes if other != base]
    if not result.get("is_whole", True):
        done, planned = result.get("runs") or ("not all", "the")
        none = ", ".join(result.get("not_measured") or ())
        what = f"nothing of {none}" if none else "some cells have fewer rounds than others"
        lines.append(f"cut short: {done} of {planned} runs; {what}")
    return [*lines, *_frontiers(result), *advice(result)]


def _side(found: list[Pair], base: str, other: str) -> str:
    if not found:
        return f"{other}: no load in common with {base}"
    parts = []
    for quantity, label in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "mean gap")):
        clear = [p for p in found if p.is_clear(quantity)]
        wins = [p for p in clear if p.change(quantity) < 0]
        losses = [p for p in clear if p.change(quantity) > 0]
        parts.append(f"{label} better in {_where(wins)}, worse in {_where(losses)}")
    tails = [p.other["itl_ms"]["p99"] / p.base["itl_ms"]["p99"] for p in found if p.base["itl_ms"]["p99"]]
    tail = f"; p99 gap {median(tails):.2f} times that of {base} (median cell)" if tails else ""
    few = sum(min(p.base["requests"], p.other["requests"]) < ENOUGH for p in found)
    thin = f" ({few} of them with under {ENOUGH} requests, too few to tell: raise --requests or --limit)" if few else ""
    rates = median(p.change("requests_s") for p in found)
    throughput = f"requests/s {rates:+.0%} (median cell)"
    return f"{other} against {base}, {len(found)} cells{thin}: {'; '.join(parts)}{tail}; {throughput}"


def families(result: dict[str, Any]) -> dict[str, list[str]]:
    """Modes by the name they have in common: those of a swept budget are one family, any other is its own."""
    found: dict[str, list[str]] = {}
    for mode in result["modes"]:
        found.setdefault(mode.get("family") or mode["name"], []).append(mode["name"])
    return found


def _frontiers(result: dict[str, Any]) -> list[str]:
    """Requests/s against p99 gap: each mode's best against all budgets of a swept one. One budget is cheaply
    beaten; what counts is whether another does as well."""
    groups = families(result)
    base = next((name for name, modes in groups.items() if len(modes) > 1), None)
    return [] if base is None else [_frontier(result, base, groups[base], other) for other in groups if other != base]


def _frontier(result: dict[str, Any], base: str, budgets: list[str], other: str) -> str:
    places: dict[str, list[Pair]] = {"beyond": [], "behind": [], "neither": []}
    for cell in (c for c in result["cells"] if c["mode"] in families(result)[other] and c["requests"]):
        load = load_of(cell)
        swept = [c for c in result["cells"] if c["mode"] in budgets and load_of(c) == load and c["requests"]]
        if swept:
            place = "behind" if any(_is_as_good(c, cell) for c in swept) else "neither"
            place = "beyond" if all(_is_as_good(cell, c) for c in swept) else place
            places[place].append(match(swept[0], cell))
    return (
        f"frontier of requests/s and p99 gap: {other} is beyond every budget of {base} in {_where(places['beyond'])}, "
        f"no better than one of them in {_where(places['behind'])}, has the better of one and the worse of the "
        f"other in {_where(places['neither'])}"
    )


def _is_as_good(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return bool(a["requests_s"] >= b["requests_s"] and a["itl_ms"]["p99"] <= b["itl_ms"]["p99"])


def _where(found: list[Pair]) -> str:
    if not found:
        return "none"
    names = ", ".join(f"{prompt_of(p.base)} at {name_of(p.base)}" for p in found[:4])
    return f"{len(found)} ({names}{', ...' if len(found) > 4 else ''})"


def advice(result: dict[str, Any]) -> list[str]:
    """What to set: transfer, threshold, ratio."""
    lines = []
    heavy = [c for c in result["cells"] if c.get("transfer") and c["transfer"]["share_of_ttft"] > ADVICE]
    if heavy:
        worst = max(heavy, key=lambda c: c["transfer"]["share_of_ttft"])
        share, mode, prompt = worst["transfer"]["share_of_ttft"], worst["mode"], worst["prompt"]
        lines.append(
            f"warning: waiting for the KV transfer is {share:.0%} of TTFT ({mode}, prompt {prompt}): try a faster "
            f"transfer.backend, a smaller prefill.chunk_tokens so that more of it overlaps, or "
            f"hybrid.threshold_tokens above {prompt}"
        )
    if (threshold := crossover(result)) is not None:
        lines.append(threshold)
    return lines + _ratio(result) + _objectives(result)


def _objectives(result: dict[str, Any]) -> list[str]:
    """The highest rate of an open loop that nine in ten met; objectives that nothing met are said to be so."""
    if not any(cell["attained"] for cell in result["cells"]):
        slo = result["slo"]
        asked = f"TTFT {slo['ttft_ms']:g} ms and TPOT {slo['tpot_ms']:g} ms"
        return [f"objectives: no request met {asked}, so goodput says nothing: give --ttft and --tpot for this machine"]
    lines = []
    for mode in result["modes"]:
        own = [c for c in result["cells"] if c["mode"] == mode["name"] and c["rate"]]
        for prompt in sorted({c["prompt"] for c in own}):
            met = [c["rate"] for c in own if c["prompt"] == prompt and c["attained"] >= ATTAINED]
            best = f"{max(met):g} requests/s" if met else "none of the rates"
            lines.append(f"{mode['name']}, prompt {prompt}: nine in ten meet the objectives up to {best}")
    return lines


def crossover(result: dict[str, Any]) -> str | None:
    """The shortest prompt from which on crossing does not cost TTFT."""
    modes = [mode["name"] for mode in result["modes"]]
    split = next((m["name"] for m in result["modes"] if (m.get("layout") or {}).get("prefill")), None)
    base = base_of(modes)
    if split is None or split == base:
        return None
    by_prompt: dict[int, list[float]] = {}
    for p in pairs(result, base, split):
        by_prompt.setdefault(p.base["prompt"], []).append(p.change("ttft_ms"))
    worse = [prompt for prompt, changes in by_prompt.items() if median(changes) > 0.05]
    better = [prompt for prompt in by_prompt if prompt not in worse]
    if not by_prompt:
        return None
    if not worse:
        return "threshold: no prompt length loses TTFT by crossing; hybrid.threshold_tokens = 0 is right for this load"
    if not better or max(better) < max(worse):
        return "threshold: long prompts lose TTFT by crossing: too little prefill for this load, see `pdctl plan`"
    return (
        f"threshold: hybrid.threshold_tokens = {min(b for b in better if b > max([0, *(w for w in worse if w < b)]))}"
    )


def _ratio(result: dict[str, Any]) -> list[str]:
    """Pools that are unequally busy under the heaviest load."""
    lines = []
    for mode in result["modes"]:
        cells = [
            c for c in result["cells"] if c["mode"] == mode["name"] and {"prefill", "decode"} <= set(c["utilisation"])
        ]
        if not cells:
            continue
        use = max(cells, key=lambda c: (c["concurrency"] or c["rate"], c["prompt"]))["utilisation"]
        prefill, decode = use["prefill"], use["decode"]
        if max(prefill, decode) > 0.8 and min(prefill, decode) < 0.6 * max(prefill, decode):
            more = "prefill" if prefill > decode else "decode"
            lines.append(
                f"ratio: in {mode['name']} prefill is busy {prefill:.0%}, decode {decode:.0%}; the {more} pool is the "
                f"limit: give it more workers, or let decode read prompts (hybrid.threshold_tokens)"
            )
    return lines


def show_between(found: list[Pair]) -> str:
    """--compare: before and after."""
    rows = []
    for p in found:
        cells = []
        for quantity in ("ttft_ms", "tpot_ms", "itl_ms"):
            mark = "" if p.is_clear(quantity) else " ~"
            a, b = p.base[quantity], p.other[quantity]
            cells.append(f"{a['mean']:.4g} -> {b['mean']:.4g} {p.change(quantity):+.0%}{mark}")
        rates = f"{p.base['requests_s']:.3g} -> {p.other['requests_s']:.3g}"
        rows.append([p.base["mode"], prompt_of(p.base), name_of(p.base), *cells, rates])
    return table(rows, ("MODE", "PROMPT", "CONC", "TTFT MS", "TPOT MS", "ITL MS", "REQ/S")) + "\n~ no clear difference"
