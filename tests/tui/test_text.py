"""Lines, charts, numbers, knob input: what is drawn before there is a screen."""

from typing import Any

import pytest

from pdctl.tui import charts, knob_input, numbers
from pdctl.tui.frame import Knob
from pdctl.tui.lines import Line, box, window
from pdctl.tui.reading import frame
from pdctl.tui.themes import NAMES, styles, to_ascii
from tests.tui.fake import snapshot


@pytest.mark.parametrize(("text", "width"), [("abc", 5), ("abcdef", 4), ("", 3), ("日本語", 5), ("x日", 2)])
def test_a_fitted_line_has_exactly_that_many_cells(text: str, width: int) -> None:
    assert Line(text, "good").fit(width).width == width


def test_a_box_is_as_large_as_asked() -> None:
    lines = box("A long title indeed", [Line("x" * 50)], 20, 5, "and a hint")
    assert [line.width for line in lines] == [20] * 5
    assert lines[1].plain == "│ " + "x" * 16 + " │"


@pytest.mark.parametrize(("count", "selected", "height"), [(3, 0, 5), (100, 0, 7), (100, 50, 7), (100, 99, 7)])
def test_the_selected_row_is_in_the_window(count: int, selected: int, height: int) -> None:
    shown = window(count, selected, height)
    assert selected in shown
    assert len(shown) == min(count, height)


def test_marks_stand_where_their_values_are() -> None:
    plain = "".join(text for text, _ in charts.gauge(0.5, 20, 1.0, 0.8, 0.92))
    assert len(plain) == 20
    assert plain.index("┊") == 16
    assert plain.index("┃") == 18
    assert plain[:10] == "█" * 10
    assert plain[10] == "░"


@pytest.mark.parametrize(
    ("value", "role"), [(None, "dim"), (0.1, "good"), (0.8, "warn"), (0.9199, "warn"), (0.92, "bad"), (1.5, "bad")]
)
def test_a_level_has_the_colour_of_its_marks(value: float | None, role: str) -> None:
    assert charts.level_role(value, 0.8, 0.92) == role
    assert sum(len(text) for text, _ in charts.gauge(value, 12, 1.0, 0.8, 0.92)) == 12


def test_sparklines_keep_their_scale() -> None:
    assert charts.spark([0, 50, 100], 5, 100) == "  ▁▅█"
    assert charts.spark([None, 100], 2, 1000) == " ▁"
    assert charts.spark([], 3, 0) == "   "
    assert [charts.nice_top(v) for v in (0, 0.3, 1, 3, 18.4, 640, 38200)] == [1, 0.5, 1, 5, 20, 1000, 50000]


def test_the_area_chart_has_its_limit_and_its_marks() -> None:
    lines = charts.area([None] * 10 + [100.0] * 10, 10, 4, 100.0, limit=80.0, marks=[2])
    assert [line.width for line in lines] == [10] * 4
    assert lines[0].plain[2] == "▽"
    assert lines[0].plain[:2] == "┄┄"
    assert lines[3].plain == " " * 5 + "⣿" * 5


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (numbers.count(None), "-"),
        (numbers.count(38200), "38.2k"),
        (numbers.count(18.42), "18.4"),
        (numbers.size(12_670_153_523), "11.8 GiB"),
        (numbers.pair(212, 640), "212 / 640 ms"),
        (numbers.pair(2900, 7100), "2.9 / 7.1 s"),
        (numbers.pair(12, 1100), "12 ms / 1.1 s"),
        (numbers.pair(0.5, 12_840), "0.5 ms / 13 s"),
        (numbers.pair(9.9, 9_960), "9.9 ms / 10 s"),
        (numbers.pair(None, None), "- / -"),
        (numbers.clock(134), "02:14"),
        (numbers.clock(8040), "2h14"),
        (numbers.span(1100), "1.1 s"),
    ],
)
def test_numbers_are_short(shown: str, text: str) -> None:
    assert shown == text


BUDGET = Knob("prefill.token_budget", 2048, 4096, low=64, high=8192)
CHUNK = Knob("transfer.chunk_tokens", 64, 64, low=16, high=8192, step=16)
SHARE = Knob("decode.kv_low", 0.8, 0.8, low=0.05, high=1.0)
AUTO = Knob("hybrid.threshold_tokens", "auto", 256, low=0, high=8192, words=("auto",))


@pytest.mark.parametrize(
    ("knob", "text", "value", "wrong"),
    [
        (BUDGET, "1024", 1024, ""),
        (BUDGET, " 1024 ", 1024, ""),
        (BUDGET, "", None, "type a value"),
        (BUDGET, "lots", None, "not a number"),
        (BUDGET, "auto", None, "not a number"),
        (BUDGET, "63", None, "below 64"),
        (BUDGET, "9000", None, "above 8192"),
        (BUDGET, "100.5", None, "a whole number"),
        (CHUNK, "100", None, "not a multiple of 16: 96 or 112"),
        (SHARE, "0.7", 0.7, ""),
        (SHARE, "70%", 0.7, ""),
        (SHARE, "7", None, "above 1"),
        (AUTO, "auto", "auto", ""),
        (AUTO, "x", None, "not a number or auto"),
        (AUTO, "0", 0, ""),
    ],
)
def test_what_is_typed_is_checked(knob: Knob, text: str, value: Any, wrong: str) -> None:
    assert knob_input.read(knob, text) == (value, wrong)


def test_every_theme_has_every_role() -> None:
    roles = set(styles("dark"))
    assert all(roles <= set(styles(name)) for name in NAMES)
    assert all(style.color is None for style in styles("dark", is_mono=True).values())


def test_ascii_is_ascii_and_as_wide() -> None:
    from pdctl.tui.model import Model
    from pdctl.tui.views import screen

    model = Model(frame=frame(snapshot()))
    for line in screen.draw(model, 120, 36):
        text = to_ascii(line.plain)
        assert text.isascii()
        assert len(text) == 120
