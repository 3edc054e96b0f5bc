"""From which length a prompt is worth a trip to another worker, measured on the requests that are served anyway.

A request's figure is the time from its dispatch to its second token: the first one hides the hand-over. Figures are
kept apart by path and by power of two of the uncached length. The threshold stands between two such buckets and moves
by one at a time, when the bucket beside it has been clearly better on the other path for a while; for that, one request
in `EXPLORE` of each bucket beside the threshold takes the path it would not.
"""

from typing import Any

START_TOKENS = 256
MIN_TOKENS = 16
EXPLORE = 16
ENOUGH = 4  # figures of either path before they count
PATIENCE = 8  # figures after a move before the next one
MARGIN = 0.9  # better by a tenth
SMOOTHING = 0.2


class Mean:
    """Of the recent past."""

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(SMOOTHING, 1 / self.count) * (value - self.value)


class Crossover:
    def __init__(self, max_len: int) -> None:
        self.tokens = START_TOKENS
        self._max_len = max_len
        self._means: dict[tuple[int, bool], Mean] = {}
        self._turns: dict[int, int] = {}
        self._since_move = 0

    def is_local(self, num_uncached: int) -> bool:
        """Whether a prompt of so many uncached tokens stays on one worker."""
        is_under, bucket = num_uncached < self.tokens, _bucket(num_uncached)
        if bucket not in (_bucket(self.tokens), _bucket(self.tokens) - 1):
            return is_under
        turn = self._turns[bucket] = self._turns.get(bucket, 0) + 1
        return is_under if turn % EXPLORE else not is_under

    def observe(self, *, is_local: bool, num_uncached: int, seconds: float) -> bool:
        """True when the threshold has moved."""
        self._means.setdefault((_bucket(num_uncached), is_local), Mean()).add(seconds)
        self._since_move += 1
        if self._since_move < PATIENCE:
            return False
        before, here = self.tokens, _bucket(self.tokens)
        if self._is_better(here, local=True):
            self.tokens = min(self._max_len, self.tokens * 2)
        elif self._is_better(here - 1, local=False):
            self.tokens = max(MIN_TOKENS, self.tokens // 2)
        if self.tokens == before:
            return False
        self._since_move = 0
        return True

    def _is_better(self, bucket: int, *, local: bool) -> bool:
        one, other = self._means.get((bucket, local)), self._means.get((bucket, not local))
        if one is None or other is None or min(one.count, other.count) < ENOUGH:
            return False
        return one.value < MARGIN * other.value

    def table(self) -> list[dict[str, Any]]:
        """For /admin/state: what was measured, by bucket."""
        return [
            {
                "from_tokens": 1 << (bucket - 1),
                "local_ms": _shown(self._means.get((bucket, True))),
                "pd_ms": _shown(self._means.get((bucket, False))),
            }
            for bucket in sorted({bucket for bucket, _ in self._means})
        ]


def _bucket(num_tokens: int) -> int:
    """Bucket b holds 2**(b-1) up to 2**b - 1."""
    return max(1, num_tokens).bit_length()


def _shown(mean: Mean | None) -> float | None:
    return None if mean is None else round(mean.value * 1000, 3)
