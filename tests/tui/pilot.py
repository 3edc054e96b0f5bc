"""A console under a pilot, on a fake source, and the waits its tests need: for messages and states, never for time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from pdctl.tui.app import Console
from pdctl.tui.source import Source
from tests.tui.fake import START, FakeSource


class Driver:
    def __init__(self, app: Console, pilot: Pilot[Any]) -> None:
        self.app = app
        self.pilot = pilot

    @property
    def model(self) -> Any:
        return self.app.model

    @property
    def text(self) -> str:
        return self.app.canvas.text

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def type(self, text: str) -> None:
        """Into the dialog that is open, in place of what stands there."""
        from textual.widgets import Input

        field = self.app.screen.query_one(Input)
        field.value = text
        await self.pilot.pause()

    async def until(self, condition: Callable[[], Any], what: str = "", *, within_s: float = 10.0) -> Any:
        async with asyncio.timeout(within_s):
            while not (found := condition()):
                await asyncio.sleep(0.01)
        await self.pilot.pause()
        return found

    async def dialog(self) -> str:
        """Its text, once one is open."""
        await self.until(lambda: len(self.app.screen_stack) > 1, "a dialog")
        from textual.widgets import Static

        return "\n".join(str(static.render()) for static in self.app.screen.query(Static))

    async def closed(self) -> None:
        await self.until(lambda: len(self.app.screen_stack) == 1, "the dialog closed")

    async def settled(self) -> None:
        """No change is under way."""
        await self.until(lambda: not self.model.busy and len(self.app.screen_stack) == 1)


@asynccontextmanager
async def console(
    source: Source | None = None, *, size: tuple[int, int] = (120, 36), folder: Path | None = None, **more: Any
) -> AsyncIterator[Driver]:
    given: dict[str, Any] = {}
    if source is None or isinstance(source, FakeSource):
        given["clock"] = lambda: START + 1
    source = source or FakeSource()
    app = Console(source, folder=folder, refresh_s=more.pop("refresh_s", 0.5), **given, **more)
    async with app.run_test(size=size) as pilot:
        driver = Driver(app, pilot)
        await driver.until(lambda: app.model.frame is not None, "the first frame")
        yield driver
    app.poller.join(10)
    source.close()
