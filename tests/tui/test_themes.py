"""The overview as SVG in every theme at both sizes, and without colours: `PDCTL_GOLDEN=1` writes them anew."""

import os
import re
from pathlib import Path

import pytest

from pdctl.tui.themes import NAMES
from tests.tui.pilot import console

GOLDEN = Path(__file__).parent / "golden"
SIZES = [(120, 36), (80, 24)]


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def normal(svg: str) -> str:
    """Without the random id that every export has in its class names, and one element a line for a readable diff."""
    return re.sub(r"terminal-[0-9]+", "terminal", svg).replace("><", ">\n<")


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("theme", NAMES)
async def test_svg(theme: str, width: int, height: int) -> None:
    async with console(size=(width, height), theme=theme, refresh_s=1.0) as driver:
        await driver.press("down")
        shown = normal(driver.app.export_screenshot(title="pdctl"))
    file = GOLDEN / f"overview-{theme}-{width}x{height}.svg"
    if os.environ.get("PDCTL_GOLDEN"):
        file.write_text(shown)
    assert shown == file.read_text(), f"{file} differs from what is drawn"


async def test_no_color_uses_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with console() as driver:
        styles = {segment.style for y in range(36) for segment in driver.app.canvas.render_line(y) if segment.style}
        assert all(style.color is None and style.bgcolor is None for style in styles)
        assert any(style.reverse for style in styles)  # what is selected is still seen
        assert "▲ kv>lo" in driver.text


async def test_ascii_has_only_ascii() -> None:
    async with console(is_ascii=True) as driver:
        shown = "".join(segment.text for y in range(36) for segment in driver.app.canvas.render_line(y))
        assert shown.isascii()
        assert "READY" in shown
