"""What a worker's memory goes to, as one table at its start.

weights     measured once loaded
workspace   estimated: activations of the largest step, and logits and probabilities of every row that can sample
kv          the pool: `kv_bytes`, or what "auto" came to
graphs      measured while CUDA graphs were recorded; none on a CPU
ring        `transfer.ring_bytes`, at a decode worker that prompts come to
staging     copies of chunks on their way out, at a prefill worker whose pool is on a GPU or whose chunks are encoded
host_swap   `host_swap_bytes`; a GPU worker's lies beside its device, and is not part of the total
"""

from dataclasses import asdict, dataclass

from server.config import Config, Prefill, Role
from server.engine.model_runner import ModelRunner

_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """Bytes. `left` is what the device had for this worker, less `total`."""

    weights: int
    workspace: int
    kv: int
    graphs: int
    ring: int
    staging: int
    host_swap: int
    total: int
    left: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {size / 2**20:.0f} MiB" for name, size in self.as_dict().items())


def memory_table(config: Config, role: Role, runner: ModelRunner) -> MemoryTable:
    """Of a loaded runner."""
    kv = runner.pool.blocks.numel()
    ring = config.transfer.ring_bytes if role == "decode" and config.prefill.workers else 0
    host_swap = runner.host.num_bytes
    workspace = _workspace(config, role, runner)
    staging = _staging(config, role, runner)
    on_device = workspace + kv + runner.graph_bytes + ring + staging
    later = on_device + (host_swap if runner.device.type == "cpu" else 0)
    total = runner.weight_bytes + later
    left = runner.free_bytes - later
    return MemoryTable(runner.weight_bytes, workspace, kv, runner.graph_bytes, ring, staging, host_swap, total, left)


def _staging(config: Config, role: Role, runner: ModelRunner) -> int:
    is_staged = runner.device.type == "cuda" or config.transfer.compression != "none"
    if role != "prefill" or not is_staged:
        return 0
    return config.transfer.staging_bytes(runner.spec.block_size, runner.pool.blocks.shape[1])


def _workspace(config: Config, role: Role, runner: ModelRunner) -> int:
    """Of the layer that is computed: the residual, what norm and attention read and write, both halves of the MLP."""
    pool = config.pool(role)
    num_rows = pool.max_seqs if isinstance(pool, Prefill) else pool.max_running
    text = runner.config.get_text_config(decoder=True)
    hidden = int(text.hidden_size)
    inner = int(getattr(text, "intermediate_size", 0) or 4 * hidden)
    attention = (2 * int(text.num_attention_heads) + 2 * runner.spec.num_kv_heads) * runner.spec.head_dim
    activations = pool.budget * (3 * hidden + attention + 3 * inner) * runner.dtype.itemsize
    return activations + 2 * num_rows * runner.vocab_size * _LOGIT_BYTES
