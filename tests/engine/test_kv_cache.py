"""What one block holds, and which models are refused because their layers do not all keep the same."""

import types
from typing import Any

import pytest
import torch
import transformers

from server.engine.kv_cache import KVCachePool, KVSpec
from server.errors import ModelError
from tests.engine.models import FAMILIES, make_config


def spec_of(config: Any, block_size: int = 16) -> KVSpec:
    return KVSpec.from_config(config, torch.float32, block_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_spec_of_supported_families(family: str) -> None:
    spec = spec_of(make_config(**FAMILIES[family]))
    window = FAMILIES[family].get("sliding_window")
    assert spec == KVSpec(2, 2, 16, torch.float32, 16, window)
    assert spec.block_bytes == 2 * 2 * 2 * 16 * 16 * 4


def test_head_dim_and_kv_heads_by_default() -> None:
    config = transformers.LlamaConfig(hidden_size=96, num_attention_heads=6, num_key_value_heads=None)
    spec = spec_of(config)
    assert (spec.num_kv_heads, spec.head_dim) == (6, 16)


def test_window_of_qwen2_only_when_all_layers_use_it() -> None:
    window = {"use_sliding_window": True, "sliding_window": 32}
    assert spec_of(make_config("qwen2", sliding_window=32)).sliding_window is None
    assert spec_of(make_config("qwen2", max_window_layers=0, **window)).sliding_window == 32
    with pytest.raises(ModelError, match="mixed sliding_attention and full_attention"):
        spec_of(make_config("qwen2", max_window_layers=1, **window))


REFUSED = {
    "deepseek_v3": "latent attention",
    "mamba": "recurrent",
    "mamba2": "recurrent",
    "rwkv": "recurrent|usable",
    "recurrent_gemma": "recurrent",
    "jamba": "mamba",
    "falcon_h1": "mamba",
    "lfm2": "conv",
    "qwen3_next": "linear",
    "gemma2": "mixed sliding_attention and full_attention",
    "gemma3_text": "mixed sliding_attention and full_attention",
    "gemma3n_text": "shared-KV|mixed",
    "gpt_oss": "mixed sliding_attention and full_attention",
    "llama4_text": "chunked_attention",
    "t5": "encoder",
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_by_name(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type)
    with pytest.raises(ModelError, match=REFUSED[model_type]) as refused:
        spec_of(config)
    assert model_type in str(refused.value)


def test_layers_of_different_kv_heads_are_refused() -> None:
    config = types.SimpleNamespace(
        model_type="uneven", num_attention_heads=4, num_key_value_heads=[2, 1], hidden_size=64, num_hidden_layers=2
    )
    config.get_text_config = lambda decoder: config
    with pytest.raises(ModelError, match="different num_key_value_heads"):
        spec_of(config)


def test_pool_layout() -> None:
    spec = KVSpec(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.bfloat16, block_size=5)
    pool = KVCachePool(spec, 7)
    assert pool.data.shape == (7, 2, 3, 2, 5, 4)
    assert pool.blocks.shape == (7, spec.block_bytes)
    assert not pool.blocks.any()
    key, value = pool.layer(1)
    assert key.shape == value.shape == (7, 2, 5, 4)
    key[4, 1, 2] = 1.0
    value[4, 1, 3] = 2.0
    # The same memory, and only block 4 of it.
    assert pool.blocks.any(1).tolist() == [False, False, False, False, True, False, False]
    assert pool.data[4, 1, 1, 0, 2].tolist() == [1.0] * 4
    assert pool.data[4, 1, 1, 1, 3].tolist() == [2.0] * 4


def test_a_copied_block_is_the_whole_of_it() -> None:
    pool = KVCachePool(KVSpec(2, 2, 4, torch.float32, 4), 3)
    pool.data[1].normal_()
    pool.blocks[2] = pool.blocks[1]
    assert torch.equal(pool.data[2], pool.data[1])
