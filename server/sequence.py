"""A sequence: one prompt and the tokens that follow it, with where its KV lies.

Pure data; the Scheduler is the only one who moves `state`, `num_computed` and `block_table`. States by role:

    prefill     WAITING -> RUNNING -> PUSHING -> FINISHED
    decode      EXPECTED -> RECEIVING -> RUNNING -> FINISHED
    colocated   WAITING -> RUNNING -> FINISHED

A prefill half that waits in vain for decode's grant may run as on a colocated worker until the grant comes, and is
PUSHING from then on, with all the outputs it has (adr/0011).

On either of the last two RUNNING -> SWAPPED -> RUNNING when a sequence gives its blocks to others: those of them that
are still cached when it returns, on the device or in host memory, are not computed again.
"""

from dataclasses import dataclass, field
from enum import Enum

import msgspec


class SeqId(msgspec.Struct, frozen=True, array_like=True):
    """Identity on every wire: the router's instance, its number for the sequence, and which try this is."""

    router: str
    seq: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.router[:6]}/{self.seq}.{self.attempt}"


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the client asked for, in token terms only. `seed` is always set by the router, so that a replay and the
    hand-over from prefill to decode draw the same numbers: output index i uses the i-th draw of the seed."""

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # end-of-text ids are added by the router unless ignore_eos
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    num_logprobs: int = -1  # -1 = none; 0 = the sampled token's only; n = with the n most likely
    num_prompt_logprobs: int = -1  # the same, of the prompt's own tokens
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not appear
    grammar: str = ""  # what the output must match, as `server.grammar` has it

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_free(self) -> bool:
        """Whether a token can be drawn without knowing those before it, and without waiting for the device: not where
        they restrain it, nor where logprobs are told or top_p looks for its edge."""
        if self.is_restrained or self.num_logprobs >= 0 or self.num_prompt_logprobs >= 0:
            return False
        return self.is_greedy or self.top_p >= 1.0

    @property
    def is_restrained(self) -> bool:
        """Whether the logits are changed before a token is taken."""
        return bool(
            self.grammar
            or self.bad_words
            or self.allowed_token_ids
            or self.min_tokens
            or self.logit_bias
            or self.repetition_penalty != 1.0
            or self.frequency_penalty
            or self.presence_penalty
        )


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token. `top` holds (token id, logprob), most likely first. Of token 0, `prompt` holds the prompt's
    own tokens from the second on, if their logprobs were asked for."""

    id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    prompt: "tuple[Token, ...]" = ()


class Stuck(msgspec.Struct, frozen=True):
    """In place of a token: there is none that the request's own terms allow, and why. It ends the sequence."""

    why: str


class SeqState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PUSHING = "pushing"
    EXPECTED = "expected"
    RECEIVING = "receiving"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """`num_computed` of the first `num_tokens` known tokens have their KV in the blocks of `block_table`; steps
    under way write that of `num_under_way` more, and bring `num_coming` tokens that are not known yet."""

    id: SeqId
    prompt: list[int]
    params: SamplingParams
    arrival: float = 0.0  # on the scheduler's clock, for ordering
    salt: str = ""  # scope of prefix hits: equal salts share cached blocks
    needs_grant: bool = False  # prefill half of a pd sequence: ends with the next token, the first unless it ran ahead
    state: SeqState = SeqState.WAITING
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_under_way: int = 0
    num_coming: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache when first admitted
    block_table: list[int] = field(default_factory=list)
    generation: int = 0  # of the grant it holds or gave; 0 = none
    num_resident_blocks: int = 0  # leading blocks the decode side already has
    finish_reason: str = ""  # "stop" | "length" once ended by the model
    is_free: bool = field(init=False)  # of `params`, which stays what it is

    def __post_init__(self) -> None:
        self.is_free = self.params.is_free

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def num_scheduled(self) -> int:
        return self.num_computed + self.num_under_way

    @property
    def num_pending(self) -> int:
        """Tokens that no step was given yet, known or coming; 1 for a sequence that decodes. What comes for a prefill
        half is read elsewhere."""
        num_pending = len(self.prompt) + len(self.output) - self.num_computed - self.num_under_way
        if not self.needs_grant:
            num_pending += self.num_coming
        return max(0, num_pending)

    @property
    def num_to_hand_over(self) -> int:
        """Known tokens whose KV a decode worker gets: all but the last output, which it reads itself."""
        return len(self.prompt) + max(0, len(self.output) - 1)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known token ids [start, stop)."""
        split = len(self.prompt)
        if stop <= split:
            return self.prompt[start:stop]
        return self.prompt[start:] + self.output[max(0, start - split) : stop - split]


@dataclass(slots=True)
class Slice:
    """The tokens [start, start + num_tokens) of one sequence, computed in one step."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool = field(init=False)  # it reaches the last token, known or coming: its logits give the next one

    def __post_init__(self) -> None:
        seq = self.seq
        self.samples = self.start + self.num_tokens >= len(seq.prompt) + len(seq.output)

    @property
    def output_index(self) -> int:
        """Which output those logits give."""
        return self.start + self.num_tokens - len(self.seq.prompt)


@dataclass(slots=True)
class Batch:
    """What one step computes, decode slices first."""

    slices: list[Slice]

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.slices)
