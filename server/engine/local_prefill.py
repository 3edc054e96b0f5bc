"""How many prompt tokens a step may carry beside sequences that decode: what the TPOT objective leaves, measured.

A step's time is taken as that of its decode tokens alone, for so many sequences, and so much a prompt token more: the
least squares over the last steps, in which large ones count for more. A few tokens hide behind the reading of the
weights and seem to be free; so the limit grows a step at a time. Where decoding alone comes near the objective, prompts
may stretch a step by a part of that: they would starve otherwise.
"""

from server.sequence import Batch

MIN_TOKENS = 32
MAX_TOKENS = 2048
USED = 0.9  # of the objective: steps vary
STRETCH = 0.4
SMOOTHING = 0.2
GROWTH = 1.5  # over the most prompt tokens of a step so far


class LocalPrefill:
    """`tokens` is for the next step. Touched by the engine thread only."""

    def __init__(self, objective_s: float, start: int) -> None:
        self.tokens = start
        self._objective_s = objective_s
        self._alone_s: dict[int, float] = {}  # by power of two of the sequences that decode
        self._most = start
        self._products = self._squares = 0.0  # sums over steps with prompts, older ones fading

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
            longer_s = max(0.0, seconds - alone_s)
            self._products += num_prompt * longer_s - SMOOTHING * self._products
            self._squares += num_prompt**2 - SMOOTHING * self._squares
            self._most = max(self._most, num_prompt)
        if alone_s and self._squares:
            token_s = max(1e-7, self._products / self._squares)
            room_s = max(USED * self._objective_s - alone_s, STRETCH * alone_s)
            self.tokens = int(max(MIN_TOKENS, min(MAX_TOKENS, GROWTH * self._most, room_s / token_s)))


def _towards(mean: float, value: float) -> float:
    return mean + SMOOTHING * (value - mean) if mean else value
