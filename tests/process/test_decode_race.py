"""The control loop of a decode worker and its engine thread, where they could misunderstand each other."""

import threading
from types import SimpleNamespace
from typing import Any, cast

from server.decode import DecodeEntry, DecodeWorker
from server.engine.block_pool import BlockPool
from server.engine.engine import Engine, StepResult
from server.engine.scheduler import Limits, Scheduler
from server.ledger import Ledger
from server.messages import Done, Tokens
from server.sequence import SeqState, Token
from tests.engine.models import make_sequence
from tests.engine.test_engine import FakeRunner


class EagerLock(threading.Condition):
    """As if the engine's thread took the lock whenever it is given back, and stepped until there is nothing to do."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())
        self.engine: Engine | None = None
        self.results: list[StepResult] = []

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        engine, self.engine = self.engine, None
        if engine is not None:
            while (result := engine.step()) is not None:
                self.results.append(result)
            self.engine = engine


class Owner:
    """The router's connection."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_an_engine_that_is_faster_than_the_control_loop() -> None:
    """A sequence of three tokens is over before the loop that started it goes on: all three come, then Done."""
    lock = EagerLock()
    engine = Engine(Scheduler(Limits(), BlockPool(32, 16), lambda: 0.0), cast("Any", FakeRunner()))
    engine.lock = lock
    owner = Owner()
    worker = object.__new__(DecodeWorker)
    worker.engine, worker.clock, worker.channels = engine, lambda: 0.0, set()
    worker.thread = cast("Any", SimpleNamespace(wake=lambda: None))
    worker.ledger = Ledger()
    seq = make_sequence(0, [5] * 20, max_tokens=3)
    seq.state = SeqState.EXPECTED
    entry = DecodeEntry(seq, cast("Any", owner), 0.0, outputs=[Token(9)], is_covered=True)
    worker.ledger.add(entry)
    with lock:
        engine.scheduler.expect(seq)
        assert engine.scheduler.grants_possible() == [seq]

    lock.engine = engine
    worker._start_if_complete(entry)
    assert seq.finish_reason == "length", "the engine was through with it"
    for result in lock.results:
        worker._deliver(result)
    *tokens, done = owner.sent
    assert [(item.index, item.token.id) for message in tokens for item in message.items] == [(0, 9), (1, 7), (2, 7)]
    assert all(isinstance(message, Tokens) for message in tokens)
    assert isinstance(done, Done)
    assert done.reason == "length"
