"""How many prompt tokens a step may carry beside sequences that decode: what the TPOT objective leaves, measured.

A step's time is taken as that of its decode tokens alone, for so many sequences, and so much a prompt token more. Where
decoding alone comes near the objective, prompts may stretch a step by a part of that: they would starve otherwise.
"""

from server.sequence import Batch

MIN_TOKENS = 32
MAX_TOKENS = 2048
USED = 0.9  # of the objective: steps vary
STRETCH = 0.4
SMOOTHING = 0.2


class LocalPrefill:
    """`tokens` is for the next step. Touched by the engine thread only."""

    def __init__(self, objective_s: float, start: int) -> None:
        self.tokens = start
        self._objective_s = objective_s
        self._alone_s: dict[int, float] = {}  # by power of two of the sequences that decode
        self._token_s = 0.0

    def observe(self, batch: Batch, seconds: float) -> None:
        num_decoding = sum(piece.num_tokens == 1 for piece in batch.slices)
        num_prompt = batch.num_tokens - num_decoding
        if not num_decoding:
            return
        bucket = num_decoding.bit_length()
        if not num_prompt:
            self._alone_s[bucket] = _towards(self._alone_s.get(bucket, 0.0), seconds)
        alone_s = self._alone_s.get(bucket, 0.0)
        if num_prompt and alone_s:
            self._token_s = _towards(self._token_s, max(1e-7, (seconds - alone_s) / num_prompt))
        if alone_s and self._token_s:
            room_s = max(USED * self._objective_s - alone_s, STRETCH * alone_s)
            self.tokens = int(min(MAX_TOKENS, max(MIN_TOKENS, room_s / self._token_s)))


def _towards(mean: float, value: float) -> float:
    return mean + SMOOTHING * (value - mean) if mean else value
