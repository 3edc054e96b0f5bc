"""Time: holding a moment, going back and forth, keeping moments as files."""

import time
from pathlib import Path
from typing import Protocol

from pdctl.samples import Writer
from pdctl.snapshot import Snapshot, save_json
from pdctl.tui.frame import Frame
from pdctl.tui.history import History
from pdctl.tui.model import Model
from pdctl.tui.reading import frame
from pdctl.tui.source import ReplaySource, Source
from pdctl.tui.tape import Tape

RECORD_KEPT_S = 86400.0


class Screen(Protocol):
    """What is needed of the app."""

    model: Model
    source: Source

    def say(self, text: str, role: str = "good") -> None: ...
    def show(self, new: Frame) -> None: ...
    def redraw(self) -> None: ...
    def poll_soon(self) -> None: ...


class Deck:
    def __init__(self, screen: Screen, folder: Path) -> None:
        self._screen = screen
        self.folder = folder
        self._writer: Writer | None = None
        source = screen.source
        self.tape = Tape(source.samples if isinstance(source, ReplaySource) else None)

    def add(self, snapshot: Snapshot) -> None:
        self.tape.add(snapshot)
        if self._writer is not None:
            self._writer.add(snapshot)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def pause(self) -> None:
        model = self._screen.model
        model.paused = not model.paused
        if model.paused:
            self.tape.hold(self._screen.source.position if isinstance(self._screen.source, ReplaySource) else None)
            model.scrub, model.scrub_count = self.tape.back, self.tape.count - 1
        else:
            if isinstance(self._screen.source, ReplaySource):
                self._screen.source.seek(self.tape.position)
            model.history.end = None
            self.tape.release()
            self._screen.poll_soon()
        self._screen.redraw()

    def scrub_to(self, back: int) -> None:
        snapshot = self.tape.seek(back)
        model = self._screen.model
        model.scrub = self.tape.back
        if snapshot is None:
            return
        new = frame(snapshot)
        if model.is_replay:
            model.history = History()
            for earlier in self.tape.before(model.window_s):
                model.history.add(frame(earlier))
        model.history.end = new.at
        model.watch.update(new)
        self._screen.show(new)
        self._screen.redraw()

    def save(self, svg: str) -> None:
        snapshot = self.tape.current
        stem = self.folder / f"pdctl-{self._screen.model.name.replace('/', '_')}-{time.strftime('%Y%m%d-%H%M%S')}"
        try:
            stem.with_suffix(".svg").write_text(svg, encoding="utf-8")
            if snapshot is not None:
                save_json(snapshot, stem.with_suffix(".json"))
            self._screen.say(f"saved {stem.name}.svg and .json")
        except OSError as error:
            self._screen.say(f"not saved: {error}", "bad")

    def record(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._screen.say(
                f"recorded into {self._screen.model.recording}: pdctl tui --replay {self._screen.model.recording}"
            )
            self._screen.model.recording = ""
        else:
            file = self.folder / f"pdctl-{self._screen.model.name}-{time.strftime('%Y%m%d-%H%M%S')}.db"
            self._writer, self._screen.model.recording = Writer(file, kept_s=RECORD_KEPT_S), file.name
            self._screen.say(f"recording into {file.name}; ctrl+r ends it")
        self._screen.redraw()
