"""The start-up check: our paged forward must give the logits of transformers' own eager attention.

One prompt of fixed random tokens goes through whole, in chunks, and with its last token as a decode step; if the model
has a sliding window, the prompt is longer than the window. A difference refuses the model: better no server than one
that is subtly wrong.
"""

from collections.abc import Callable
from typing import Any

import torch

from server.engine.attention import IMPLEMENTATION
from server.engine.kv_cache import KVSpec
from server.errors import ModelError
from server.sequence import SamplingParams, SeqId, Sequence, Slice

# Of ||ours - theirs|| / ||theirs - mean|| over all positions. bfloat16 and float16 differ by rounding in each layer;
# a wrong mask or position is an order of magnitude above.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.02}
_MAX_CHECKED = 1100  # tokens: eager attention takes memory by the square

Forward = Callable[[list[Slice]], torch.Tensor]


def check_length(spec: KVSpec) -> int:
    """Tokens of the check prompt; past the window where that is affordable."""
    length = 3 * spec.block_size + 5
    window = spec.sliding_window
    return max(length, window + spec.block_size + 3) if window and window < _MAX_CHECKED else length


def check_sequence(spec: KVSpec, vocab_size: int) -> Sequence:
    """Its blocks are the first of the pool after the null block."""
    length = check_length(spec)
    prompt = torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(20)).tolist()
    table = list(range(1, 1 + spec.num_blocks_for(length)))
    return Sequence(SeqId("check", 0, 0), prompt, SamplingParams(max_tokens=1), block_table=table)


def check_logits(theirs: torch.Tensor, forward: Forward, seq: Sequence, spec: KVSpec, name: str) -> dict[str, float]:
    """`theirs` are the eager logits of `seq`; `forward` computes slices of it against a pool of its own and gives the
    logits of all their tokens. Returns the relative differences; raises ModelError when one is too large."""
    scale = (theirs - theirs.mean(-1, keepdim=True)).norm()
    limit = _TOLERANCE[spec.dtype]
    differences: dict[str, float] = {}
    for way, stops in _ways(len(seq.prompt), spec.block_size).items():
        ours = torch.cat([forward([Slice(seq, a, b - a)]).float() for a, b in zip([0, *stops], stops, strict=False)])
        differences[way] = float((ours - theirs).norm() / scale)
        if not differences[way] <= limit:  # NaN is refused too
            raise ModelError(
                f"{name} gives other logits {way} than in transformers: relative difference {differences[way]:.2g}, "
                f"allowed {limit:g} in {str(spec.dtype).removeprefix('torch.')}",
                help="its attention has something pdctl does not know of",
            )
    return differences


def _ways(length: int, block_size: int) -> dict[str, list[int]]:
    """Ends of the forwards, for each way to compute the prompt."""
    return {
        "in one forward": [length],
        "in chunks": [block_size, 2 * block_size + 3, length],
        "with a decode step": [length - 1, length],
    }


def eager_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    """transformers' own, [tokens, vocab] in float32."""
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([prompt], device=model.device)
        return model(input_ids=ids, use_cache=False).logits[0].float()  # type: ignore[no-any-return]
    finally:
        model.set_attn_implementation(IMPLEMENTATION)
