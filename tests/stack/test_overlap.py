"""A long prompt's KV travels while the prompt is read: next to nothing is left to send when the reading ends."""

import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.stack.harness import PD, complete, running

COMPUTE_CHUNK = 256  # `chunk_tokens = "auto"` on a CPU
PROMPT = 1500


@pytest.mark.timeout(300)
def test_transfer_overlaps_prefill(tmp_path: Path, smollm2_dir: Path) -> None:
    with running(tmp_path, PD, model=smollm2_dir, dtype="auto", kv_bytes="512MiB") as stack:
        url = stack.url
        records: list[dict[str, Any]] = []
        for seed in range(3):  # three: the median of each figure forgives one hiccup of the machine
            prompt = [100 + (seed * 7919 + i * 104729) % 40000 for i in range(PROMPT)]
            records.append(complete(url, prompt, max_tokens=16)["pdctl"])

    def median(figure: Any) -> float:
        return statistics.median(figure(record) for record in records)

    reading = median(lambda r: r["prefill_end_ms"] - r["prefill_start_ms"])
    # 1. The first chunk is on decode before half of the prompt is read.
    assert median(lambda r: r["first_chunk_ms"] - r["prefill_start_ms"]) < reading / 2
    # 2. From the end of reading to the last block on decode: less than reading one compute chunk takes.
    assert median(lambda r: r["kv_ready_ms"] - r["prefill_end_ms"]) < reading * COMPUTE_CHUNK / PROMPT
    # 3. Most of it was there when token 0 was, nothing came twice, and all of it came.
    assert median(lambda r: r["overlap"]) > 0.75
    assert all(r["resends"] == 0 for r in records)
    assert all(r["kv_bytes"] == r["wire_bytes"] for r in records)
