"""One sequence's events in an order that no played worker can force: what is left in its inbox from before."""

import asyncio
from typing import Any, cast

from server.messages import Abort, Decode, Done, Prefill, SeqToken
from server.router.attempt import Attempt, Plan, Route
from server.router.timing import Record
from server.router.worker import Event, Inbox, Lost, Worker
from server.sequence import SamplingParams, SeqId, Token

ID = SeqId("router", 1, 0)
AGAIN = SeqId("router", 1, 1)


class Pen:
    """A worker that only notes what it is told."""

    def __init__(self, name: str, role: str) -> None:
        self.name, self.role, self.instance, self.is_connected = name, role, f"{name} instance", True
        self.crossed_at = 0.0
        self.open: dict[SeqId, Inbox] = {}
        self.told: list[Any] = []
        self.send = self.told.append

    def attach(self, id: SeqId, inbox: Inbox) -> None:
        self.open[id] = inbox

    def detach(self, id: SeqId) -> bool:
        return self.open.pop(id, None) is not None

    def begin_reading(self, num_tokens: int, now: float) -> None: ...

    def end_reading(self, num_tokens: int) -> None: ...


class Sequence:
    def __init__(self) -> None:
        self.prefill, self.decode = Pen("prefill-0", "prefill"), Pen("decode-0", "decode")
        route = Route(cast("Worker", self.decode), cast("Worker", self.prefill))
        self.attempt = Attempt(ID, Plan(route, 3), [7, 8, 9], SamplingParams(max_tokens=4), Record())

    async def hears(self, *events: Event) -> list[int]:
        """The token ids that come of it, up to the end or the next wait."""
        inbox, said = next(iter((self.decode.open or self.prefill.open).values())), []
        for event in events:
            inbox.put_nowait(event)
        try:
            while await asyncio.wait_for(self.attempt.more(), 0.05):
                while (token := self.attempt.next()) is not None:
                    said.append(token.id)
        except TimeoutError:
            pass
        return said


def token(id: SeqId, index: int, token_id: int) -> SeqToken:
    return SeqToken(id, index, Token(token_id))


async def test_another_token_begins_it_again_once() -> None:
    """1. The client has two tokens of prefill's, decode says another. 2. Decode is told those two. 3. That it was lost
    and came back in between was the first try's matter."""
    seq = Sequence()
    async with seq.attempt:
        assert await seq.hears(token(ID, 0, 50), token(ID, 1, 51)) == [50, 51]
        assert await seq.hears(token(ID, 0, 60), Lost(ID, "decode-0", "gone")) == []
        assert [(type(m), m.id) for m in seq.decode.told] == [(Decode, ID), (Abort, ID), (Prefill, AGAIN)]
        assert seq.decode.told[-1].output == [50, 51]
        rest = (token(AGAIN, 2, 52), ("decode-0", Done(AGAIN, "stop")))
        assert await seq.hears(token(ID, 2, 62), *rest) == [52]
    assert seq.attempt.reason == "stop"
    assert not seq.decode.open
    assert not seq.prefill.open


async def test_another_token_after_the_end_changes_nothing() -> None:
    seq = Sequence()
    async with seq.attempt:
        events = (token(ID, 0, 50), token(ID, 1, 51), ("decode-0", Done(ID, "length")), token(ID, 0, 60))
        assert await seq.hears(*events) == [50, 51]
    assert [type(m) for m in seq.decode.told] == [Decode]
    assert seq.attempt.reason == "length"
