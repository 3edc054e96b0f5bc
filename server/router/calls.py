"""Tool calls out of text, as it comes: the same calls streamed or whole, for the whole text is fed here too.

hermes   `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number, after any text (Qwen, Hermes)
llama3   the text is `{"name": ..., "parameters": {...}}`, several joined by `;`

1. Text that may turn into a call is held back; text that turns out to be none goes out as it is.
2. A call begins to go out with its name; its arguments follow raw, as the model writes them.
3. What looks like a call of an unknown tool is text.
"""

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Style = Literal["hermes", "llama3"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BLANK = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


@dataclass(slots=True)
class CallDelta:
    """What is new of call `index`. `id` and `name` come once, first."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class ObjectReader:
    """One JSON object, character by character: its "name", and its arguments in the model's own spelling."""

    def __init__(self) -> None:
        self.raw = ""
        self.name = ""
        self.arguments = ""
        self.is_done = False
        self.is_broken = False
        self._depth = 0
        self._start = 0  # of the string under way
        self._in_string = False
        self._is_escaped = False
        self._key = ""
        self._is_value = False

    def feed(self, char: str) -> None:
        self.raw += char
        if self._in_string:
            self._in_a_string(char)
        elif char in _BLANK:
            if self._depth > 1:
                self._keep(char)
        elif char == '"':
            self._in_string, self._start = True, len(self.raw) - 1
            self._keep(char)
        elif char in "{[":
            self._open(char)
        elif char in "}]":
            self._close(char)
        elif char in ":," and self._depth == 1:
            self._is_value = char == ":"
        else:
            self._keep(char)

    def _in_a_string(self, char: str) -> None:
        self._keep(char)
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 1:
                self._string_ended()

    def _string_ended(self) -> None:
        try:
            text = str(json.loads(self.raw[self._start :], strict=False))
        except ValueError:
            self.is_broken = True
            return
        if not self._is_value:
            self._key = text
        elif self._key == "name":
            self.name = text

    def _open(self, char: str) -> None:
        self.is_broken |= self._depth == 0 and char != "{"
        self._depth += 1
        if self._depth > 1:
            self._keep(char)

    def _close(self, char: str) -> None:
        if self._depth > 1:
            self._keep(char)
        self._depth -= 1
        self.is_done = self._depth <= 0

    def _keep(self, char: str) -> None:
        self.is_broken |= self._depth == 0
        if self._is_value and self._key in _ARGUMENTS:
            self.arguments += char


class CallParser:
    """Feed it a choice's text; it gives content and calls. `names` are the tools there are."""

    def __init__(self, style: Style, names: Collection[str], most: int | None = None) -> None:
        self._style = style
        self._names = names
        self._most = most  # calls to take; the rest is passed over
        self._held = ""  # blanks, and what may be the beginning of a call
        self._reader: ObjectReader | None = None
        self._opening = ""  # what came before the object under way and belongs to it
        self._sent = 0  # of the reader's arguments
        self._is_named = False  # the call under way has begun to go out
        self._is_closing = False  # between the end of an object and CLOSE
        self._has_text = False
        self.num_calls = 0

    def feed(self, text: str) -> tuple[str, list[CallDelta]]:
        content, calls = "", list[CallDelta]()
        for char in text:
            if self._reader is not None:
                content += self._read(char, calls)
            elif self._is_closing:
                self._skip(char)
            else:
                content += self._look(char)
        if self._reader is not None and self._is_named:
            self._arguments(self._reader, calls)
        self._has_text |= bool(content)
        return content, _merged(calls)

    def finish(self) -> str:
        """The text has ended: what was held and is no call, as content."""
        reader, held = self._reader, self._held
        self._reader, self._held = None, ""
        if self._is_closing or (reader is not None and self._is_named):
            return ""
        if reader is not None:
            return self._opening + reader.raw
        return "" if self.num_calls and not held.strip() else held

    def _begin(self) -> None:
        """What is held ends with the sign of a call; it comes back if it was none."""
        self._opening = self._held
        self._held, self._reader = "", ObjectReader()

    def _look(self, char: str) -> str:
        """Outside of calls."""
        if self._style == "llama3":
            return self._look_for_brace(char)
        self._held += char
        tail = self._held.lstrip(_BLANK)
        if tail == OPEN:
            self._begin()
            return ""
        if OPEN.startswith(tail):
            return ""
        # The last character may begin what the ones before it did not.
        keep = len(self._held) - 1 if char in _BLANK or char == OPEN[0] else len(self._held)
        out, self._held = self._held[:keep], self._held[keep:]
        return out

    def _look_for_brace(self, char: str) -> str:
        self._held += char
        if char in _BLANK or (self.num_calls and char in ";,"):
            return ""
        if char == "{" and not self._has_text:
            self._held = self._held[:-1]
            self._begin()
            return self._read(char, [])
        out, self._held = self._held, ""
        self._has_text = True
        return out

    def _skip(self, char: str) -> None:
        self._held += char
        if self._held.endswith(CLOSE):
            self._held, self._is_closing = "", False

    def _read(self, char: str, calls: list[CallDelta]) -> str:
        reader = self._reader
        assert reader is not None
        reader.feed(char)
        if not self._is_named and reader.name in self._names and (reader.arguments or reader.is_done):
            self._is_named, self._sent = True, 0
            if self._takes:
                calls.append(CallDelta(self.num_calls, f"call_{secrets.token_hex(12)}", reader.name))
        is_none = reader.name and reader.name not in self._names
        if not self._is_named and (is_none or reader.is_broken or reader.is_done):
            self._reader = None
            self._has_text = True
            return self._opening + reader.raw
        if reader.is_done:
            reader.arguments = reader.arguments or "{}"
            self._arguments(reader, calls)
            self.num_calls += 1 if self._takes else 0
            self._reader, self._is_named = None, False
            self._is_closing = self._style == "hermes"
        return ""

    @property
    def _takes(self) -> bool:
        return self._most is None or self.num_calls < self._most

    def _arguments(self, reader: ObjectReader, calls: list[CallDelta]) -> None:
        new, self._sent = reader.arguments[self._sent :], len(reader.arguments)
        if new and self._takes:
            calls.append(CallDelta(self.num_calls, arguments=new))


def _merged(calls: list[CallDelta]) -> list[CallDelta]:
    """One delta a call: a client gets the name and the arguments that came with it together."""
    out: list[CallDelta] = []
    for call in calls:
        if out and out[-1].index == call.index and not call.id:
            out[-1].arguments += call.arguments
        else:
            out.append(call)
    return out
