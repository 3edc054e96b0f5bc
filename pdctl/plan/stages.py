"""What each stage of a sequence costs on one device: the clock of the simulator.

A step is linear in what it computes; reading the weights, once a step, hides behind the arithmetic of prompts:

    base + max(floor, prompt tokens * p) + decoding sequences * d + prompt tokens * context * a + context tokens * c

which is the roofline of a dense transformer with its attention apart (Williams et al., CACM 2009; decode terms as in
Zhong et al., DistServe, OSDI 2024, appendix A). Workers that share a memory slow each other down: what of a step reads
prompts and what writes tokens by shares of their own. Terms are given, fitted or estimated: see fit.py, roofline.py.
"""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from pdctl.exits import UsageError


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds of one step of one worker."""

    base_s: float = 0.0
    floor_s: float = 0.0
    prompt_token_s: float = 0.0
    prompt_context_s: float = 0.0  # a prompt token times a token before it
    decode_seq_s: float = 0.0
    context_token_s: float = 0.0  # a token of context of a sequence that decodes

    def step_s(self, num_prompt: int, prompt_context: float, num_decoding: int, context: float) -> float:
        return sum(self.parts_s(num_prompt, prompt_context, num_decoding, context))

    def parts_s(self, num_prompt: int, prompt_context: float, num_decoding: int, context: float) -> tuple[float, float]:
        """(for prompts, for sequences that decode); the weights are read for prompts if there are some."""
        weights = self.base_s + max(self.floor_s, self.prompt_token_s * num_prompt)
        decoding = self.decode_seq_s * num_decoding + self.context_token_s * context
        if not num_prompt:
            return 0.0, weights + decoding
        return weights + self.prompt_context_s * prompt_context, decoding

    def prefill_s(self, num_tokens: int, chunk: int) -> float:
        """A prompt alone, in chunks."""
        starts = range(0, num_tokens, chunk)
        sizes = [min(chunk, num_tokens - start) for start in starts]
        return sum(self.step_s(n, n * (i + n / 2), 0, 0) for i, n in zip(starts, sizes, strict=True))

    def decode_s(self, batch: int, context: float) -> float:
        """One step of `batch` sequences with `context` tokens each."""
        return self.step_s(0, 0, batch, batch * context)


@dataclass(frozen=True, slots=True)
class Contention:
    """Cores of one socket share its memory. By what share reading prompts and writing tokens take longer while all the
    other workers read, or write."""

    read_read: float = 0.0
    read_write: float = 0.0
    write_read: float = 0.0
    write_write: float = 0.0

    def slowdown(self, num_readers: int, num_writers: int, num_others: int) -> tuple[float, float]:
        """(of reading, of writing) while so many of the others do so."""
        if not num_others:
            return 1.0, 1.0
        return (
            1 + (self.read_read * num_readers + self.read_write * num_writers) / num_others,
            1 + (self.write_read * num_readers + self.write_write * num_writers) / num_others,
        )


@dataclass(frozen=True, slots=True)
class Stages:
    """One worker of each role, the link between them, and where these numbers come from."""

    prefill: StepModel
    decode: StepModel
    colocated: StepModel
    kv_token_bytes: float = 0.0
    link_bytes_s: float = float("inf")
    link_latency_s: float = 0.0
    router_s: float = 0.0
    hop_s: float = 0.0  # a control message between workers; 0: as `Sizes` say
    router_busy_s: float = 0.0  # while all workers compute, where they leave it no core of its own; 0: no longer
    source: str = "given"
    chunk_tokens: int = 2048
    max_batch: int = 64
    contention: Contention = Contention()

    @property
    def has_contention(self) -> bool:
        return self.contention != Contention()

    def transfer_s(self, num_tokens: int) -> float:
        return self.kv_token_bytes * num_tokens / self.link_bytes_s + self.link_latency_s

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        value["link_bytes_s"] = None if self.link_bytes_s == float("inf") else self.link_bytes_s
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        known = {f.name for f in fields(cls)}
        if unknown := set(value) - known:
            raise UsageError(f"a stage model has no {', '.join(sorted(unknown))}", help=f"it has {', '.join(known)}")
        data = dict(value)
        for role in ("prefill", "decode", "colocated"):
            data[role] = StepModel(**data[role])
        data["contention"] = Contention(**data.get("contention", {}))
        data["link_bytes_s"] = data.get("link_bytes_s") or float("inf")
        return cls(**data)

    def with_link(self, bytes_s: float | None, latency_s: float | None) -> Self:
        return replace(
            self,
            link_bytes_s=self.link_bytes_s if bytes_s is None else bytes_s,
            link_latency_s=self.link_latency_s if latency_s is None else latency_s,
        )


def from_rates(
    prefill_tok_s: float, decode_tok_s: float, *, kv_token_bytes: float = 0.0, max_batch: int = 64
) -> Stages:
    """Given outright: so many prompt tokens a second, and so many output tokens a second with a full batch.

    Only a full batch is given, and capacity depends only on that. Half of its step is taken to be the reading of the
    weights, which a smaller batch pays too: about what 8B models show at batch 64.
    """
    if prefill_tok_s <= 0 or decode_tok_s <= 0:
        raise UsageError("--prefill-tok-s and --decode-tok-s must be above 0")
    prefill = StepModel(prompt_token_s=1 / prefill_tok_s)
    both = replace(prefill, floor_s=0.5 * max_batch / decode_tok_s, decode_seq_s=0.5 / decode_tok_s)
    return Stages(prefill, decode=both, colocated=both, kv_token_bytes=kv_token_bytes, max_batch=max_batch)
