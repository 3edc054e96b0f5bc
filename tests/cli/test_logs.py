"""Log files: our JSON lines, other people's lines, and both merged."""

import re
from pathlib import Path

import pytest

from pdctl.exits import UsageError
from pdctl.logs import check_filters, follow, last_line, parse, read, wanted


def test_a_json_line_is_shown_as_text_with_its_fields() -> None:
    line = parse("router", '{"t": 12.5, "level": "info", "process": "router", "message": "ready", "routes": 1}')
    assert (line.at, line.level, line.text) == (12.5, "info", "ready routes=1")


def test_other_lines_belong_to_the_moment_before() -> None:
    line = parse("router", "Loading weights: 100%", 12.5)
    assert (line.at, line.level, line.text) == (12.5, "", "Loading weights: 100%")
    assert parse("x", '{"not": "ours"}').text == '{"not": "ours"}'


def test_files_are_merged_by_time(tmp_path: Path) -> None:
    a, b = tmp_path / "a.log", tmp_path / "b.log"
    a.write_text(
        '{"t": 1, "level": "info", "message": "one"}\ntrace of one\n{"t": 3, "level": "info", "message": "three"}\n'
    )
    b.write_text('{"t": 2, "level": "warn", "message": "two"}\n')
    assert [line.text for line in read([("a", a), ("b", b)], 10)] == ["one", "trace of one", "two", "three"]
    # The last lines are those of the stack, not of each process; of what is looked for where something is.
    assert [line.text for line in read([("a", a), ("b", b)], 1)] == ["three"]
    assert [line.text for line in read([("a", a), ("b", b)], 2)] == ["two", "three"]
    assert [line.text for line in read([("a", a), ("b", b)], 1, lambda line: "o" in line.text)] == ["two"]


def test_the_last_line_is_the_cause_of_an_end(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert last_line(log) == ""
    log.write_text("Traceback\nValueError: no\n\n")
    assert last_line(log) == "ValueError: no"
    log.write_text('{"t": 1, "level": "error", "message": "cannot load"}\n')
    assert last_line(log) == "cannot load"


def test_follow_goes_over_a_rotation(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("old\n")
    steps = iter(["append", "rotate", "end"])
    over = False

    def pause(_: float) -> None:
        nonlocal over
        match next(steps):
            case "append":
                with log.open("a") as file:
                    file.write("new\nha")
            case "rotate":
                log.rename(tmp_path / "a.log.prev")
                log.write_text("after\n")
            case _:
                over = True

    seen = [line.text for line in follow([("a", log)], pause=pause, is_over=lambda: over)]
    assert seen == ["new", "after"]


def test_filters() -> None:
    warn = parse("a", '{"t": 5, "level": "warning", "message": "disk"}')
    assert wanted(warn, level="warn")
    assert not wanted(warn, level="error")
    assert not wanted(warn, since=6)
    assert wanted(warn, grep="d.sk")
    assert not wanted(warn, grep="net")
    assert wanted(parse("a", "plain", 5), level="error")


@pytest.mark.parametrize(("level", "grep", "named"), [("loud", "", "loud"), ("", "((", "((")])
def test_a_filter_that_is_none_is_a_usage_error(level: str, grep: str, named: str) -> None:
    with pytest.raises(UsageError, match=re.escape(named)):
        check_filters(level, grep)
    check_filters("warn", "a|b")
