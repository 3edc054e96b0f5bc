"""The Textual app: frames come in, keys go out, everything is drawn by `views`.

1. A thread polls the source and posts `Arrived` or `Lost`; nothing else here touches the network for looking.
2. A message changes the model; the canvas draws what the model says. Keys that only look do the same (`moves`).
3. Keys that change something ask first (`dialogs`), call the source in a thread and poll at once to see it happen.
4. Leaving ends the thread and nothing else: the servers are not ours.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from textual import work
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.message import Message
from textual.screen import Screen

from pdctl.snapshot import LogLine, Snapshot
from pdctl.tui import dialogs, keys, moves, numbers, themes
from pdctl.tui.canvas import Canvas
from pdctl.tui.changes import Changes
from pdctl.tui.deck import Deck
from pdctl.tui.frame import Frame
from pdctl.tui.model import Model
from pdctl.tui.reading import frame
from pdctl.tui.source import ReplaySource, Source
from pdctl.tui.views import screen
from server.errors import PdctlError

MESSAGE_S = 6.0
MAX_ALERTS = 200


def is_hung_up() -> bool:
    """Whether the other end of standard input is gone: a terminal that was closed, a page's server that ended."""
    watch = select.poll()
    watch.register(0, 0)
    return any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in watch.poll(0))


class Arrived(Message):
    """A frame. A newer one takes the place of one that was not shown yet."""

    def __init__(self, snapshot: Snapshot, frame: Frame) -> None:
        super().__init__()
        self.snapshot, self.frame = snapshot, frame

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, Arrived)


class Lost(Message):
    """The source did not answer."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, Lost)


class Console(App[None], inherit_bindings=False):
    """`pdctl tui`."""

    TITLE = "pdctl"
    CSS = dialogs.CSS
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings()
    ENABLE_COMMAND_PALETTE = True

    def __init__(
        self,
        source: Source,
        *,
        refresh_s: float = 1.0,
        theme: str = "dark",
        is_ascii: bool = False,
        keymap: Mapping[str, str] | None = None,
        folder: Path | None = None,
        clock: Callable[[], float] = time.time,
        has_terminal: bool = False,
    ) -> None:
        """`has_terminal`: it ends when standard input does."""
        # The ansi theme keeps the terminal's own colours; everything else is drawn in true colour.
        super().__init__(ansi_color=theme == "ansi")
        self.source = source
        self.model = Model(name=source.name, refresh_s=refresh_s, is_read_only=source.is_read_only)
        self.model.is_replay = isinstance(source, ReplaySource)
        self.theme_name = theme
        self.command_keymap = dict(keymap or {})
        self._clock = clock
        self._is_mono = bool(os.environ.get("NO_COLOR"))
        self._wake, self._ends = threading.Event(), threading.Event()
        # A daemon: a router that hangs must not keep a console that was left.
        self.poller = threading.Thread(target=self._poll, name="poll", daemon=True)
        self._alert_lines: deque[LogLine] = deque(maxlen=MAX_ALERTS)
        self._message_until = 0.0
        self._has_terminal = has_terminal and not is_hung_up()
        self.deck = Deck(self, folder or Path.cwd())
        self._changes = Changes(self)
        self.canvas = Canvas(self._draw, themes.styles(theme, is_mono=self._is_mono), is_ascii=is_ascii)

    def compose(self) -> ComposeResult:
        yield self.canvas

    def on_mount(self) -> None:
        for name in ("dark", "light", "cb-safe"):
            self.register_theme(themes.textual_theme(name))
        self._use_theme(self.theme_name)
        self.set_keymap({id: key for id, key in self.command_keymap.items() if id in keys.ids()})
        self.canvas.focus()
        self.poller.start()

    def on_unmount(self) -> None:
        self._ends.set()
        self._wake.set()
        self.deck.close()

    # frames

    def _poll(self) -> None:
        """Its own thread: a router that hangs for two seconds must not make a key wait."""
        self._remember()
        while not self._ends.is_set():
            if self._has_terminal and is_hung_up():
                # Whoever looked is gone: nobody can press q, and reading from nothing would keep a core busy.
                os.kill(os.getpid(), signal.SIGHUP)
                return
            self._wake.clear()
            message: Message
            try:
                snapshot = self.source.poll()
                message = Arrived(snapshot, frame(snapshot))
            except PdctlError as error:
                message = Lost(error.message)
            except Exception as error:  # the screen says it; a console that vanishes says nothing
                message = Lost(f"{type(error).__name__}: {error}")
            if self._ends.is_set():
                return
            self.post_message(message)
            self._wake.wait(self.model.refresh_s)

    def _remember(self) -> None:
        """The charts start with what the supervisor kept; a file that cannot be read costs only that."""
        with contextlib.suppress(Exception):
            for earlier in self.source.earlier():
                self.model.history.add(frame(earlier))

    def on_arrived(self, message: Arrived) -> None:
        model, new = self.model, message.frame
        model.now, model.lost_at, model.lost_why = self._clock(), 0.0, ""
        model.history.add(new)
        self.deck.add(message.snapshot)
        fresh = model.watch.update(new)
        self._alert_lines.extend(LogLine("alert", new.at, "warn", f"▲ {alert.text}") for alert in fresh)
        if fresh:
            self.say(f"▲ {fresh[0].text}   (a: alerts)", "warn")
        if not model.paused:
            self.show(new)
        elif self._clock() > self._message_until:
            model.message = ""
        self.redraw()

    def on_lost(self, message: Lost) -> None:
        model = self.model
        model.now, model.lost_why = self._clock(), message.why
        if model.frame is not None:
            model.lost_at = model.frame.at
            model.message, model.message_role = message.why, "bad"
            self._message_until = 0.0
        self.redraw()

    def show(self, new: Frame) -> None:
        model = self.model
        model.frame = new
        model.is_read_only = self.source.is_read_only or new.is_read_only
        model.lines = moves.merged_lines(new, list(self._alert_lines))
        if self._clock() > self._message_until:
            model.message = ""

    def _draw(self, width: int, height: int) -> Any:
        return screen.draw(self.model, width, height)

    def redraw(self) -> None:
        if self.canvas.is_mounted:
            self.canvas.redraw()

    def say(self, text: str, role: str = "good") -> None:
        self.model.message, self.model.message_role = text, role
        self._message_until = self._clock() + MESSAGE_S
        self.redraw()

    # keys that look

    def action_view(self, name: str) -> None:
        self.model.view = name
        self.redraw()

    def action_tune(self) -> None:
        self.action_view("tune")

    def action_logs(self) -> None:
        worker = self.model.worker()
        if self.model.view in ("overview", "workers") and self.model.panel == "workers" and worker is not None:
            self.model.filters["logs"] = worker.name
        self.action_view("logs")

    def action_move(self, rows: int) -> None:
        if self.model.paused and abs(rows) > 1000:
            self.deck.scrub_to(self.deck.tape.count - 1 if rows < 0 else 0)
            return
        moves.move(self.model, rows)
        self.redraw()

    def action_focus_next(self) -> None:
        """Textual's screens bind tab before any app can; with one canvas it is ours, in a dialog it moves the focus."""
        if len(self.screen_stack) == 1:
            self.action_panel()
        else:
            super().action_focus_next()

    def action_panel(self) -> None:
        self.model.panel = "tune" if self.model.panel == "workers" else "workers"
        self.redraw()

    async def action_back(self) -> None:
        moves.back(self.model)
        self.redraw()

    def action_sort(self, by: int) -> None:
        moves.sort(self.model, by)
        self.redraw()

    def action_window(self, by: int) -> None:
        moves.window(self.model, by)
        self.redraw()

    def action_refresh_rate(self, by: int) -> None:
        moves.refresh_rate(self.model, by)
        self._wake.set()
        self.redraw()

    def action_maximise(self) -> None:
        self.model.is_maximised = not self.model.is_maximised
        self.redraw()

    def action_follow(self) -> None:
        model = self.model
        model.follow = not model.follow
        model.selected["logs"] = max(0, model.count("logs") - 1)
        self.redraw()

    def action_wrap(self) -> None:
        self.model.wrap = not self.model.wrap
        self.redraw()

    def action_level(self) -> None:
        moves.level(self.model)
        self.redraw()

    def action_next_error(self) -> None:
        self.model.view = "logs"
        if not moves.next_error(self.model):
            self.say("no error in the log", "dim")
        self.redraw()

    def action_copy(self) -> None:
        text = moves.selected_text(self.model)
        if text:
            self.copy_to_clipboard(text)
            self.say(f"copied {text[:60]}")

    def action_theme(self) -> None:
        self._use_theme(themes.NAMES[(themes.NAMES.index(self.theme_name) + 1) % len(themes.NAMES)])
        self.say(f"theme {self.theme_name}", "dim")

    def _use_theme(self, name: str) -> None:
        self.theme_name = name
        self.ansi_color = name == "ansi"
        # Textual's own theme for sixteen colours has had two names.
        ansi = next(known for known in ("ansi-dark", "textual-ansi", "textual-dark") if known in self.available_themes)
        self.theme = ansi if name == "ansi" else f"pdctl-{name}"
        self.canvas.use(themes.styles(name, is_mono=self._is_mono))

    def on_canvas_scrolled(self, message: Canvas.Scrolled) -> None:
        self.action_move(message.rows)

    def on_canvas_clicked(self, message: Canvas.Clicked) -> None:
        moves.select_text(self.model, message.text)
        self.redraw()

    def action_help(self) -> None:
        is_wide = self.size.width >= 120
        text = keys.help_text(self.command_keymap, is_read_only=self.model.is_read_only, columns=2 if is_wide else 1)
        self.push_screen(dialogs.Text("Keys", text, is_wide=is_wide))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        for id, action, text in keys.commands():
            if action != "command_palette" and not (self.model.is_read_only and id in keys.CHANGES):
                yield SystemCommand(id.replace("_", " "), text, lambda action=action: self.run_action(action))

    # keys that open and change

    def action_open(self) -> None:
        model = self.model
        table, worker = model.table, model.worker()
        if table == "tune":
            self.action_change("edit")
        elif model.view == "requests":
            self.run_worker(self._changes.waterfall())
        elif model.view == "overview":
            self.action_view("workers")
        elif model.view == "workers" and worker is not None:
            model.opened_worker = "" if model.opened_worker == worker.name else worker.name
            self.redraw()

    def action_change(self, what: str) -> None:
        self.run_worker(self._changes.run(what))

    async def ask(self, dialog: dialogs.Dialog) -> str | None:
        return await self.push_screen_wait(dialog)

    def poll_soon(self) -> None:
        self._wake.set()

    def action_ack(self) -> None:
        """Shows what is wrong, and from then on only counts what is new."""
        watch = self.model.watch
        rows = [f"▲ {alert.text}\n  since {numbers.clock(self.model.now - watch.since(alert))}" for alert in watch.all]
        watch.acknowledge()
        self.push_screen(dialogs.Text("Alerts", "\n".join(rows) or "none"))
        self.redraw()

    @work
    async def action_filter(self) -> None:
        table = self.model.view if self.model.view != "overview" else "workers"
        text = await self.push_screen_wait(
            dialogs.Ask(
                f"Filter {table}", text=self.model.filter_of(table), hint="enter: filter; empty: all", empty=True
            )
        )
        if text is not None:
            self.model.filters[table] = text.strip()
            self.redraw()

    # time

    def action_pause(self) -> None:
        self.deck.pause()

    def action_scrub(self, frames: int) -> None:
        if self.model.paused:
            self.deck.scrub_to(self.model.scrub + frames)

    def action_snapshot(self) -> None:
        self.deck.save(self.export_screenshot(title="pdctl"))

    def action_record(self) -> None:
        self.deck.record()
