"""Text lives here only: workers see token ids.

1. In: chat template and tokenizer, in threads, so that a long prompt does not stop the streams of others; a short one
   would not.
2. Out, for each sequence: `Detokenizer` turns ids into text, whole characters only; `StopScanner` looks for stop
   strings and holds back what may be the beginning of one; `Decoder` joins both and lines the tokens' logprobs up.

Everything after tokenizing works token by token, so that a streamed text and a whole one are the same by construction.
"""

import asyncio
import json
import re
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from server.card import read_config
from server.errors import ModelError
from server.grammar import Grammars, end_ids
from server.router.errors import bad_request, context_too_long
from server.sequence import Token

# A UTF-8 character has at most 4 bytes and a token at least one: more held tokens than this are no character to come.
MAX_HELD = 8
SHORT = 256  # characters: tokenized in a tenth of a millisecond, sooner than a thread can be asked to
CONTEXT_IDS = 4  # enough for a decoder to see that a word goes on
R = TypeVar("R")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Text:
    """The model's tokenizer and what its files say about text."""

    def __init__(self, model_dir: str | Path, max_len: int = 0) -> None:
        """Raises ModelError."""
        try:
            config = read_config(model_dir)
            self._hf = PreTrainedTokenizerFast.from_pretrained(str(model_dir))
        except Exception as error:  # transformers and tokenizers raise what they like; this is their one door
            raise ModelError(f"no usable tokenizer in {model_dir}: {error}") from error
        self.tokenizer: Tokenizer = self._hf.backend_tokenizer
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.vocab_size = int(config["vocab_size"])
        self.max_len = max_len or int(config.get("max_position_embeddings", 2048))
        self.eos_ids = frozenset(end_ids(model_dir))  # llama 3 has several
        self._added = self.tokenizer.get_added_tokens_decoder()
        self._is_byte_level = "ByteLevel" in str(json.loads(self.tokenizer.to_str())["decoder"])
        self._longest = max((len(piece) for piece in self.tokenizer.get_vocab()), default=1)
        self._grammars = Grammars(model_dir, self.vocab_size)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")  # a costly one holds up no text
        self._pieces: dict[int, bytes] = {}

    @property
    def template(self) -> str:
        """The chat template; empty without one."""
        found = self._hf.chat_template
        return found if isinstance(found, str) else "".join((found or {}).values())

    @property
    def knows_tools(self) -> bool:
        return "tools" in self.template

    # in

    async def encode(self, text: str, param: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`. Raises ApiError 400."""
        if len(text) <= SHORT:
            return self._encode(text, param, special)
        return await self._in_thread(self._encode, text, param, special)

    async def _in_thread(self, work: Callable[..., R], *args: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def _encode(self, text: str, param: str, special: bool) -> list[int]:
        """What is too long for the model even if all its tokens were the longest is refused before it costs anything,
        also where it is to be cut or only counted."""
        at_least = len(text) // self._longest
        if at_least > self.max_len:
            raise context_too_long(self.max_len, at_least, param, at_least=True)
        return self._ids(text, special)

    def _ids(self, text: str, special: bool) -> list[int]:
        # `encode` holds the interpreter lock to its end, and with it every stream; a batch of one does not.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    async def encode_chat(
        self, messages: list[dict[str, Any]], *, generation: bool, resume: bool, special: bool, extra: dict[str, Any]
    ) -> list[int]:
        """Token ids of the chat template's text; it brings its own BOS, `special` is for more. Raises ApiError 400."""

        def work() -> list[int]:
            return self._encode(self._render(messages, generation, resume, extra), "messages", special)

        return await self._in_thread(work)

    def _render(self, messages: list[dict[str, Any]], generation: bool, resume: bool, extra: dict[str, Any]) -> str:
        if not self._hf.chat_template:
            raise bad_request("messages", "this model has no chat template; use /v1/completions")
        try:
            text: str = self._hf.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation, continue_final_message=resume, **extra
            )
        # A template is a program with an author of its own: whatever it raises, the messages did not suit it.
        except Exception as error:
            raise bad_request("messages", f"the chat template refused these messages: {error}") from error
        return text

    async def spellings(self, words: Seq[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of words, at the start of a text and after a blank."""
        return await self._in_thread(self.spellings_now, words) if words else ()

    def spellings_now(self, words: Seq[str]) -> tuple[tuple[int, ...], ...]:
        found = {tuple(self._ids(spelled, special=False)) for word in words for spelled in (word, " " + word.lstrip())}
        return tuple(sorted(found - {()}))

    async def check_grammar(self, grammar: str) -> str:
        """Empty, or what is wrong with it."""
        return await asyncio.get_running_loop().run_in_executor(self._grammar_thread, self.check_grammar_now, grammar)

    def check_grammar_now(self, grammar: str) -> str:
        return self._grammars.check(grammar)

    # out

    def decode(self, ids: Seq[int], skip_special: bool = True) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    async def decode_all(self, texts: Seq[Seq[int]]) -> list[str]:
        """Whole texts, special tokens too."""
        return await self._in_thread(lambda: [self.decode(ids, skip_special=False) for ids in texts])

    async def offsets(self, texts: Seq[Seq[int]], wholes: Seq[str]) -> list[list[int]]:
        """Of each of `wholes`: where the text of each of its tokens begins."""
        return await self._in_thread(lambda: [offsets(self, *pair) for pair in zip(texts, wholes, strict=True)])

    def piece(self, token_id: int) -> bytes:
        """The bytes that a token stands for; concatenated, they are the text's."""
        known = self._pieces.get(token_id)
        if known is None:
            known = self._pieces[token_id] = self._piece(token_id)
        return known

    def _piece(self, token_id: int) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id].content).encode()
        name: str | None = self.tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if self._is_byte_level:
            return bytes(_BYTE_OF[char] for char in name if char in _BYTE_OF)
        byte = _BYTE.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else name.replace("▁", " ").encode()

    def names(self, ids: Seq[int]) -> list[str]:
        """The vocabulary's own spelling of tokens."""
        return [self.tokenizer.id_to_token(token_id) or "" for token_id in ids]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._added and bool(self._added[token_id].special)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's way to write each byte as a printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


class Detokenizer:
    """Ids in, text out; bytes of an unfinished character wait. `prompt` is context: a word may go on from it."""

    def __init__(self, text: Text, prompt: Seq[int] = (), skip_special: bool = True) -> None:
        self._text = text
        self._skip = skip_special
        context = list(prompt[-CONTEXT_IDS:])
        if "\ufffd" in text.decode(context, skip_special):
            context = []  # the prompt ends within a character: it cannot be gone on from
        self._stream = DecodeStream(context, skip_special)
        self._held: list[int] = []

    def feed(self, token_id: int) -> str:
        self._held.append(token_id)
        try:
            text: str | None = self._stream.step(self._text.tokenizer, token_id)
        except Exception:  # tokenizers raises bare Exception where bytes before and after do not fit together
            return self._restart()
        if text is None:
            return self._restart() if len(self._held) > MAX_HELD else ""
        self._held.clear()
        return text

    def _restart(self) -> str:
        """What is held will never be a character: out with it as it is."""
        text = self._text.decode(self._held, self._skip)
        self._stream = DecodeStream(None, self._skip)
        self._held.clear()
        return text


def offsets(text: Text, ids: Seq[int], whole: str) -> list[int]:
    """Where in `whole` the text of each token begins. A special token that `whole` does not have takes no room."""
    detok = Detokenizer(text, skip_special=False)
    found, at = [], 0
    for token_id in ids:
        found.append(min(at, len(whole)))
        out = detok.feed(token_id)
        if not (text.is_special(token_id) and not whole.startswith(out, at)):
            at += len(out)
    return found


class StopScanner:
    """Finds stop strings in a text that comes in pieces. The match that is complete first wins, the longest of several
    that end together; that does not depend on how the text is cut into pieces."""

    def __init__(self, stops: Seq[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._firsts = frozenset(stop[0] for stop in stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that may go out, the stop found). Nothing after a found stop comes out."""
        if not self._stops:
            return text, None
        text = self._held + text
        match = min(
            ((at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0),
            default=None,
        )
        if match is not None:
            end, start, stop = match
            self._held = ""
            return text[: end if self._include else start], stop
        keep = self._beginning(text)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """The text has ended: what was held back was no stop."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Where the earliest suffix that may become a stop begins."""
        for at in range(len(text)):
            if text[at] in self._firsts and any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)


@dataclass(slots=True)
class Piece:
    """One token's logprobs with the place of its text: `offset` characters into the output."""

    token: Token
    offset: int


class Delta(msgspec.Struct):
    """What one or more tokens added to a choice. `stop` is the stop string found, or the stop token's id."""

    text: str = ""
    pieces: list[Piece] = []
    ids: list[int] = []
    is_stopped: bool = False
    stop: str | int | None = None


class Decoder:
    """One sequence's output, token by token, as deltas. After `is_stopped` nothing more may be fed."""

    def __init__(
        self,
        text: Text,
        prompt: Seq[int],
        *,
        stops: Seq[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
        end_ids: frozenset[int] = frozenset(),
        want_pieces: bool = False,
    ) -> None:
        self._detok = Detokenizer(text, prompt, skip_special)
        self._scanner = StopScanner(stops, include_stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._end_ids = end_ids
        self._want_pieces = want_pieces
        self._pieces: list[Piece] = []
        self._num_tokens = 0
        self._decoded = 0  # characters out of the detokenizer
        self._sent = 0  # characters past the scanner

    def feed(self, token: Token) -> Delta:
        self._num_tokens += 1
        # A worker does not sample an end before min_tokens, so one that comes is meant; its text stays out.
        if token.id in self._end_ids and self._num_tokens > self._min_tokens and not self._include_stop:
            return Delta(ids=[token.id])
        if self._want_pieces:
            self._pieces.append(Piece(token, self._decoded))
        text = self._detok.feed(token.id)
        self._decoded += len(text)
        if self._num_tokens <= self._min_tokens:
            out, stop = self._scanner.flush() + text, None
        else:
            out, stop = self._scanner.feed(text)
        self._sent += len(out)
        return Delta(out, self._release(self._sent), [token.id], stop is not None, stop)

    def finish(self) -> Delta:
        """The worker has ended the sequence; bytes of a character that never became whole are dropped."""
        text = self._scanner.flush()
        self._sent += len(text)
        pieces, self._pieces = self._pieces, []
        return Delta(text, pieces)

    def _release(self, sent: int) -> list[Piece]:
        """Pieces whose text has begun to go out; the others wait with their text, or are cut with it."""
        if not self._pieces:
            return []
        count = sum(1 for piece in self._pieces if piece.offset < sent)
        released, self._pieces = self._pieces[:count], self._pieces[count:]
        return released
