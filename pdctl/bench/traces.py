"""Recorded loads: when requests came and how long they were. Known by their columns, not by their file names.

Azure LLM inference     CSV    TIMESTAMP, ContextTokens, GeneratedTokens          (2023 and 2024)
BurstGPT                CSV    Timestamp [s], Request tokens, Response tokens
Mooncake                JSONL  timestamp [ms], input_length, output_length, hash_ids (512-token blocks, shared prefix)
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pdctl.exits import UsageError

MOONCAKE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request. `prefix` names its leading blocks: equal names, equal tokens."""

    at: float  # seconds from the first
    prompt: int
    output: int
    prefix: tuple[int, ...] = ()


def read(file: Path, limit: int = 0) -> list[Recorded]:
    """At most `limit` requests, oldest first. Raises UsageError for a file of another kind."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            head = lines.readline()
            lines.seek(0)
            rows = _mooncake(lines) if head.lstrip().startswith("{") else _table(csv.DictReader(lines), head, file)
            requests = sorted((r for r in rows if r.prompt > 0 and r.output > 0), key=lambda r: r.at)
    except OSError as error:
        raise UsageError(f"trace {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"trace {file}: a line is not as its format says: {error!r}") from error
    if not requests:
        raise UsageError(f"trace {file} holds no request with tokens")
    chosen, start = requests[: limit or None], requests[0].at
    return [Recorded(r.at - start, r.prompt, r.output, r.prefix) for r in chosen]


def _mooncake(lines: Any) -> Iterator[Recorded]:
    for line in lines:
        if line.strip():
            r = json.loads(line)
            ids = tuple(r.get("hash_ids", ()))
            yield Recorded(r["timestamp"] / 1000, int(r["input_length"]), int(r["output_length"]), ids)


def _table(rows: "csv.DictReader[str]", head: str, file: Path) -> Iterator[Recorded]:
    columns = {name.strip().lower() for name in head.split(",")}
    if {"timestamp", "contexttokens", "generatedtokens"} <= columns:
        return (_azure({k.strip().lower(): v for k, v in row.items()}) for row in rows)
    if {"timestamp", "request tokens", "response tokens"} <= columns:
        return (_burst({k.strip().lower(): v for k, v in row.items()}) for row in rows)
    raise UsageError(
        f"trace {file}: columns {head.strip()!r} are of no known format",
        help="Azure LLM (TIMESTAMP,ContextTokens,GeneratedTokens), BurstGPT CSV or Mooncake JSONL",
    )


def _azure(row: dict[str, str]) -> Recorded:
    # Seven digits after the point: one more than datetime reads.
    text = row["timestamp"].strip()
    whole, _, rest = text.partition(".")
    digits = "".join(c for c in rest if c.isdigit())[:6]
    at = datetime.fromisoformat(whole).timestamp() + (float(f"0.{digits}") if digits else 0.0)
    return Recorded(at, int(row["contexttokens"]), int(row["generatedtokens"]))


def _burst(row: dict[str, str]) -> Recorded:
    return Recorded(float(row["timestamp"]), int(row["request tokens"]), int(row["response tokens"]))
