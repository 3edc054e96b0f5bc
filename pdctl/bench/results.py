"""Reading what `pdctl bench` and `pdctl plan` wrote."""

import json
from pathlib import Path
from typing import Any

from pdctl.exits import UsageError


def read(file: Path, kind: str = "") -> dict[str, Any]:
    """`kind`: what it has to call itself. Raises UsageError for anything but a JSON object of version 1."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("version") != 1 or (kind and value.get("kind") != kind):
        raise UsageError(f"{file} is not a {kind + ' ' if kind else ''}result of version 1")
    return value
