"""What transformers itself generates: greedy, its own cache, its own default attention."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def generate(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """`num_tokens` greedy tokens, end-of-text ids among them."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]


@torch.inference_mode()
def margins(model: Any, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """Log-probability between the two likeliest tokens at each position of `output`, given all before it."""
    ids = torch.tensor([[*prompt, *output]])
    logprobs = torch.log_softmax(model(ids, use_cache=False).logits[0].float(), dim=-1)
    top = logprobs.topk(2, dim=-1).values[len(prompt) - 1 : -1]
    return [float(pair[0] - pair[1]) for pair in top]
