"""Models for tests: a tiny random Llama made on the spot, and the embedded default."""

from __future__ import annotations

import string
from pathlib import Path

import pytest

from server import model_store

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 512


@pytest.fixture
def multiplies_bfloat16() -> None:
    """For tests of a real model in bfloat16: a CPU without its instructions would take minutes for each answer."""
    import torch

    from server.engine.loading import choose_dtype

    if choose_dtype("auto", torch.device("cpu")) is not torch.bfloat16:
        pytest.skip("this CPU does not multiply bfloat16")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers in float32, always the same weights, with a byte-level tokenizer and a chat template.

    Byte-level: any text round-trips, so tests may send what they like. Its eos is `<|im_end|>`, id 2.
    """
    folder = tmp_path_factory.mktemp("tiny-llama")
    _save_tiny_tokenizer(folder)
    _save_tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The embedded default model; the first run on a machine downloads and converts it."""
    return model_store.resolve(model_store.EMBEDDED)


def _save_tiny_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=8192,
    ).save_pretrained(folder)


def _corpus() -> list[str]:
    """Enough different words for the merges; every pair of letters, so that no text is needed from anywhere."""
    letters = string.ascii_lowercase
    return [f" {first}{second}{first}" for first in letters for second in letters]


def _save_tiny_llama(folder: Path) -> None:
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
        # Wide enough that the greedy token wins by a margin: two correct attention paths then pick the same one.
        initializer_range=0.2,
        dtype="float32",
    )
    # The generator of the test process is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
