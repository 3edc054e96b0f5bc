"""Tiny random models of several families, a loop that serves sequences with the real Scheduler, and the reference."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from server.engine.block_pool import BlockPool
from server.engine.engine import Engine
from server.engine.model_runner import ModelRunner
from server.engine.scheduler import Limits, Scheduler
from server.sequence import SamplingParams, SeqId, Sequence

VOCAB_SIZE = 512
# Wide enough that the greedy token wins by a margin: two correct attention paths then pick the same one.
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": 40},
    "mixtral": {"model_type": "mixtral", **_MOE},
    "qwen3_moe": {"model_type": "qwen3_moe", **_MOE},
}


def make_config(model_type: str, **changes: Any) -> Any:
    return transformers.AutoConfig.for_model(model_type, **{**_SHAPE, **changes})


def save_model(folder: Path, model_type: str, **changes: Any) -> Path:
    """A random float32 model, always the same for the same arguments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(make_config(model_type, **changes)).to(torch.float32)
    model.save_pretrained(folder)
    return folder


def load_runner(folder: Path | str, **options: Any) -> ModelRunner:
    runner = ModelRunner(folder, **{"dtype": "float32", "threads": 1, "kv_bytes": 64 * 2**20, **options})
    runner.load()
    return runner


def random_prompt(length: int, seed: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 10_007 + length)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


def make_sequence(number: int, prompt: list[int], **params: Any) -> Sequence:
    sampling = SamplingParams(**{"max_tokens": 32, "temperature": 0.0, **params})
    return Sequence(SeqId("test", number, 0), prompt, sampling)


def make_engine(runner: ModelRunner, **limits: Any) -> Engine:
    pool = BlockPool(runner.pool.num_blocks, runner.spec.block_size)
    return Engine(Scheduler(Limits(**limits), pool, lambda: 0.0), runner)


def serve(engine: Engine, seqs: Iterable[Sequence]) -> list[list[int]]:
    """Adds all at once and steps until nothing is left; their outputs."""
    seqs = list(seqs)
    for seq in seqs:
        engine.scheduler.add(seq)  # type: ignore[attr-defined]
    while (result := engine.step()) is not None:
        assert result.error is None
        engine.scheduler.check_integrity()  # type: ignore[attr-defined]
    return [seq.output for seq in seqs]


class Reference:
    """transformers' own generate, greedy, in float32, with its eager attention and a DynamicCache."""

    def __init__(self, folder: Path | str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.model.generation_config = transformers.GenerationConfig(pad_token_id=0)

    @torch.inference_mode()
    def generate(self, prompt: list[int], num_new: int = 32) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False)
        return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def logprobs(self, tokens: list[int], num_last: int) -> torch.Tensor:
        """Of what follows each of the last `num_last` prefixes of `tokens`, the whole of it included."""
        logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0, -num_last:]
        return logits.log_softmax(-1)  # type: ignore[no-any-return]
