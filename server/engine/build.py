"""From a boot file to an engine that is ready to step: the one place where a profile meets the engine.

1. The model is loaded, checked and warmed up (`ModelRunner.load`), each stage reported.
2. The scheduler gets its limits by role, "auto" resolved by device.
3. The model card names everything that two workers must have in common.
"""

import time
from collections.abc import Callable
from typing import Final

import torch
import transformers

from server.boot import Boot
from server.card import text_facts
from server.config import Colocated, Config, Decode, Prefill, Role, WorkerSpec
from server.engine.block_pool import BlockPool
from server.engine.engine import Engine
from server.engine.host_pool import HostPool
from server.engine.kv_cache import LAYOUT_VERSION
from server.engine.limits import PIECE_TOKENS, Limits
from server.engine.local_prefill import MIN_TOKENS
from server.engine.model_runner import ModelRunner
from server.engine.scheduler import Scheduler
from server.errors import StartError

# Prompt tokens a worker of a pool computes in a step in which others decode, until steps have been measured.
CPU_LOCAL_PREFILL: Final = 32
GPU_LOCAL_PREFILL: Final = 256


def build_engine(boot: Boot, role: Role, progress: Callable[[str, float], None]) -> Engine:
    """Loads everything. Raises StartError (ModelError among them) with the cause in one line."""
    spec = worker_spec(boot)
    config = boot.config
    pool = config.pool(role)
    runner = ModelRunner(
        f"dummy:{boot.model_dir}" if config.model.path.startswith("dummy:") else boot.model_dir,
        dtype=config.model.dtype,
        device="cuda" if spec.gpus else "cpu",
        threads=len(spec.cpus),
        block_size=config.model.block_size,
        max_len=config.model.max_len,
        max_running=pool.max_seqs if isinstance(pool, Prefill) else pool.max_running,
        kv_bytes=pool.kv_bytes,
        host_swap_bytes=pool.host_swap_bytes,
    )
    runner.load(progress)
    return engine_of(boot, role, runner)


def engine_of(boot: Boot, role: Role, runner: ModelRunner) -> Engine:
    """Of a model that is loaded, with an empty pool: the start of a worker, and of its next role."""
    config, pool = boot.config, boot.config.pool(role)
    host = HostPool(runner.host.num_blocks)
    blocks = BlockPool(runner.pool.num_blocks, config.model.block_size, pool.prefix_cache, host)
    blocks.is_watched = config.router.policy == "kv-aware"
    limits = limits_for(config, role, runner.max_len)
    return Engine(Scheduler(limits, blocks, time.monotonic), runner, time.monotonic)


def worker_spec(boot: Boot) -> WorkerSpec:
    for spec in boot.config.workers:
        if spec.name == boot.name:
            return spec
    raise StartError(f"the profile has no worker {boot.name}")


def limits_for(config: Config, role: Role, max_len: int) -> Limits:
    """What a profile, as it is now, means for the scheduler of one role."""
    pool = config.pool(role)
    limits = Limits(token_budget=pool.budget, chunk_tokens=pool.chunk, max_len=max_len)
    match pool:
        case Prefill():
            limits.max_seqs = pool.max_seqs
            limits.max_running = pool.max_seqs
            limits.reserves_growth = True
            limits.local_prefill_tokens = max(MIN_TOKENS, _local_prefill(config, role))  # prompts are what it is for
            limits.step_sizes = _step_sizes(config, pool)
        case Decode():
            limits.max_running = pool.max_running
            limits.reserves_growth = True
            limits.kv_low, limits.kv_high = pool.kv_low, pool.kv_high
            limits.queue_low, limits.queue_high = pool.queue_low, pool.queue_high
            limits.idle_swap_s = pool.idle_swap_s
            # At 0 what it has to read would wait until nothing decodes.
            limits.local_prefill_tokens = max(config.model.block_size, _local_prefill(config, role))
            limits.step_sizes = _step_sizes(config, pool)
        case Colocated():
            limits.max_running = pool.max_running
    return limits


def local_prefill_start(config: Config, role: Role) -> int:
    """Prompt tokens of a step in which anything decodes, until a worker has measured how many its objective leaves."""
    return GPU_LOCAL_PREFILL if config.pool(role).gpus else CPU_LOCAL_PREFILL


def _local_prefill(config: Config, role: Role) -> int:
    wanted = config.decode.prefill_tokens
    return local_prefill_start(config, role) if wanted == "auto" else wanted


def _step_sizes(config: Config, pool: Prefill | Decode) -> tuple[int, ...]:
    return PIECE_TOKENS if pool.gpus and config.decode.prefill_tokens == "auto" else ()


def model_facts(boot: Boot, runner: ModelRunner) -> dict[str, str]:
    """`Card.same` of a worker: text facts, weights, and everything that gives KV bytes their meaning."""
    spec = runner.spec
    text = runner.config.get_text_config(decoder=True)
    return text_facts(boot.model_dir, boot.config.model.path) | {
        "fingerprint": runner.fingerprint(),
        "dtype": str(runner.dtype).removeprefix("torch."),
        "layers": str(spec.num_layers),
        "kv_heads": str(spec.num_kv_heads),
        "head_dim": str(spec.head_dim),
        "block_size": str(spec.block_size),
        "tp": "1",  # ranks of a worker; each has its share of the KV heads
        "layout": str(LAYOUT_VERSION),
        "window": str(spec.sliding_window),
        "rope": str(getattr(text, "rope_parameters", None)),
    }


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__}
