"""Logprobs of a prompt's own tokens, gathered while the prompt is read in chunks.

1. `rows` names the positions of a step whose logits tell of a prompt token to come.
2. `add` keeps what they say, by position: a prompt that is read again after a preemption just says it again.
3. `take` gives all of it with token 0. The router sends such prompts under a salt of their own, so that no position is
   left out by a prefix hit.
"""

from collections.abc import Sequence as Rows
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from server.engine.sampler import with_logprobs
from server.sequence import Sequence, Slice, Token


class Row(NamedTuple):
    """`flat` is its place among the step's tokens; its logits are about prompt token `position` + 1 of `seq`."""

    flat: int
    seq: Sequence
    position: int


class PromptLogprobs:
    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Sequence, dict[int, Token]] = WeakKeyDictionary()

    @staticmethod
    def rows(slices: Rows[Slice], starts: Rows[int]) -> list[Row]:
        """`starts` are the slices' first places among the step's tokens."""
        return [
            Row(start + position - piece.start, piece.seq, position)
            for piece, start in zip(slices, starts, strict=False)
            if piece.seq.params.num_prompt_logprobs >= 0 and not piece.seq.output
            for position in range(piece.start, min(piece.start + piece.num_tokens, len(piece.seq.prompt) - 1))
        ]

    def add(self, rows: Rows[Row], logits: torch.Tensor) -> None:
        """`logits`: one row each."""
        following = torch.tensor([row.seq.prompt[row.position + 1] for row in rows], device=logits.device)
        wanted = [row.seq.params.num_prompt_logprobs for row in rows]
        for row, token in zip(rows, with_logprobs(logits.float(), following, wanted), strict=True):
            self._found.setdefault(row.seq, {})[row.position] = token

    def take(self, seq: Sequence) -> tuple[Token, ...]:
        """From the second prompt token on; empty where they were not asked for."""
        found = self._found.pop(seq, {})
        return tuple(found[position] for position in sorted(found))
