"""Keys that change the stack: each asks, calls the source in a thread, and says what came of it.

Nothing is applied without a dialog that shows it; a worker is confirmed by its name; the router has the last word.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from pdctl.snapshot import Json
from pdctl.tui import dialogs, knob_input, moves
from pdctl.tui.model import Model
from pdctl.tui.source import Source
from pdctl.tui.views.tables import value
from server.errors import PdctlError


class Screen(Protocol):
    """What is needed of the app."""

    model: Model
    source: Source

    def say(self, text: str, role: str = "good") -> None: ...
    def redraw(self) -> None: ...
    def poll_soon(self) -> None: ...
    async def ask(self, dialog: dialogs.Dialog) -> str | None: ...


class Changes:
    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._flows: dict[str, Callable[[], Awaitable[None]]] = {
            "edit": self.edit,
            "boot": self.boot,
            "diff": self.diff,
            "discard": self.discard,
            "apply": self.apply,
            "undo": self.undo,
            "drain": self.drain,
            "restart": self.restart,
            "kill": self.kill,
        }

    async def run(self, what: str) -> None:
        """Refused here in a read-only console, and again by the server where that is read-only."""
        model = self._screen.model
        if model.is_read_only and what != "diff":
            self._screen.say("read-only: nothing can be changed from here", "warn")
        elif model.paused and what != "diff":
            self._screen.say("paused: p goes on, changes are made to what is, not to what was", "warn")
        elif not model.busy:
            await self._flows[what]()

    # knobs

    async def edit(self) -> None:
        knob = self._screen.model.knob()
        if knob is None:
            return
        if not knob.is_live:
            self._screen.say(f"{knob.name} cannot be changed here: this router has no knobs API", "warn")
            return
        text = await self._screen.ask(dialogs.edit_knob(knob, self._screen.model.staged.get(knob.name)))
        if text is not None:
            new, wrong = knob_input.read(knob, text)
            if not wrong:
                self._stage(knob.name, new, knob.now)

    async def boot(self) -> None:
        knob = self._screen.model.knob()
        if knob is not None:
            self._stage(knob.name, knob.boot, knob.now)

    def _stage(self, name: str, new: Any, now: Any) -> None:
        staged = self._screen.model.staged
        if new == now:
            staged.pop(name, None)
            self._screen.say(f"{name} is {value(now)} already", "dim")
        else:
            staged[name] = new
            self._screen.say(f"staged {name} {value(now)} → {value(new)}   A applies, z discards", "accent")

    async def diff(self) -> None:
        text = moves.staged_diff(self._screen.model)
        await self._screen.ask(dialogs.Text("Staged", text or "nothing is staged"))

    async def discard(self) -> None:
        count = len(self._screen.model.staged)
        self._screen.model.staged.clear()
        self._screen.say(f"discarded {count}" if count else "nothing was staged", "dim")

    async def apply(self) -> None:
        model = self._screen.model
        if not model.staged or model.frame is None:
            self._screen.say("nothing is staged: t, then enter on a knob", "dim")
            return
        # What was looked at is what gets applied: the revision of this frame, not of the moment enter is pressed.
        rev, values = model.frame.rev, dict(model.staged)
        text = await self._screen.ask(dialogs.apply(moves.staged_diff(model)))
        if text is None:
            return
        reason, revert_after_s, _ = dialogs.split_reason(text)
        source = self._screen.source
        answer = await self._call(
            f"applying {', '.join(values)}",
            lambda: source.change(values, if_rev=rev, reason=reason, revert_after_s=revert_after_s),
        )
        if answer is not None:
            model.staged.clear()
            self._screen.say(_applied(answer, revert_after_s))

    async def undo(self) -> None:
        answer = await self._call("taking back", self._screen.source.undo)
        if answer is not None:
            self._screen.say(_applied(answer, None))

    # workers

    async def drain(self) -> None:
        worker = self._screen.model.worker()
        if worker is None or worker.role == "router":
            self._screen.say("select a worker: the router drains with pdctl down", "dim")
            return
        source, name = self._screen.source, worker.name
        if worker.state in ("draining", "drained"):
            await self._worker("Resume", name, "It takes new work again.", source.resume)
        else:
            await self._worker("Drain", name, f"{worker.open} sequences on it end; it gets no new ones.", source.drain)

    async def restart(self) -> None:
        worker = self._screen.model.worker()
        if worker is not None:
            why = f"{worker.open} sequences on it are lost or done elsewhere; x drains it first."
            await self._worker("Restart", worker.name, why, self._screen.source.restart)

    async def kill(self) -> None:
        worker = self._screen.model.worker()
        if worker is not None:
            why = (
                f"SIGKILL to pid {worker.pid}: {worker.open} sequences on it are lost. The supervisor starts it again."
            )
            await self._worker("Kill", worker.name, why, self._screen.source.kill)

    async def _worker(self, action: str, name: str, consequence: str, call: Callable[[str], None]) -> None:
        def run() -> Json:
            call(name)
            return {}

        typed = await self._screen.ask(dialogs.confirm(action, name, consequence))
        if typed == name and await self._call(f"{action.lower()} {name}", run) is not None:
            self._screen.say(f"{action.lower()}: {name}")

    # requests

    async def waterfall(self) -> None:
        model = self._screen.model
        row = model.request()
        if row is None:
            return
        model.select("requests", model.index("requests", model.count("requests")))
        source, id = self._screen.source, str(row["id"])
        found = await self._call("reading", lambda: source.request(id))
        if found is not None:
            self._screen.model.opened = {**found, "total_ms": row.get("total_ms")}
            self._screen.redraw()

    async def _call(self, what: str, call: Callable[[], Json]) -> Json | None:
        """In a thread: a router that waits for a worker's answer must not freeze the screen."""
        screen = self._screen
        screen.model.busy = what
        screen.redraw()
        try:
            return await asyncio.to_thread(call)
        except PdctlError as error:
            screen.say(f"✗ {error.message}", "bad")
            return None
        finally:
            screen.model.busy = ""
            screen.redraw()
            screen.poll_soon()


def _applied(answer: Json, revert_after_s: float | None) -> str:
    changed = ", ".join(
        f"{k} {value(v.get('from'))}→{value(v.get('to'))}" for k, v in (answer.get("changed") or {}).items()
    )
    text = f"rev {answer.get('rev')}: {changed or 'nothing changed'}"
    if pending := answer.get("pending"):
        text += f"   waits for {', '.join(pending)}"
    return text + (f"   takes itself back in {revert_after_s:g} s" if revert_after_s else "")
