"""What bench/cpu_grid.sh measured, held to what hybrid routing is for: it should lose nothing to colocated workers, and
take their stalls away.

    python bench/bars.py FOLDER        the script's; a part that is not there is passed over. Ends with 1 under a bar
"""

import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from pdctl.bench import compare, results

Cell = dict[str, Any]
BUDGETS, PD, HYBRID = "colocated", "pd", "hybrid"


class Bars:
    def __init__(self) -> None:
        self.num_missed = 0

    def __call__(self, what: str, value: float, at_least: float = 0.0, at_most: float = float("inf")) -> None:
        is_met = at_least <= value <= at_most
        self.num_missed += not is_met
        wanted = f"at least {at_least:g}" if at_least else f"at most {at_most:g}"
        print(f"{'ok    ' if is_met else 'MISSED'} {what}: {value:.3f} ({wanted})")


def cells(folder: Path, part: str) -> list[Cell]:
    file = folder / f"{part}.json"
    return [c for c in results.read(file, "bench")["cells"] if c["requests"]] if file.exists() else []


def by_load(found: list[Cell]) -> dict[str, dict[str, Cell]]:
    """load -> mode -> cell."""
    loads: dict[str, dict[str, Cell]] = {}
    for cell in found:
        name = f"{compare.prompt_of(cell)}/{cell['output']} at {cell['concurrency']}"
        loads.setdefault(name, {})[cell["mode"]] = cell
    return loads


def rate(one: Cell, other: Cell) -> float:
    return float(one["requests_s"] / other["requests_s"]) if other["requests_s"] else 0.0


def grid(found: list[Cell], bar: Bars) -> None:
    loads = {name: modes for name, modes in by_load(found).items() if {BUDGETS, HYBRID} <= modes.keys()}
    for name, modes in loads.items():
        base, hybrid = modes[BUDGETS], modes[HYBRID]
        parts = [f"{mode} {rate(cell, base):.3f} of its requests/s" for mode, cell in modes.items() if mode != BUDGETS]
        tails = ", ".join(f"{mode} {cell['itl_ms']['p99']:.0f}" for mode, cell in modes.items())
        print(f"       {name}: {', '.join(parts)}; p99 gap ms {tails}; hybrid by path: {compare.paths_of(hybrid)}")
    for name, modes in loads.items():
        base, hybrid = modes[BUDGETS], modes[HYBRID]
        if base["concurrency"] == 1:
            bar(f"{name}, TTFT of hybrid", hybrid["ttft_ms"]["mean"] / base["ttft_ms"]["mean"], at_most=1.05)
            bar(f"{name}, requests/s of hybrid", rate(hybrid, base), at_least=0.95)
    if loads:
        all_rates = geometric_mean(rate(modes[HYBRID], modes[BUDGETS]) for modes in loads.values())
        bar(f"{len(loads)} loads, requests/s of hybrid (geometric mean)", all_rates, at_least=0.92)


def budgets(found: list[Cell], bar: Bars) -> None:
    for name, modes in by_load(found).items():
        swept = [cell for mode, cell in modes.items() if mode.startswith(BUDGETS)]
        if not swept or HYBRID not in modes:
            continue
        points = ", ".join(f"{m} {c['requests_s']:.3f}/s at {c['itl_ms']['p99']:.0f} ms" for m, c in modes.items())
        print(f"       {name}: {points}")
        hybrid, tuned = modes[HYBRID], max(swept, key=lambda cell: float(cell["requests_s"]))
        if hybrid.get("mix"):
            bar(f"{name}, requests/s of hybrid over {tuned['mode']}", rate(hybrid, tuned), at_least=0.95)
            bar(f"{name}, p99 gap of {tuned['mode']} over ours", _tail(tuned) / max(1e-9, _tail(hybrid)), at_least=2.5)
            beyond = sum(all(not _is_as_good(c, ours) for c in swept) for ours in modes.values() if ours not in swept)
            bar(f"{name}, points that no budget reaches", beyond, at_least=1)


def _tail(cell: Cell) -> float:
    return float(cell["itl_ms"]["p99"])


def _is_as_good(a: Cell, b: Cell) -> bool:
    return bool(a["requests_s"] >= b["requests_s"] and _tail(a) <= _tail(b))


def main() -> int:
    folder, bar = Path(sys.argv[1]), Bars()
    first, second = cells(folder, "grid"), cells(folder, "budgets")
    grid(first, bar)
    budgets(second, bar)
    for tokens in (256, 384):
        for name, modes in by_load(cells(folder, f"long-{tokens}")).items():
            if {BUDGETS, HYBRID} <= modes.keys():
                bar(f"{name}, requests/s of hybrid", rate(modes[HYBRID], modes[BUDGETS]), at_least=0.92)
    tails = [_tail(cell) for cell in first + second if cell["mode"] == PD]
    if tails:
        bar(f"p99 gap of pure PD, worst of {len(tails)} cells, ms", max(tails), at_most=140)
    return int(bar.num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
