"""Writing profiles. What is not changed stays as it was, comments and order too; only TOML is written.

A profile that came with pdctl is left alone: this user's own copy, which is found before it, is written instead.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Table

from pdctl.exits import UsageError
from pdctl.profile import available, find, is_shipped, load, own_folder, parse_set
from server.config import NAME
from server.errors import PdctlError


def own_file(source: Path) -> Path:
    """Where a changed `source` is written to. Raises UsageError."""
    if source.suffix != ".toml":
        raise UsageError(f"{source} is not TOML: only TOML is written back")
    return own_folder() / source.name if is_shipped(source) else source


class Draft:
    """`source`, or this user's copy of it, with these dotted keys set: written beside it and checked, so that nothing
    is left for `keep` to refuse. Raises UsageError."""

    def __init__(self, source: Path, values: Mapping[str, Any]) -> None:
        self._target = target = own_file(source)
        text = _with_values(target if target.exists() else source, values)
        self._part = target.with_name(f"{target.stem}-{os.getpid()}.toml")
        _write(self._part, text)
        try:
            load(str(self._part))
        except PdctlError as error:
            self.drop()
            message = str(error).replace(str(self._part), str(target))
            raise UsageError(
                f"not saved, {target} would not start: {message}", help="set both in one command"
            ) from error

    def keep(self) -> Path:
        _replace(self._part, self._target)
        return self._target

    def drop(self) -> None:
        self._part.unlink(missing_ok=True)


def save(source: Path, values: Mapping[str, Any]) -> Path:
    return Draft(source, values).keep()


def create(name: str, base: str, sets: Sequence[str]) -> Path:
    """A profile of this user's, made from `base`; one that could not be started is not kept. Raises ConfigError."""
    if re.fullmatch(NAME, name) is None:
        raise UsageError(f"{name!r} cannot be a name", help="letters, digits, dot, dash and underscore, at most 64")
    if name in available():
        raise UsageError(f"there is a profile {name} already: {find(name)}", help=f"pdctl profile edit {name}")
    source = find(base)
    own_file(source)
    values = {".".join(path): value for path, value in map(parse_set, sets)}
    target = own_folder() / f"{name}.toml"
    _write(target, _with_values(source, {"name": name, **values}))
    try:
        load(str(target))
    except BaseException:
        target.unlink()
        raise
    return target


def edit(name: str, editor: str) -> tuple[Path, bool]:
    """Runs the editor on a profile, or on this user's copy of a shipped one: (file, whether it changed).

    Raises UsageError where the editor cannot be run; the profile is not checked.
    """
    source = find(name)
    target = own_file(source)
    is_copy = not target.exists()
    before = _read(source if is_copy else target)
    if is_copy:
        _write(target, before)
    try:
        code = subprocess.run([*shlex.split(editor), str(target)], check=False).returncode
    except (OSError, ValueError) as error:
        raise UsageError(f"the editor {editor!r} cannot be run: {error}", help="set VISUAL or EDITOR") from error
    finally:
        has_changed = _read(target) != before
        if is_copy and not has_changed:
            target.unlink()
    if code:
        raise UsageError(f"the editor {editor!r} ended with code {code}")
    return target, has_changed


def _with_values(source: Path, values: Mapping[str, Any]) -> str:
    try:
        document = tomlkit.parse(_read(source))
    except TOMLKitError as error:
        raise UsageError(f"{source} is no TOML now: {error}", help=f"pdctl profile edit {source.stem}") from error
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        table = document if not section else _table(document, section)
        table[key] = value
    return tomlkit.dumps(document)


def _table(document: tomlkit.TOMLDocument, section: str) -> Any:
    found = document.get(section)
    if isinstance(found, Table):
        return found
    if found is not None:
        raise UsageError(f"{section} is a value and no section", help="pdctl config schema")
    document[section] = tomlkit.table()
    return document[section]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error


def _write(target: Path, text: str) -> None:
    """Whole or not at all; the mode of what was there is kept."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}")
        part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error
    _replace(part, target)


def _replace(part: Path, target: Path) -> None:
    try:
        if target.exists():
            part.chmod(target.stat().st_mode & 0o777)
        part.replace(target)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error
