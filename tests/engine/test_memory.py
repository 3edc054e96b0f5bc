"""The table of what a worker's memory goes to: budgets as in the profile, weights as loaded, sums that are sums."""

from pathlib import Path
from typing import Any

import pytest

from server.config import Config, Role
from server.engine.memory import memory_table
from server.transfer.build import sending_side
from tests.engine.models import FAMILIES, Reference, load_runner, save_model

PROFILE: dict[str, Any] = {
    "prefill": {"workers": 1, "max_seqs": 4},
    "decode": {"workers": 1, "max_running": 32},
    "transfer": {"ring_bytes": "64MiB"},
}


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), **FAMILIES["llama"])


@pytest.mark.parametrize(("role", "ring", "rows"), [("prefill", 0, 4), ("decode", 64 * 2**20, 32)])
def test_each_role_has_its_own_table(llama_dir: Path, role: Role, ring: int, rows: int) -> None:
    runner = load_runner(llama_dir, kv_bytes=10_000_000, max_len=1000, host_swap_bytes=1_000_000)
    table = memory_table(Config.model_validate(PROFILE), role, runner)
    block = runner.spec.block_bytes
    assert (table.kv, table.host_swap) == (10_000_000 // block * block, 1_000_000 // block * block)
    assert table.weights == sum(p.nelement() * 4 for p in Reference(llama_dir).model.parameters())
    assert (table.ring, table.graphs) == (ring, 0)
    # Logits and probabilities of every row that samples are part of the workspace; a CPU's host memory, of the total.
    assert table.workspace > 2 * rows * 512 * 4
    parts = (table.weights, table.workspace, table.kv, table.graphs, table.ring, table.staging, table.host_swap)
    assert table.total == sum(parts)
    assert table.left == runner.free_bytes - table.total + table.weights
    assert "kv 10 MiB" in str(table) and "host swap 1 MiB" in str(table)


@pytest.mark.parametrize(("role", "compression"), [("prefill", "none"), ("prefill", "fp8"), ("decode", "fp8")])
def test_staging_is_what_the_sender_takes(llama_dir: Path, role: Role, compression: str) -> None:
    runner = load_runner(llama_dir, kv_bytes=10_000_000, max_len=1000)
    config = Config.model_validate({**PROFILE, "transfer": {"compression": compression, "chunk_tokens": 128}})
    table = memory_table(config, role, runner)
    assert (table.staging > 0) == (role == "prefill" and compression == "fp8")
    if table.staging:
        side = sending_side(
            config.transfer, "p", runner.pool.blocks, runner.spec,
            on_released=print, on_failed=print, on_peer_lost=print,
        )  # fmt: skip
        assert side.sender.staging_bytes == table.staging
        side.transport.close()
