"""Tools of a chat request: what was offered, what the choice demands, and how it is put to the model.

1. `read` checks tools and tool_choice: 400 now or never.
2. `ToolUse.grammar` forces calls with arguments that fit their schema, for required and named.
3. Templates that know tools get them as they are; for others `describe` says it in a system message, and `flatten`
   writes the calls of earlier turns as text.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal

from server.grammar import WHITESPACE, lark_grammar
from server.router.calls import CLOSE, OPEN, CallParser, Style
from server.router.errors import bad_request
from server.router.openai import ChatRequest
from server.router.structured import quote

MAX_TOOLS = 128
Mode = Literal["auto", "required", "named"]
_KEY = {"hermes": "arguments", "llama3": "parameters"}
_HOW = (
    "You may call functions to help with the user's request. The functions are, one JSON object a line:\n<tools>\n"
    "TOOLS\n</tools>\n\nTo call one, answer with a JSON object with its name and arguments within these tags:\n"
    f'{OPEN}\n{{"name": <function name>, "arguments": <arguments object>}}\n{CLOSE}'
)


@dataclass(frozen=True)
class ToolUse:
    tools: list[dict[str, Any]]
    mode: Mode
    only: str = ""  # the named one
    most: int | None = None  # calls, where they are not to be parallel

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]

    def parser(self, style: Style) -> CallParser:
        return CallParser(style, frozenset(self.names), self.most)

    def grammar(self, style: Style) -> str:
        """Empty where nothing is forced."""
        if self.mode == "auto":
            return ""
        functions = [t["function"] for t in self.tools if self.only in ("", t["function"]["name"])]
        calls = " | ".join(f"call{i}" for i in range(len(functions)))
        one, glue = "call", r'"\n"'
        lines = [f"call: {calls}"]
        if style == "hermes":
            one = "tagged"
            lines.append(f'tagged: "{OPEN}\\n" call "\\n{CLOSE}"')
        else:
            glue = '"; "'
        repeat = "" if self.most == 1 or self.only else f" ({glue} {one})*"
        lines.append(f"start: {one}{repeat}")
        for i, function in enumerate(functions):
            head = quote(f'{{"name": {json.dumps(function["name"])}, "{_KEY[style]}": ')
            lines.append(f'call{i}: {head} args{i} "}}"')
            lines.append(f"args{i}: %json {_dumped(_schema(function))}")
        return lark_grammar("\n".join(lines))


def _dumped(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except RecursionError as error:
        raise bad_request("tools", "tools: a schema is nested too deeply") from error


def _schema(function: dict[str, Any]) -> dict[str, Any]:
    """Always of an object; keywords that cannot be held to are passed over unless the client insists."""
    own = function.get("parameters") or {"properties": {}, "additionalProperties": False}
    options = {"whitespace_pattern": WHITESPACE, "lenient": function.get("strict") is not True}
    return {"type": "object", **own, "x-guidance": options}


def read(r: ChatRequest) -> ToolUse | None:
    """None: no tools, or none to be called. Raises ApiError 400."""
    choice = r.tool_choice
    if not r.tools:
        if choice not in (None, "none"):
            raise bad_request("tool_choice", "tool_choice: only with tools")
        return None
    if len(r.tools) > MAX_TOOLS:
        raise bad_request("tools", f"tools: at most {MAX_TOOLS}")
    tools = [_tool(i, tool) for i, tool in enumerate(r.tools)]
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("tools", "tools: names must differ")
    most = 1 if r.parallel_tool_calls is False else None
    if choice == "none":
        return None
    if choice in (None, "auto"):
        return ToolUse(tools, "auto", most=most)
    if choice == "required":
        return ToolUse(tools, "required", most=most)
    return ToolUse(tools, "named", _named(choice, names), most=1)


def _tool(i: int, tool: Any) -> dict[str, Any]:
    place = f"tools[{i}]"
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise bad_request("tools", f"{place}: must be an object of type function")
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise bad_request("tools", f"{place}.function.name: must be a string")
    if len(function["name"]) > 64:
        raise bad_request("tools", f"{place}.function.name: at most 64 characters")
    if not isinstance(function.get("parameters"), dict | None):
        raise bad_request("tools", f"{place}.function.parameters: must be a JSON schema")
    if not isinstance(function.get("description"), str | None):
        raise bad_request("tools", f"{place}.function.description: must be a string")
    return {"type": "function", "function": function}


def _named(choice: Any, names: list[str]) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_request("tool_choice", "tool_choice: must be none, auto, required or a function by name")
    if name not in names:
        raise bad_request("tool_choice", f"tool_choice: there is no tool {name[:64]!r}")
    return name


def style_of(template: str) -> Style:
    """How the model was taught to call."""
    if "tool_call>" not in template and ("python_tag" in template or '"parameters"' in template):
        return "llama3"
    return "hermes"


def describe(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template without tools: they are named in the system message."""
    how = _HOW.replace("TOOLS", "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{how}"}, *messages[1:]]
    return [{"role": "system", "content": how}, *messages]


def flatten(message: dict[str, Any]) -> dict[str, Any]:
    """For a template without tools: calls as the model has written them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}" for call in calls]
    return {**message, "content": "\n".join(filter(None, (message["content"], *texts)))}
