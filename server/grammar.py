"""Grammars that bind an output: llguidance over the model's vocabulary, shared by router and workers. No torch here.

1. The router turns a request into a grammar, one JSON string, and has it checked here: 400 now or never.
2. The string travels in `SamplingParams.grammar`. A worker makes a `Matcher` of it when the sequence first samples.
3. Before each of its tokens the matcher is brought up to the sequence's output and gives a bit mask of what may follow.
   So nothing of its state is handed over: decode rebuilds it from token 0, a recompute from the known tokens.

The vocabulary is loaded when the first grammar comes: most stacks never need it, and it takes a moment.
"""

import json
import logging
import threading
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from server.card import read_config
from server.sequence import Sequence

logger = logging.getLogger(__name__)

MAX_GRAMMAR = 256 * 2**10
# Whitespace between JSON tokens: as models write it, but bounded, so that no output is blanks until its limit.
WHITESPACE = r"\n? {0,16}"


def end_ids(model_dir: str | Path) -> list[int]:
    """The ids that end a text, as the model's files name them."""
    folder = Path(model_dir)
    found: set[int] = set()
    for config in (read_config(folder), _read(folder / "generation_config.json")):
        value = config.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    name = _read(folder / "tokenizer_config.json").get("eos_token")
    name = name.get("content") if isinstance(name, dict) else name
    added = _read(folder / "tokenizer.json").get("added_tokens") or ()
    found.update(token["id"] for token in added if token["content"] == name)
    return sorted(found)


def _read(file: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
    return data


def json_grammar(schema: Any, *, lenient: bool = False) -> str:
    """Of a JSON schema. `lenient` passes over keywords that llguidance does not know. Raises ValueError, also for a
    schema that is nested too deeply; most of what may be wrong with one is found by `check` only."""
    try:
        text = json.dumps({} if schema is True else schema)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE, "lenient": lenient})


def lark_grammar(text: str) -> str:
    return LLMatcher.grammar_from_lark(text)


def regex_grammar(text: str) -> str:
    return LLMatcher.grammar_from_regex(text)


class Matcher:
    """One sequence's place in its grammar."""

    def __init__(self, inner: LLMatcher) -> None:
        self._inner = inner
        self._num_seen = 0

    def mask(self, output: list[int]) -> bytes:
        """One bit a token, least significant first: what may follow `output`, which only ever grows."""
        new = output[self._num_seen :]
        self._num_seen = len(output)
        if new and not self._inner.is_error():
            self._inner.consume_tokens(new)
        return self._inner.compute_bitmask()

    @property
    def error(self) -> str:
        """Why it can go no further (a limit of the grammar engine, an output that does not fit), or empty."""
        return self._inner.get_error()


class Grammars:
    """All grammars of a process. `check` may be called from any thread, `mask` from one."""

    def __init__(self, model_dir: str | Path, vocab_size: int) -> None:
        self._folder = Path(model_dir)
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._matchers: WeakKeyDictionary[Sequence, Matcher] = WeakKeyDictionary()
        # A worker's step waits for the first mask, and so does everybody in it: with the default fuel
        # `a{1000}{1000}{1000}` took it 5 s, with this 0.2.
        self._limits = LLParserLimits(verbose_errors=False, initial_lexer_fuel=100_000)

    @property
    def mask_bytes(self) -> int:
        return (self._vocab_size + 31) // 32 * 4

    def check(self, grammar: str) -> str:
        """Empty, or what is wrong with it, in one line."""
        if len(grammar) > MAX_GRAMMAR:
            return f"larger than {MAX_GRAMMAR} bytes"
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._vocabulary(), limits=self._limits)
        if is_error:
            return " ".join(messages[0].split())
        first = self.matcher(grammar)
        first.mask([])  # what is too costly shows here rather than in a worker
        return " ".join(first.error.split())

    def mask(self, seq: Sequence) -> bytes:
        """What may be sampled next for `seq`."""
        matcher = self._matchers.get(seq)
        if matcher is None:
            matcher = self._matchers[seq] = self.matcher(seq.params.grammar)
        mask = matcher.mask(seq.output)
        if error := matcher.error:
            # Only ends of text are left then. The grammar was checked, so this is a limit that an output ran into.
            logger.warning("%s: the grammar cannot go on: %s", seq.id, error.partition("\n")[0])
        return mask

    def matcher(self, grammar: str) -> Matcher:
        return Matcher(LLMatcher(self._vocabulary(), grammar, log_level=0, limits=self._limits))

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                text = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
                ends = end_ids(self._folder)
                self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=ends)
            return self._tokenizer
