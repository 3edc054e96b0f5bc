"""How many prompt tokens a step may carry beside sequences that decode: what the TPOT objective leaves, measured.

A step's time is taken as that of its decode tokens alone, for so many sequences, and so much a prompt token more: the
least squares over the last steps. A few tokens hide behind the reading of the weights and seem to be free; so small
steps may say that it is more, never that it is less, and the limit grows a step at a time. Where decoding alone comes
near the objective, prompts may stretch a step by a part of that: they would starve otherwise. Where prompts never end,
a step without them is made to see what decoding takes alone.
"""

from server.sequence import Batch

MIN_TOKENS = 32
MAX_TOKENS = 2048
USED = 0.9  # of the objective: steps vary
STRETCH = 0.4
SMOOTHING = 0.2
GROWTH = 1.5  # over the most tokens of a step so far; engine/limits.py has no sizes further apart, from 128 on
OUTLIER = 3.0  # times the longest that was to be expected: a step that took longer counts as this
PROBE_STEPS = 8  # with prompts, before one without


class LocalPrefill:
    """`tokens` is for the next step; 0, once, where it is to go without. `is_tight`: decoding alone takes
    longer than the objective, however few decode. Touched by the engine thread only; others may read `is_tight`."""

    def __init__(self, objective_s: float, start: int) -> None:
        self.tokens = start
        self.is_tight = False
        self._objective_s = objective_s
        self._alone_s: dict[int, float] = {}  # by power of two of the sequences that decode
        self._most = start
        self._products = self._squares = 0.0  # sums over steps with prompts, older ones fading
        self._num_unknown = 0  # steps with prompts whose bucket has not been alone yet

    def observe(self, batch: Batch, seconds: float) -> None:
        num_decoding = sum(piece.num_tokens == 1 for piece in batch.slices)
        num_prompt = batch.num_tokens - num_decoding
        if not num_decoding:
            return
        bucket = num_decoding.bit_length()
        if not num_prompt:
            self._alone_s[bucket] = _towards(self._alone_s.get(bucket, 0.0), seconds)
        elif bucket not in self._alone_s:
            self._num_unknown += 1
            if self._num_unknown >= PROBE_STEPS:
                self._num_unknown, self.tokens = 0, 0
                return
        if not self._alone_s:
            return
        alone_s = self._alone_s[min(self._alone_s, key=lambda known: abs(known - bucket))]
        if num_prompt:
            self._learn(num_prompt, max(0.0, seconds - alone_s), alone_s)
            self._most = max(self._most, batch.num_tokens)
        within_s, fewest_s = USED * self._objective_s, min(self._alone_s.values())
        self.is_tight = fewest_s > (within_s if self.is_tight else self._objective_s)
        room_s = max(within_s - alone_s, STRETCH * alone_s)
        fitting = room_s / max(1e-7, self._token_s) if self._squares else self._most
        self.tokens = int(max(MIN_TOKENS, min(MAX_TOKENS, GROWTH * self._most, fitting)))

    @property
    def _token_s(self) -> float:
        return self._products / self._squares if self._squares else 0.0

    def _learn(self, num_prompt: int, longer_s: float, alone_s: float) -> None:
        square, expected_s = float(num_prompt**2), self._token_s * num_prompt
        if self._squares and 2 * num_prompt < self.tokens and longer_s < expected_s:
            return
        if self._squares:
            longer_s = min(longer_s, OUTLIER * max(expected_s, self._objective_s, alone_s))
        fading = min(SMOOTHING, square / self._squares) if self._squares else 0.0
        self._products += num_prompt * longer_s - fading * self._products
        self._squares += square - fading * self._squares


def _towards(mean: float, value: float) -> float:
    return mean + SMOOTHING * (value - mean) if mean else value
