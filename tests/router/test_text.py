"""Properties of the text side: a stream is the whole text in pieces, whatever the text and wherever it is cut."""

import random
import threading
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from server.router.errors import ApiError
from server.router.text import Decoder, StopScanner, Text
from server.sequence import Token

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def cut(text: str, stops: Sequence[str], include: bool = False) -> tuple[str, str | None]:
    """Reference: reads one character at a time and stops as soon as the text ends in a stop."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def pieces_of(text: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    out = []
    while text:
        size = rng.randint(1, 4)
        out.append(text[:size])
        text = text[size:]
    return out


@QUICK
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
    seed=st.integers(0, 99),
)
def test_stop_scanner_is_the_reference_cut(text: str, stops: list[str], include: bool, seed: int) -> None:
    scanner = StopScanner(stops, include)
    out, found = "", None
    for piece in pieces_of(text, seed):
        part, found = scanner.feed(piece)
        out += part
        # What has gone out can never be taken back: it is a prefix of the answer.
        assert cut(text, stops, include)[0].startswith(out)
        if found is not None:
            break
    else:
        out += scanner.flush()
    assert (out, found) == cut(text, stops, include)


def run(text: Text, ids: list[int], **options: object) -> tuple[list[str], str | int | None]:
    decoder = Decoder(text, [], **options)  # type: ignore[arg-type]
    chunks = []
    for token_id in ids:
        delta = decoder.feed(Token(token_id))
        chunks.append(delta.text)
        if delta.is_stopped:
            return chunks, delta.stop
    return [*chunks, decoder.finish().text], None


@QUICK
@given(words=st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_unicode_comes_out_whole(text: Text, words: str) -> None:
    ids = text.tokenizer.encode(words).ids
    assume(text.decode(ids, skip_special=False) == words)  # this vocabulary lacks a few bytes, such as 0xF1
    chunks, _ = run(text, ids, skip_special=False)
    assert "".join(chunks) == words
    if "\ufffd" not in words:
        assert not any("\ufffd" in chunk for chunk in chunks)


@QUICK
@given(
    words=st.text(st.sampled_from("ab é世🎉 "), max_size=25),
    stops=st.lists(st.text(st.sampled_from("ab é世🎉 "), min_size=1, max_size=4), max_size=2),
)
def test_stops_across_tokens(text: Text, words: str, stops: list[str]) -> None:
    chunks, found = run(text, text.tokenizer.encode(words).ids, stops=stops)
    assert ("".join(chunks), found) == cut(words, stops)


@pytest.fixture(scope="module")
def by_bytes(text: Text) -> dict[bytes, int]:
    """The vocabulary, special tokens apart, by what each token stands for."""
    return {text.piece(i): i for i in range(text.vocab_size) if not text.is_special(i)}


def split(words: str, by_bytes: dict[bytes, int], seed: int) -> list[int]:
    """Tokens that make up `words`, cut anywhere, within characters too; not the ones that a tokenizer would choose."""
    rng, raw, ids = random.Random(seed), words.encode(), []
    while raw:
        sizes = [size for size in range(1, 9) if raw[:size] in by_bytes]
        assume(sizes)  # this vocabulary lacks a few bytes, such as 0xF1
        size = rng.choice(sizes)
        ids.append(by_bytes[raw[:size]])
        raw = raw[size:]
    return ids


@QUICK
@given(
    words=st.text(st.characters(codec="utf-8") | st.sampled_from("ab é世🎉 "), max_size=40),
    stops=st.lists(st.text(st.sampled_from("ab é世🎉 "), min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_split_into_tokens(
    text: Text, by_bytes: dict[bytes, int], words: str, stops: list[str], include: bool, seed: int
) -> None:
    chunks, found = run(text, split(words, by_bytes, seed), stops=stops, include_stop=include)
    assert ("".join(chunks), found) == cut(words, stops, include)
    if "\ufffd" not in words:
        assert not any("\ufffd" in chunk for chunk in chunks)


@QUICK
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_any_ids_are_survived(text: Text, ids: list[int]) -> None:
    """Ids that are no UTF-8 together: no chunk has a U+FFFD that the whole text does not have."""
    chunks, _ = run(text, ids)
    whole = text.decode(ids)
    joined = "".join(chunks)
    assert joined.count("\ufffd") <= whole.count("\ufffd")
    if "\ufffd" not in whole:
        assert joined == whole


def test_endless_rubbish_is_not_held_for_ever(text: Text) -> None:
    half = text.tokenizer.encode("世").ids[:1]
    chunks, _ = run(text, half * 50)
    assert any(chunks[:20])


def test_a_cut_character_is_left_out(text: Text) -> None:
    ids = text.tokenizer.encode("ok 世").ids
    chunks, _ = run(text, ids[:-1])
    assert "".join(chunks).strip() == "ok"


def test_min_tokens_keeps_stops_quiet(text: Text) -> None:
    ids = text.tokenizer.encode("a b a b a b").ids
    chunks, found = run(text, ids, stops=["b"], min_tokens=4)
    assert "".join(chunks) == "a b a b a "
    assert found == "b"


def test_end_token_has_no_text_but_its_neighbours_do(text: Text) -> None:
    chunks, _ = run(text, [*text.tokenizer.encode("hi").ids, 2], end_ids=frozenset({2}), skip_special=False)
    assert "".join(chunks) == "hi"


def test_token_bytes_concatenate(text: Text) -> None:
    words = "naïve 世界 🎉\n\tx"
    assert b"".join(map(text.piece, text.tokenizer.encode(words).ids)).decode() == words


async def test_far_too_long_is_refused_before_tokenizing(text: Text) -> None:
    with pytest.raises(ApiError) as caught:
        await text.encode("x" * 10**6, "prompt")
    assert caught.value.error_code == "context_length_exceeded"


def test_a_long_text_does_not_hold_the_interpreter(text: Text) -> None:
    """Another thread gets its turns while a text is tokenized: `encode` would keep the lock to the end."""
    turns = 0
    over = threading.Event()

    def count() -> None:
        nonlocal turns
        while not over.is_set():
            turns += 1

    counter = threading.Thread(target=count)
    counter.start()
    before = turns
    text._ids("the quick brown fox " * 50_000, special=False)
    during = turns - before
    over.set()
    counter.join(10)
    assert during > 1000
