"""The fused loop gives the tokens of transformers' generate, float32, on tiny random models of each family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from server.engine.forward import FusedForward, TransformersForward
from server.engine.model_runner import ModelRunner
from server.sequence import Batch, SamplingParams, SeqId, Sequence, Slice

SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "llama-biased-tied": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-3.1-rope": LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=24),
    "qwen2": Qwen2Config(**SHAPE, use_sliding_window=False),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32, use_sliding_window=False),
}


def make(config: Any, folder: Path) -> Any:
    """A model whose biases and norms are not zeros and ones, so that a forgotten one shows."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def greedy(runner: ModelRunner, prompts: list[list[int]], chunk: int, num_new: int) -> list[list[int]]:
    """Prompts in chunks of `chunk`, all sequences in one batch, then decode; every step is one `execute`."""
    width = runner.spec.num_blocks_for(max(map(len, prompts)) + num_new)
    seqs = []
    for i, prompt in enumerate(prompts):
        table = list(range(1 + i * width, 1 + (i + 1) * width))
        seqs.append(Sequence(SeqId("t", i, 0), prompt, SamplingParams(num_new, temperature=0.0), block_table=table))
    while waiting := [s for s in seqs if len(s.output) < num_new]:
        batch = Batch([Slice(s, s.num_computed, min(chunk, s.num_pending)) for s in waiting])
        for part, token in zip(batch.slices, runner.execute(batch), strict=True):
            part.seq.num_computed += part.num_tokens
            if token is not None:
                part.seq.output.append(token.id)
    return [s.output for s in seqs]


@pytest.mark.parametrize("name", CONFIGS)
def test_fused_loop_gives_the_tokens_of_generate(name: str, tmp_path: Path) -> None:
    model = make(CONFIGS[name], tmp_path)
    runner = ModelRunner(tmp_path, dtype="float32", kv_bytes=2**22)
    runner.load()
    assert isinstance(runner._forward, FusedForward)
    torch.manual_seed(6)
    prompts = [torch.randint(3, 211, (n,)).tolist() for n in (40, 7, 1)]
    ours = greedy(runner, prompts, chunk=17, num_new=12)
    for prompt, output in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert output == theirs[0, len(prompt) :].tolist()


def test_merging_leaves_one_copy_of_the_weights(tmp_path: Path) -> None:
    make(CONFIGS["qwen2"], tmp_path)
    runner = ModelRunner(tmp_path, dtype="float32", kv_bytes=2**22, pack=False)
    runner.load()
    assert runner._weights is not None
    attention = runner._model.model.layers[1].self_attn
    merged = runner._weights.layers[1].qkv
    assert attention.k_proj.weight.untyped_storage().data_ptr() == merged.weight.untyped_storage().data_ptr()
    assert merged.bias is not None
    assert attention.v_proj.bias.untyped_storage().data_ptr() == merged.bias.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "change",
    [{"hidden_act": "gelu"}, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}],
    ids=["activation", "rope"],
)
def test_an_unknown_feature_goes_through_transformers(change: dict[str, Any], tmp_path: Path) -> None:
    make(LlamaConfig(**SHAPE, **change), tmp_path)
    runner = ModelRunner(tmp_path, dtype="float32", kv_bytes=2**22)
    runner.load()
    assert isinstance(runner._forward, TransformersForward)
