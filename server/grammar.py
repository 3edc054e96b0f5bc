"""Grammars that bind an output: llguidance over the model's vocabulary, shared by router and workers. No torch here.

1. The router turns a request into a grammar, one JSON string, and has it checked here: 400 now or never.
2. The string travels in `SamplingParams.grammar`. A worker makes a `Matcher` of it when the sequence first samples.
3. Before each of its tokens the matcher is brought up to the sequence's output and gives a bit mask of what may follow.
   So nothing of its state is handed over: decode rebuilds it from token 0, a recompute from the known tokens.
4. A grammar may run into a limit on the way. `failure` says so, and the sequence ends with that error: an output that
   was cut there does not match.

Building can take most of a second, so it is done once a grammar, by `check` and `prepare`, on threads that nobody's
stream waits for; each sequence gets a copy. The vocabulary is loaded when the first grammar comes: most stacks never
need it, and it takes a moment.
"""

import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from server.card import read_config
from server.sequence import Sequence

MAX_GRAMMAR = 256 * 2**10
MAX_BUILT = 64  # the largest take some 20 MiB
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
        for token_id in output[self._num_seen :]:
            if self._inner.is_stopped():  # ends of text after the end, where min_tokens asks for them, are no error
                break
            self._inner.consume_token(token_id)
        self._num_seen = len(output)
        return self._inner.compute_bitmask()

    @property
    def error(self) -> str:
        """Why it can go no further (a limit of the grammar engine, an output that does not fit), or empty. One line."""
        return " ".join(self._inner.get_error().replace("<non-verbose/>", "").split())

    def copy(self) -> "Matcher":
        """Of one that has seen nothing yet. From any thread."""
        return Matcher(self._inner.deep_copy())


class Grammars:
    """All grammars of a process. `mask` and `failure` may be called from one thread, the others from any."""

    def __init__(self, model_dir: str | Path, vocab_size: int) -> None:
        self._folder = Path(model_dir)
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._built: OrderedDict[str, Matcher] = OrderedDict()  # the last ones used; never moved, only copied
        self._matchers: WeakKeyDictionary[Sequence, Matcher] = WeakKeyDictionary()
        # With the default fuel `a{1000}{1000}{1000}` took 5 s, with this 0.2.
        self._limits = LLParserLimits(verbose_errors=False, initial_lexer_fuel=100_000)

    def check(self, grammar: str) -> str:
        """Empty, or what is wrong with it, in one line."""
        if len(grammar) > MAX_GRAMMAR:
            return f"larger than {MAX_GRAMMAR} bytes"
        return self.prepare(grammar).error

    def prepare(self, grammar: str) -> Matcher:
        """Builds it, unless it is built."""
        with self._lock:
            if (built := self._built.get(grammar)) is not None:
                self._built.move_to_end(grammar)
                return built
        built = Matcher(LLMatcher(self._vocabulary(), grammar, log_level=0, limits=self._limits))
        built.mask([])  # the costly part of some, and what shows that some are too costly
        with self._lock:
            self._built[grammar] = built
            if len(self._built) > MAX_BUILT:
                self._built.popitem(last=False)
        return built

    def is_built(self, grammar: str) -> bool:
        return grammar in self._built

    def mask(self, seq: Sequence) -> bytes:
        """What may be sampled next for `seq`."""
        matcher = self._matchers.get(seq)
        if matcher is None:
            matcher = self._matchers[seq] = self.matcher(seq.params.grammar)
        return matcher.mask(seq.output)

    def failure(self, seq: Sequence) -> str:
        """Why its last mask is worth nothing, or empty."""
        matcher = self._matchers.get(seq)
        return matcher.error if matcher is not None else ""

    def matcher(self, grammar: str) -> Matcher:
        return self.prepare(grammar).copy()

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                text = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
                ends = end_ids(self._folder)
                self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=ends)
            return self._tokenizer
