"""On which line of a profile a key stands. The parsers of TOML do not say, so the text is read for keys once more."""

import re
from pathlib import Path
from typing import Any

KeyPath = tuple[str, ...]

_HEADER = re.compile(r"^\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""^\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")
_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")
_INLINE = re.compile(r"([A-Za-z0-9_-]+)\s*=")


def lines_of(file: Path, text: str) -> dict[KeyPath, int]:
    """The line of every key and table, counted from 1."""
    return _yaml_lines(text) if file.suffix in (".yaml", ".yml") else _toml_lines(text)


def _toml_lines(text: str) -> dict[KeyPath, int]:
    found: dict[KeyPath, int] = {}
    table: KeyPath = ()
    quotes = ""
    for number, line in enumerate(text.splitlines(), 1):
        if quotes:
            quotes = "" if quotes in line else quotes
            continue
        if header := _HEADER.match(line):
            table = _parts(header[1])
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            path = (*table, *_parts(key[1]))
            found[path] = number
            rest = line[key.end() :]
            if rest.lstrip().startswith("{"):
                found |= {(*path, inner[1]): number for inner in _INLINE.finditer(rest)}
            quotes = next((q for q in ('"""', "'''") if rest.count(q) == 1), "")
    return found


def _parts(dotted: str) -> KeyPath:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


def _yaml_lines(text: str) -> dict[KeyPath, int]:
    import yaml

    found: dict[KeyPath, int] = {}

    def walk(node: Any, prefix: KeyPath) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                path = (*prefix, str(key.value))
                found[path] = key.start_mark.line + 1
                walk(value, path)

    walk(yaml.compose(text, Loader=yaml.SafeLoader), ())
    return found
