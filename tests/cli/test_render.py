"""Tables on terminals that are too narrow for them."""

import sys

import pytest

from pdctl.render import table_or_list

ROWS = [
    ("demo", "/a/long/path/that/has/no/blanks/in/it/demo.toml", "one prefill and one decode worker on this machine")
]


@pytest.mark.parametrize(("columns", "is_terminal", "lines"), [(200, True, 2), (40, False, 2), (40, True, 4)])
def test_nothing_is_cut(columns: int, is_terminal: bool, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs get the table whatever COLUMNS says."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    text = table_or_list(ROWS, ("NAME", "FILE", "FOR"))
    assert len(text.splitlines()) == lines
    assert all(cell in " ".join(text.split()) for cell in ROWS[0])
    assert lines == 2 or all(len(line) <= columns or " " not in line.strip() for line in text.splitlines())
