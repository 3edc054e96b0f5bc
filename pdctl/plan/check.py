"""Predicted against measured: each cell of a bench result is simulated and the errors are shown.

Cells that the stage model was fitted on say little; they are marked and left out of the medians.
"""

from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from pdctl.bench.compare import ENOUGH
from pdctl.exits import UsageError
from pdctl.plan.loads import Lengths, closed, poisson
from pdctl.plan.sim import Cluster, Layout, Sizes
from pdctl.plan.stages import Stages
from pdctl.plan.tally import Slo
from pdctl.render import table
from server.router.choice import Rates

QUANTITIES = ("ttft", "tpot", "goodput")
MIN_REQUESTS = 40  # of a cell that does not say how many it had
CLOSE = 0.05  # means of TTFT no further apart than this stand in no order


@dataclass(frozen=True, slots=True)
class Graded:
    """One cell. Times in ms; each quantity as (predicted, measured)."""

    mode: str
    prompt: int
    output: int
    concurrency: int
    rate: float
    is_fitted: bool
    values: dict[str, tuple[float, float]]
    ttft_between: tuple[float, float]  # 95 % interval of the measured mean

    def error(self, quantity: str) -> float | None:
        """As a share of what was measured; None where that is 0 and the prediction is not."""
        predicted, measured = self.values[quantity]
        if measured:
            return (predicted - measured) / measured
        return None if predicted else 0.0


def grade(result: dict[str, Any], stages: Stages, sizes: Sizes) -> list[Graded]:
    """`sizes`: of modes that do not say theirs."""
    layouts = {mode["name"]: _layout(mode) for mode in result.get("modes", [])}
    own = {mode["name"]: Sizes(**mode["sizes"]) for mode in result.get("modes", []) if mode.get("sizes")}
    slo = Slo(result["slo"]["ttft_ms"] / 1e3, result["slo"]["tpot_ms"] / 1e3)
    cells = [cell for cell in result.get("cells", []) if layouts.get(cell["mode"]) and cell.get("requests")]
    if not cells:
        raise UsageError("the result holds no cell of a stack whose workers are known")
    learnt = {mode: Rates() for mode in layouts}
    for _ in range(2):  # rounds: in the first one a router learns what it begins all later ones with
        graded = [
            _cell(c, layouts[c["mode"]], stages, own.get(c["mode"], sizes), slo, learnt[c["mode"]]) for c in cells
        ]
    return graded


def _layout(mode: dict[str, Any]) -> Layout | None:
    """None for a server that is not ours: nobody told us what runs there."""
    layout = mode.get("layout")
    return Layout(**layout) if layout else None


def _cell(cell: dict[str, Any], layout: Layout | None, stages: Stages, sizes: Sizes, slo: Slo, rates: Rates) -> Graded:
    assert layout is not None
    shared, turns = float(cell.get("shared") or 0), int(cell.get("turns") or 1)
    # Of a conversation the first prompt is asked for; what came is the mean over its turns.
    mix = tuple(cell.get("mix") or ())
    prompt = cell["prompt"] if turns > 1 or mix else round(cell["prompt_tokens"])
    lengths = Lengths(prompt, round(cell["output_tokens"]), shared=shared, turns=turns, mix=mix)
    sizes = replace(sizes, prefix_cache=lengths.has_prefixes)
    concurrency, rate = int(cell.get("concurrency") or 0), float(cell.get("rate") or 0)
    count = _num_requests(cell)
    cluster = Cluster(layout, stages, sizes, slo, skip=concurrency or count // 10, rates=rates)
    load = closed(count, lengths) if concurrency else poisson(rate, count, lengths, burst=cell.get("burst") or 1.0)
    seen = cluster.run(load, concurrency=concurrency, more=closed(1 << 30, lengths, seed=2))
    values = {
        "ttft": (seen.ttft_mean * 1e3, cell["ttft_ms"]["mean"]),
        "tpot": (seen.tpot_mean * 1e3, cell["tpot_ms"]["mean"]),
        "goodput": (seen.goodput, cell["goodput"]),
    }
    ttft = cell["ttft_ms"]
    between = (ttft.get("low", ttft["mean"]), ttft.get("high", ttft["mean"]))
    if cell["requests"] < ENOUGH:
        between = 0.0, float("inf")  # whatever its interval
    is_fitted = bool(cell.get("fitted"))
    return Graded(cell["mode"], cell["prompt"], cell["output"], concurrency, rate, is_fitted, values, between)


def _num_requests(cell: dict[str, Any]) -> int:
    """Of one round. A closed loop of few requests is not that of many: its users start together and end apart."""
    rounds = int(cell.get("rounds") or 0)
    return round((cell["requests"] + cell.get("dropped", 0)) / rounds) if rounds else MIN_REQUESTS


def medians(graded: list[Graded]) -> dict[str, float]:
    """Median absolute error over the cells that were not fitted (over all, where all were)."""
    held_out = [g for g in graded if not g.is_fitted] or graded
    errors = {q: [abs(e) for g in held_out if (e := g.error(q)) is not None] for q in QUANTITIES}
    return {q: median(seen) if seen else 0.0 for q, seen in errors.items()}


def ranking(graded: list[Graded]) -> tuple[int, int]:
    """(loads under which the modes stand in the measured order of TTFT, loads with several modes). Two modes whose
    measured intervals overlap, or whose means are within CLOSE, have no order."""
    groups: dict[tuple[int, int, int, float], list[Graded]] = {}
    for g in graded:
        groups.setdefault((g.prompt, g.output, g.concurrency, g.rate), []).append(g)
    several = [group for group in groups.values() if len(group) > 1]
    return sum(_same_order(group) for group in several), len(several)


def _same_order(group: list[Graded]) -> bool:
    pairs = [(a, b) for a in group for b in group if _is_clearly_sooner(a, b)]
    return all(a.values["ttft"][0] < b.values["ttft"][0] for a, b in pairs)


def _is_clearly_sooner(a: Graded, b: Graded) -> bool:
    is_apart = a.values["ttft"][1] * (1 + CLOSE) < b.values["ttft"][1]
    return is_apart and a.ttft_between[1] < b.ttft_between[0]


def to_json(graded: list[Graded], source: str) -> dict[str, Any]:
    right, total = ranking(graded)
    return {
        "version": 1,
        "stages": source,
        "cells": [
            {
                "mode": g.mode,
                "prompt": g.prompt,
                "output": g.output,
                "concurrency": g.concurrency,
                "rate": g.rate,
                "fitted": g.is_fitted,
                **{
                    q: {"predicted": g.values[q][0], "measured": g.values[q][1], "error": g.error(q)}
                    for q in QUANTITIES
                },
            }
            for g in graded
        ],
        "median_error": medians(graded),
        "ranking": {"right": right, "of": total},
    }


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:+.0%}"


def show(graded: list[Graded]) -> str:
    rows = []
    for g in graded:
        load = f"c={g.concurrency}" if g.concurrency else f"{g.rate:g}/s"
        cells = [f"{g.values[q][0]:.4g} / {g.values[q][1]:.4g}  {_percent(g.error(q))}" for q in QUANTITIES]
        rows.append([g.mode, str(g.prompt), load, *cells, "fitted" if g.is_fitted else ""])
    header = ("MODE", "PROMPT", "LOAD", "TTFT MS", "TPOT MS", "GOODPUT/S", "")
    right, total = ranking(graded)
    errors = ", ".join(f"{q} {error:.0%}" for q, error in medians(graded).items())
    order = f"; modes in the measured order of TTFT in {right} of {total} loads" if total else ""
    return f"predicted / measured\n{table(rows, header)}\nmedian error: {errors}{order}"
