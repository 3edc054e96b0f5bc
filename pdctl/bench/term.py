"""A result's plots for a terminal: a CDF as a row of shades, goodput as bars."""

from typing import Any

from pdctl.bench.compare import name_of, prompt_of

WIDTH = 40
SHADES = " ▁▂▃▄▅▆▇█"


def plots(result: dict[str, Any]) -> str:
    return "\n\n".join([_strips(result, "ttft_cdf", "TTFT"), _strips(result, "itl_cdf", "gaps"), _bars(result)])


def _strips(result: dict[str, Any], name: str, label: str) -> str:
    """Share of requests by time, on one logarithmic scale for all rows: the earlier it is full, the better."""
    cells = [c for c in result["cells"] if c[name]]
    if not cells:
        return f"{label}: none"
    low = max(0.1, min(c[name][0][0] for c in cells))
    high = max(low * 2, max(c[name][-1][0] for c in cells))
    edges = [low * (high / low) ** (i / (WIDTH - 1)) for i in range(WIDTH)]
    rows = [f"{label}: share by time, {low:.0f} ms to {high:.0f} ms (log)"]
    for c in cells:
        strip = "".join(SHADES[round(8 * _share(c[name], edge))] for edge in edges)
        rows.append(f"  {_name(c):<32} {strip}  p50 {_at(c[name], 0.5):.0f}  p99 {_at(c[name], 0.99):.0f}")
    return "\n".join(rows)


def _share(cdf: list[list[float]], value: float) -> float:
    return max((share for v, share in cdf if v <= value), default=0.0)


def _at(cdf: list[list[float]], share: float) -> float:
    return next((v for v, s in cdf if s >= share), cdf[-1][0])


def _bars(result: dict[str, Any]) -> str:
    top = max((c["goodput"] for c in result["cells"]), default=0.0) or 1.0
    rows = ["goodput, requests/s in both objectives"]
    rows += [
        f"  {_name(c):<32} {'█' * round(WIDTH * c['goodput'] / top)} {c['goodput']:.3g} ({c['attained']:.0%})"
        for c in result["cells"]
    ]
    return "\n".join(rows)


def _name(cell: dict[str, Any]) -> str:
    return f"{cell['mode']} {prompt_of(cell)} x {name_of(cell)}"
