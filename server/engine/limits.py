"""The numbers a scheduler works under. Mutable: knobs are set here and read at the next step."""

from dataclasses import dataclass, fields

# Token counts for which a CUDA device has graphs. Not 448: cuBLAS takes longer for it than for 512 (H200: 18.6 against
# 15.8 ms beside 22 sequences that decode).
PIECE_TOKENS = (16, 32, 64, 128, 192, 256, 320, 384, 512, 768, 1024)


@dataclass(slots=True)
class Limits:
    token_budget: int = 2048  # tokens of one step
    chunk_tokens: int = 1024  # prompt tokens of one step, of one sequence or of several short ones packed
    max_seqs: int = 16  # prompts computed at once
    max_running: int = 64  # sequences in RUNNING; lowered, it drains
    max_len: int = 1 << 30  # prompt + output of one sequence
    local_prefill_tokens: int | None = None  # of a pool's worker: prompt tokens of a step in which anything decodes
    step_sizes: tuple[int, ...] = ()  # steps of prompts beside sequences that decode are padded to these
    age_limit_s: float = 5.0  # older than this is never overtaken
    ahead: int = 4  # grants asked for or held, and not yet admitted
    ahead_share: float = 0.5  # of places and blocks, for prefill halves that run ahead of their grants
    reserves_growth: bool = False  # a local prompt waits until what runs, and what was granted, can grow beside it
    kv_low: float = 0.80
    kv_high: float = 0.92
    queue_low: int = 2
    queue_high: int = 32
    idle_swap_s: float = 0.0  # a sequence whose client does not read gives its blocks away after so long; 0: it runs on

    def become(self, other: "Limits") -> None:
        """Takes over every number: those who hold this object read them at their next step."""
        for field in fields(self):
            setattr(self, field.name, getattr(other, field.name))
