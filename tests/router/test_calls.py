"""Tool calls found in text: any cut of the text into pieces gives the same content and the same calls."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.router.calls import CallParser, Style

F = '{"name": "f", "arguments": {"a": [1, {"b": "}\\"]"}], "c": "é"}}'
F_ARGS = '{"a": [1, {"b": "}\\"]"}], "c": "é"}'
LATE = '{"arguments": {"x": 1}, "name": "g"}'


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


# style, text, content, calls
ROWS: list[tuple[Style, str, str, list[tuple[str, str]]]] = [
    ("hermes", "", "", []),
    ("hermes", "Just text, a < b.", "Just text, a < b.", []),
    ("hermes", "trailing <tool", "trailing <tool", []),
    ("hermes", "keeps  \n blanks \n", "keeps  \n blanks \n", []),
    ("hermes", call(F), "", [("f", F_ARGS)]),
    ("hermes", f"Let me see.\n{call(F)}\n", "Let me see.", [("f", F_ARGS)]),
    ("hermes", f"{call(F)}\n{call(LATE)}", "", [("f", F_ARGS), ("g", '{"x": 1}')]),
    ("hermes", call('{"name": "f"}'), "", [("f", "{}")]),
    ("hermes", call('{"name": "other", "arguments": {}}'), call('{"name": "other", "arguments": {}}'), []),
    ("hermes", call("not json"), call("not json"), []),
    ("hermes", '<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "", [("f", '{"a": ')]),
    ("hermes", "<<tool_call>", "<<tool_call>", []),
    ("llama3", "text", "text", []),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama3", ' {"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}', "",
     [("f", "{}"), ("g", '{"b": 2}')]),
    ("llama3", 'see {"name": "f", "parameters": {}}', 'see {"name": "f", "parameters": {}}', []),
    ("llama3", '{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', []),
]  # fmt: skip


def parse(style: Style, pieces: list[str], most: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    parser = CallParser(style, {"f", "g"}, most)
    content, names, arguments = "", {}, {}
    for piece in pieces:
        more, deltas = parser.feed(piece)
        content += more
        for delta in deltas:
            if delta.id:
                assert delta.name and delta.index == len(names)
                names[delta.index] = delta.name
            else:
                assert delta.arguments and not delta.name
            arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
    return content + parser.finish(), [(names[i], arguments[i]) for i in sorted(names)]


@pytest.mark.parametrize(("style", "text", "content", "calls"), ROWS)
def test_rows(style: Style, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text), [text[:7], text[7:]]):
        assert parse(style, pieces) == (content, calls), pieces


@given(st.sampled_from(ROWS), st.lists(st.integers(0, 200), max_size=6))
def test_any_cut(row: tuple[Style, str, str, list[tuple[str, str]]], cuts: list[int]) -> None:
    style, text, content, calls = row
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parse(style, [text[a:b] for a, b in itertools.pairwise(edges)]) == (content, calls)


@given(st.text(alphabet='<tool_cal>/{}":, \nnamef', max_size=60))
def test_nothing_is_lost_without_calls(text: str) -> None:
    """Whatever the text: the same whole and by characters; without a call it comes out unchanged."""
    for style in ("hermes", "llama3"):
        whole = parse(style, [text])
        assert whole == parse(style, list(text))
        if not whole[1]:
            assert whole[0] == text


def test_not_parallel() -> None:
    content, calls = parse("hermes", [f"{call(F)}\n{call(LATE)}"], most=1)
    assert (content, [name for name, _ in calls]) == ("", ["f"])
    assert json.loads(calls[0][1])["c"] == "é"
