"""Modal screens: help, one line of input, confirmation by name, apply with reason, alerts.

Each returns a value and changes nothing by itself.
"""

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from pdctl.tui import knob_input
from pdctl.tui.frame import Knob
from pdctl.tui.views.tables import value

Check = Callable[[str], str]  # what is wrong with the text; "" when nothing is

CSS = """
Dialog { align: center middle; background: $background 60%; }
Dialog > Vertical {
    width: 76; max-width: 100%; height: auto; max-height: 100%;
    border: round $accent; background: $surface; padding: 0 1;
}
Dialog.wide > Vertical { width: 118; }
Dialog VerticalScroll { height: auto; max-height: 80vh; scrollbar-size-vertical: 1; }
Dialog .title { text-style: bold; }
Dialog .wrong { color: $error; }
Dialog .hint { color: $foreground-muted; }
Dialog Input { border: round $primary; margin: 0; }
"""


class Dialog(ModalScreen[str | None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "Cancel")]

    def action_cancel(self) -> None:
        self.dismiss(None)


class Text(Dialog):
    """Something to read, that scrolls where it is longer than the screen; any of its keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter,space,q,question_mark,d", "cancel", "Close")]

    def __init__(self, title: str, body: str, *, is_wide: bool = False) -> None:
        super().__init__(classes="wide" if is_wide else None)
        self._title, self._body = title, body

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(self._title, classes="title", markup=False)
            with VerticalScroll():
                yield Static(self._body, markup=False, id="body")
            yield Static("esc closes   ↑ ↓ scroll", classes="hint", markup=False)


class Ask(Dialog):
    """One line, checked while it is typed; enter with something wrong does nothing."""

    def __init__(
        self,
        title: str,
        body: str = "",
        *,
        text: str = "",
        hint: str = "",
        check: Check | None = None,
        empty: bool = False,
    ) -> None:
        super().__init__()
        self._title, self._body, self._text, self._hint = title, body, text, hint
        self._check = check or (lambda _: "")
        self._takes_empty = empty

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(self._title, classes="title", markup=False)
            if self._body:
                yield Static(self._body, markup=False, id="body")
            yield Input(self._text, id="input", select_on_focus=True)
            yield Static("", classes="wrong", markup=False, id="wrong")
            yield Static(self._hint or "enter: ok   esc: leave", classes="hint", markup=False)

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        wrong = self._check(event.value) if event.value or not self._takes_empty else ""
        self.query_one("#wrong", Static).update(f"✗ {wrong}" if wrong else "")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if not self._check(event.value) or (self._takes_empty and not event.value):
            self.dismiss(event.value)


def edit_knob(knob: Knob, staged: object = None) -> Ask:
    now = value(knob.now if staged is None else staged)
    measured = "" if knob.measured is None else f" ({knob.measured})"
    facts = f"now {value(knob.now)}{measured}   boot {value(knob.boot)}   range {knob.range}   applies {knob.applies}"
    body = f"{knob.help}\n{facts}" if knob.help else facts
    return Ask(
        f"{knob.name}  {f'({knob.unit})' if knob.unit else ''}",
        body,
        text=now,
        check=lambda text: knob_input.read(knob, text)[1],
    )


def confirm(action: str, name: str, consequence: str) -> Ask:
    """A worker is named, not pointed at: the row under the cursor may have moved."""

    def check(text: str) -> str:
        return "" if text == name else f"type {name}"

    return Ask(f"{action} {name}?", consequence, hint=f"type {name} and enter   esc: leave", check=check)


def apply(diff: str) -> Ask:
    """Reason, and behind a | after how long the change takes itself back."""
    hint = "enter: apply   esc: leave   end with | 5m to take it back by itself after that time"
    return Ask("Apply with a reason", diff, hint=hint, check=lambda text: split_reason(text)[2], empty=True)


def split_reason(text: str) -> tuple[str, float | None, str]:
    """(reason, revert_after_s, what is wrong)."""
    reason, bar, after = text.rpartition("|")
    if not bar:
        return text.strip(), None, ""
    from server.config import parse_seconds

    try:
        return reason.strip(), float(parse_seconds(after.strip())), ""
    except ValueError as error:
        return reason.strip(), None, str(error)
