"""Every key, and what it does to the screen or to the stack."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from textual.containers import VerticalScroll

from pdctl.samples import Samples
from pdctl.snapshot import Snapshot
from pdctl.tui import keys
from pdctl.tui.source import ReplaySource
from tests.tui.fake import START, FakeSource, knobs, snapshot
from tests.tui.pilot import Driver, console

Story = Callable[[Driver, FakeSource], Awaitable[None]]
STORIES: dict[str, Story] = {}


def story(*ids: str) -> Callable[[Story], Story]:
    """Which bindings a story drives; the last test sees to it that there is one for each."""

    def keep(function: Story) -> Story:
        for id in ids:
            STORIES[id] = function
        return function

    return keep


@story("quit")
async def quits(driver: Driver, source: FakeSource) -> None:
    await driver.press("q")
    await driver.until(lambda: driver.app._exit)
    assert source.calls == []


@story("help")
async def helps(driver: Driver, source: FakeSource) -> None:
    await driver.press("question_mark")
    text = await driver.dialog()
    assert all(what in text for _, _, what in keys.commands())
    await driver.press("escape")
    await driver.closed()
    await driver.press("f1")
    await driver.dialog()


@pytest.mark.parametrize(("size", "scrolls"), [((80, 24), True), ((120, 36), False)])
async def test_every_key_of_the_help_can_be_seen(size: tuple[int, int], scrolls: bool) -> None:
    async with console(size=size) as driver:
        await driver.press("question_mark")
        await driver.dialog()
        body = driver.app.screen.query_one(VerticalScroll)
        assert (body.max_scroll_y > 0) == scrolls
        assert driver.app.screen.region.contains_region(driver.app.screen.query_one(".hint").region)
        await driver.press("end")
        await driver.until(lambda: body.scroll_y == body.max_scroll_y)


@story("palette")
async def finds_actions_by_name(driver: Driver, source: FakeSource) -> None:
    await driver.press("colon")
    await driver.until(lambda: len(driver.app.screen_stack) > 1)
    assert type(driver.app.screen).__name__ == "CommandPalette"


@story("view_overview", "view_workers", "view_requests", "view_tune", "view_logs", "tune", "back")
async def changes_views(driver: Driver, source: FakeSource) -> None:
    for key, view in (
        ("2", "workers"),
        ("3", "requests"),
        ("4", "tune"),
        ("5", "logs"),
        ("1", "overview"),
        ("t", "tune"),
    ):
        await driver.press(key)
        assert driver.model.view == view
    assert "History" in driver.text
    await driver.press("escape")
    assert driver.model.view == "overview"


@story("down", "up", "first", "last", "page_down", "page_up")
async def moves(driver: Driver, source: FakeSource) -> None:
    for key, at in (
        ("down", 1),
        ("j", 2),
        ("up", 1),
        ("k", 0),
        ("end", 4),
        ("home", 0),
        ("pagedown", 4),
        ("pageup", 0),
    ):
        await driver.press(key)
        assert driver.model.index("workers", 5) == at, key
    await driver.press("down")
    assert "▸prefill-0" in driver.text


@story("panel", "open")
async def opens(driver: Driver, source: FakeSource) -> None:
    await driver.press("tab")
    assert "▸router.queue_high" in driver.text
    await driver.press("enter")
    assert "router.queue_high" in await driver.dialog()
    await driver.press("escape")
    await driver.closed()
    await driver.press("tab", "down", "enter")
    assert driver.model.view == "workers"
    assert "prefill-0-instance" in driver.text
    await driver.press("enter")
    assert "checksum_failures" in driver.text
    await driver.press("3", "down", "enter")
    await driver.until(lambda: driver.model.opened)
    assert ("request", "chatcmpl-2") in source.calls
    assert "KV transfer" in driver.text
    await driver.press("escape")
    assert driver.model.opened is None


@story("filter")
async def filters(driver: Driver, source: FakeSource) -> None:
    await driver.press("slash")
    await driver.dialog()
    await driver.type("decode")
    await driver.press("enter")
    await driver.closed()
    assert [worker.name for worker in driver.model.workers()] == ["decode-0", "decode-1"]
    assert "prefill-0" not in driver.text.split("Workers")[1].split("Tune")[0]
    await driver.press("escape")
    assert len(driver.model.workers()) == 5


@story("sort_back", "sort_on")
async def sorts(driver: Driver, source: FakeSource) -> None:
    await driver.press("greater_than_sign")
    assert driver.model.workers()[0].name == "decode-0"
    assert "sort kv" in driver.text
    await driver.press("less_than_sign")
    assert "sort name" in driver.text


@story("maximise", "window_less", "window_more", "faster", "slower")
async def changes_what_is_seen(driver: Driver, source: FakeSource) -> None:
    await driver.press("right_square_bracket")
    assert driver.model.window_s == 300
    await driver.press("left_square_bracket")
    assert driver.model.window_s == 60
    await driver.press("minus")
    assert driver.model.refresh_s == 1.0
    await driver.press("plus")
    assert driver.model.refresh_s == 0.5
    await driver.press("2", "down", "m")
    assert "prefill-0-instance" not in driver.text
    await driver.press("m")
    assert "prefill-0-instance" in driver.text


@story("pause", "scrub_back", "scrub_on", "scrub_back_far", "scrub_on_far")
async def goes_back_in_time(driver: Driver, source: FakeSource) -> None:
    for second in range(1, 6):
        source.snapshot = snapshot(START + second, 100 + second)
        driver.app.poll_soon()
        await driver.until(lambda second=second: driver.model.frame.at == START + second)
    await driver.press("p")
    assert "PAUSED" in driver.text
    await driver.press("left", "h")
    assert driver.model.frame.at == START + 3
    await driver.press("right")
    assert driver.model.frame.at == START + 4
    source.snapshot = snapshot(START + 6, 106)
    driver.app.poll_soon()
    await driver.until(lambda: driver.model.history.points[-1].at == START + 6)
    assert driver.model.frame.at == START + 4  # what comes in meanwhile does not move what is looked at
    await driver.press("shift+left")
    assert driver.model.frame.at == START
    await driver.press("shift+right")
    assert driver.model.frame.at == START + 5
    await driver.press("home")
    assert driver.model.frame.at == START
    await driver.press("A")
    assert "paused" in driver.model.message
    await driver.press("p")
    await driver.until(lambda: driver.model.frame.at == START + 6)


@story("logs", "follow", "wrap", "level", "next_error")
async def reads_logs(driver: Driver, source: FakeSource) -> None:
    await driver.press("down", "l")
    assert driver.model.filter_of("logs") == "prefill-0"
    assert {line.process for line in driver.model.logs()} == {"prefill-0"}
    await driver.press("escape", "5")
    await driver.press("n")
    assert not driver.model.follow
    assert "fell silent" in driver.text.splitlines()[-4] or "fell silent" in driver.text
    await driver.press("f")
    assert driver.model.follow
    await driver.press("w")
    assert driver.model.wrap
    await driver.press("v")
    assert {line.level for line in driver.model.logs()} == {"warn", "error"}
    await driver.press("up")
    assert not driver.model.follow


@story("copy")
async def copies(driver: Driver, source: FakeSource) -> None:
    await driver.press("down", "c")
    assert driver.app.clipboard == "prefill-0"
    await driver.press("3", "c")
    assert driver.app.clipboard == "chatcmpl-1"


@story("ack")
async def acknowledges(driver: Driver, source: FakeSource) -> None:
    source.snapshot = snapshot(START + 10)
    driver.app.poll_soon()
    await driver.until(lambda: driver.model.watch.open)
    assert "▲1 alert" in driver.text
    assert "alert" in [line.process for line in driver.model.logs()]
    await driver.press("a")
    assert "kv_low" in await driver.dialog()
    await driver.press("escape")
    await driver.closed()
    assert driver.model.watch.open == []


@story("diff", "apply", "discard", "undo", "boot")
async def tunes(driver: Driver, source: FakeSource) -> None:
    await driver.press("t", "down", "enter")
    assert "range 64..8192" in await driver.dialog()
    await driver.type("9999")
    assert "above 8192" in await driver.dialog()
    await driver.press("enter")
    assert len(driver.app.screen_stack) == 2  # a bad value cannot be entered
    await driver.type("1024")
    assert "above" not in await driver.dialog()
    await driver.press("enter")
    await driver.closed()
    assert driver.model.staged == {"prefill.token_budget": 1024}
    await driver.press("d")
    assert "- 2048\n  + 1024" in await driver.dialog()
    await driver.press("escape")
    await driver.closed()
    await driver.press("z")
    assert driver.model.staged == {}
    await driver.press("0")
    assert driver.model.staged == {"prefill.token_budget": 4096}
    await driver.press("A")
    assert "+ 4096" in await driver.dialog()
    await driver.type("as it was | 5m")
    await driver.press("enter")
    await driver.settled()
    assert source.calls == [("change", {"prefill.token_budget": 4096}, 3, "as it was", 300.0)]
    assert driver.model.staged == {}
    await driver.press("u")
    await driver.until(lambda: ("undo",) in source.calls)


@story("drain", "restart", "kill")
async def handles_workers(driver: Driver, source: FakeSource) -> None:
    await driver.press("2", "down")
    for key, call in (("x", "drain"), ("R", "restart"), ("K", "kill")):
        await driver.press(key)
        assert "prefill-0?" in await driver.dialog()
        await driver.type("prefill-1")
        await driver.press("enter")
        assert len(driver.app.screen_stack) == 2  # another's name is not enough
        await driver.type("prefill-0")
        await driver.press("enter")
        await driver.settled()
        assert source.calls[-1] == (call, "prefill-0")
    await driver.press("end", "x")
    assert "Resume decode-1" in await driver.dialog()
    await driver.type("decode-1")
    await driver.press("enter")
    await driver.settled()
    assert source.calls[-1] == ("resume", "decode-1")


@story("theme")
async def changes_colours(driver: Driver, source: FakeSource) -> None:
    seen = [driver.app.theme_name]
    for _ in range(3):
        await driver.press("T")
        seen.append(driver.app.theme_name)
    assert seen == ["dark", "light", "cb-safe", "ansi"]


@story("snapshot", "record")
async def keeps(driver: Driver, source: FakeSource) -> None:
    folder = driver.app.deck.folder
    await driver.press("s")
    svg, frame = next(folder.glob("*.svg")), next(folder.glob("*.json"))
    assert "llama8b-2p2d" in svg.read_text()
    assert msgspec.json.decode(frame.read_bytes(), type=Snapshot).at == START
    await driver.press("ctrl+r")
    assert "REC" in driver.text
    source.snapshot = snapshot(START + 1)
    driver.app.poll_soon()
    await driver.until(lambda: driver.model.frame.at == START + 1)
    await driver.press("ctrl+r")
    samples = Samples(next(folder.glob("*.db")))
    assert samples.times[-1] == START + 1
    samples.close()


@pytest.mark.parametrize("story", dict.fromkeys(STORIES.values()), ids=lambda story: story.__name__)
async def test_keys(story: Story, tmp_path: Path) -> None:
    source = FakeSource()
    async with console(source, folder=tmp_path) as driver:
        await story(driver, source)


async def test_a_read_only_console_changes_nothing() -> None:
    source = FakeSource(is_read_only=True)
    async with console(source) as driver:
        assert " RO " in driver.text
        await driver.press("2", "down")
        for key in ("x", "R", "K", "u", "t", "enter", "A", "0", "z"):
            await driver.press(key)
            assert len(driver.app.screen_stack) == 1, key
        assert source.calls == []
        await driver.press("question_mark")
        assert "kill" not in await driver.dialog()


async def test_a_server_that_is_read_only_says_so_too() -> None:
    source = FakeSource(snapshot(knobs=knobs() | {"read_only": True}))
    async with console(source) as driver:
        assert " RO " in driver.text


async def test_a_refusal_is_shown_and_what_was_staged_stays() -> None:
    source = FakeSource()
    source.refusal = "VERSION_CONFLICT: revision 4 is newer"
    async with console(source) as driver:
        driver.model.staged = {"prefill.token_budget": 1024}
        await driver.press("A")
        await driver.dialog()
        await driver.press("enter")
        await driver.settled()
        assert "VERSION_CONFLICT" in driver.text
        assert driver.model.staged == {"prefill.token_budget": 1024}


async def test_a_lost_connection_comes_back_by_itself() -> None:
    source = FakeSource()
    async with console(source) as driver:
        source.lost = "the router does not answer"
        driver.app.poll_soon()
        await driver.until(lambda: driver.model.lost_at)
        assert "NO CONNECTION" in driver.text
        assert "18.4" in driver.text
        assert "the router does not answer" in driver.text
        source.lost = ""
        driver.app.poll_soon()
        await driver.until(lambda: not driver.model.lost_at)
        assert "LIVE" in driver.text


async def test_charts_begin_with_what_was_before() -> None:
    async with console() as driver:
        assert len(driver.model.history.points) == 61
        assert driver.model.history.last(60, 4, lambda point: point.req_s) == [1.0, 1.0, 1.0, 1.0]


async def test_a_remapped_key_works_and_help_names_it() -> None:
    async with console(keymap={"view_tune": "f4", "nonsense": "f5"}) as driver:
        await driver.press("f4")
        assert driver.model.view == "tune"
        await driver.press("question_mark")
        assert "f4" in await driver.dialog()


async def test_a_click_selects_and_a_wheel_moves() -> None:
    async with console() as driver:
        row = next(i for i, line in enumerate(driver.text.splitlines()) if " decode-0 " in line and "kv>lo" in line)
        await driver.pilot.click(offset=(10, row))
        await driver.pilot.pause()
        assert driver.model.worker().name == "decode-0"


async def test_a_recording_plays_stops_and_goes_back(tmp_path: Path) -> None:
    from pdctl.samples import Writer

    file = tmp_path / "history.db"
    writer = Writer(file, kept_s=1e12)
    for second in range(100):
        writer.add(snapshot(START + second, 100 + second))
    writer.close()
    source = ReplaySource(file)
    async with console(source) as driver:
        assert "REPLAY" in driver.text
        await driver.press("p", "end")
        assert driver.model.frame.at == START + 99
        assert len(driver.model.history.points) == 61
        await driver.press("left")
        assert driver.model.frame.at == START + 98
        await driver.press("home")
        assert driver.model.frame.at == START
        await driver.press("x", "p")
        await driver.until(lambda: not driver.model.paused)


def test_keys_that_terminals_keep_are_not_bound() -> None:
    bound = {key for binding in keys.bindings() for key in binding.key.split(",")}  # type: ignore[union-attr]
    assert bound.isdisjoint({"ctrl+a", "ctrl+b", "ctrl+s", "ctrl+q", "ctrl+z"})


def test_every_key_has_its_story() -> None:
    assert keys.ids() == STORIES.keys()
