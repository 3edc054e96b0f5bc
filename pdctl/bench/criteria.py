"""--fail-on: a criterion that, when it holds for a cell, makes the bench end with exit 8.

ttft_p95>800ms    itl_p99>=0.2s    goodput<2    pd:attained<0.9    errors>0
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import ge, gt, le, lt
from typing import Any

from pdctl.exits import UsageError

_COMPARE: dict[str, Callable[[float, float], bool]] = {">": gt, "<": lt, ">=": ge, "<=": le}
_TIMES = ("ttft", "tpot", "itl", "second_token")
_OF = ("mean", "p50", "p95", "p99", "max")
_PLAIN = ("requests_s", "output_tok_s", "attained", "goodput", "errors", "transfer_share")
_PATTERN = re.compile(r"(?:([\w.-]+):)?(\w+)\s*(>=|<=|>|<)\s*([0-9.]+)\s*(ms|s|%)?")


@dataclass(frozen=True, slots=True)
class Criterion:
    text: str
    mode: str
    quantity: str
    compare: Callable[[float, float], bool]
    limit: float  # times in ms

    def missed(self, result: dict[str, Any]) -> list[str]:
        """A line for each cell in which it holds, and for each of which nobody knows: there was no time for it."""
        cells = [cell for cell in result["cells"] if self.mode in ("", cell["mode"])]
        unknown = [name for name in result.get("not_measured") or () if self.mode in ("", name.split()[0])]
        lines = [f"{self.text}: {name} was not measured" for name in unknown]
        if not cells and not unknown:
            lines.append(
                f"{self.text}: there is no mode {self.mode}" if self.mode else f"{self.text}: there is no cell"
            )
        for cell in cells:
            value = _value(cell, self.quantity)
            if value is not None and self.compare(value, self.limit):
                load = f"c={cell['concurrency']}" if cell["concurrency"] else f"{cell['rate']:g}/s"
                lines.append(f"{self.text}: {cell['mode']} {cell['prompt']}/{cell['output']} {load} has {value:g}")
        return lines


def parse(text: str) -> Criterion:
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--fail-on {text!r} is not like ttft_p95>800ms")
    mode, quantity, operator, number, unit = match.groups()
    head, _, tail = quantity.rpartition("_")
    is_time = head in _TIMES and tail in _OF
    if not is_time and quantity not in _PLAIN:
        known = ", ".join([*(f"{t}_{{{'|'.join(_OF)}}}" for t in _TIMES), *_PLAIN])
        raise UsageError(f"--fail-on {text!r}: no quantity {quantity}", help=f"there are: {known}")
    scale = {"s": 1e3 if is_time else 1.0, "%": 0.01}.get(unit or "", 1.0)
    return Criterion(text, mode or "", quantity, _COMPARE[operator], float(number) * scale)


def _value(cell: dict[str, Any], quantity: str) -> float | None:
    if quantity in cell:
        return float(cell[quantity])
    if quantity == "transfer_share":
        return float(cell["transfer"]["share_of_ttft"]) if cell.get("transfer") else None
    head, _, tail = quantity.rpartition("_")
    return float(cell[f"{head}_ms"][tail])
