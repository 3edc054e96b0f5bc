"""A worker without a model: it speaks `wire` on a unix socket and plays prefill, decode or colocated from a script.

1. `reply` gives the output ids for a prompt; the fake cuts them at max_tokens and at stop ids, as an engine would.
2. It answers at once, or, `stepwise`, one token for each permit that a test gives with `step`.
3. What it hears is in `received`, but for probes and heartbeats; `saw` waits for a kind of message, so that tests
   never sleep.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from server.errors import PdctlError
from server.messages import (
    Abort,
    AbortAck,
    AnyMessage,
    Blocks,
    Card,
    Decode,
    Done,
    Heartbeat,
    Load,
    NotResident,
    Peers,
    Prefill,
    SeqToken,
    SetKnobs,
    Tokens,
)
from server.sequence import SeqId, Token
from server.wire import Channel, Identity, serve, welcome

M = TypeVar("M")
Reply = Callable[[list[int]], Sequence[int]]


class FakeWorker:
    def __init__(self, name: str, role: str, folder: Path, secret: bytes, facts: dict[str, str], reply: Reply) -> None:
        self.name = name
        self.role = role
        self.address = f"unix:{folder / name}.sock"
        self.reply = reply
        self.stepwise = False
        self.runs_ahead = False  # the prefill side says more than token 0
        self.goes_wrong = False  # unless it is told the tokens so far, its own are other ones
        self.is_silent = False
        self.error = ""
        self.error_reason = "error"
        self.error_at = 0  # so many tokens come before it
        self.num_cached = 0
        self.stages: dict[str, float] = {}
        self.token0_to_router = True  # whether the decode side repeats token 0
        self.load = Load(0, 0, 0, 0, 0, 100, 10, 0)
        self.received: list[AnyMessage] = []
        self.knobs = SetKnobs(0, {})
        self.confirms = True
        self.blocks = b""  # what it says is cached
        self.is_stale = False  # and is not
        self.restart()
        self._secret = secret
        self._card = Card({**facts, "dtype": "fake"}, {"pid": 4242})
        self._permits = asyncio.Semaphore(0)
        self._heard = asyncio.Condition()
        self._channels: set[Channel] = set()
        self._tasks: dict[SeqId, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None

    def restart(self) -> None:
        """A new instance, as a restarted process is."""
        self._me = Identity.new(self.name, self.role)

    @property
    def instance(self) -> str:
        return self._me.instance

    async def start(self) -> None:
        self._server = await serve(self.address, self._handle)

    async def stop(self) -> None:
        """As a killed process: the socket and every connection are gone."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        for channel in list(self._channels):
            channel.abort()
        if server is not None:
            await server.wait_closed()

    def say(self, message: AnyMessage) -> None:
        for channel in self._channels:
            channel.send(message)

    def step(self, tokens: int = 1) -> None:
        for _ in range(tokens):
            self._permits.release()

    async def saw(self, kind: type[M], count: int = 1) -> list[M]:
        """Messages of `kind`, once there are `count`."""
        async with asyncio.timeout(5), self._heard:
            await self._heard.wait_for(lambda: len(self.heard(kind)) >= count)
        return self.heard(kind)

    def heard(self, kind: type[M]) -> list[M]:
        return [message for message in self.received if isinstance(message, kind)]

    async def _handle(self, channel: Channel) -> None:
        self._channels.add(channel)
        heartbeats = None
        try:
            await welcome(channel, self._me, self._secret, self._card)
            channel.send(self.load)
            channel.send(Blocks(self.blocks, is_all=True))
            heartbeats = asyncio.create_task(self._heartbeats(channel))
            while True:
                await self._take(channel, await channel.recv())
        except PdctlError:
            return
        finally:
            if heartbeats is not None:
                heartbeats.cancel()
            self._channels.discard(channel)

    async def _heartbeats(self, channel: Channel) -> None:
        while True:
            channel.send(Heartbeat(steps=1))
            await asyncio.sleep(0.5)

    async def _take(self, channel: Channel, message: AnyMessage) -> None:
        async with self._heard:
            if isinstance(message, SetKnobs):
                self.knobs = message
            elif not _is_probe(message) and not isinstance(message, Heartbeat | Peers):
                self.received.append(message)
            self._heard.notify_all()
        if isinstance(message, SetKnobs) and self.confirms:
            self.load = msgspec.structs.replace(self.load, rev=message.rev)
            channel.send(self.load)
        elif isinstance(message, Prefill) and message.num_resident and self.is_stale:
            channel.send(NotResident(message.id))
        elif isinstance(message, Prefill | Decode):
            if task := self._tasks.pop(message.id, None):  # a decode worker that goes on alone
                task.cancel()
            self._tasks[message.id] = asyncio.create_task(self._play(channel, message))
        elif isinstance(message, Abort):
            if task := self._tasks.pop(message.id, None):
                task.cancel()
            channel.send(AbortAck(message.id))

    async def _play(self, channel: Channel, message: Prefill | Decode) -> None:
        if _is_probe(message):
            ids, reason = [message.prompt[0]] * 2, "length"
        else:
            ids, reason = self._output(message)
        if self.is_silent and not _is_probe(message):
            return
        if self.error and not _is_probe(message):
            for index, token_id in enumerate(ids[: self.error_at]):
                channel.send(Tokens((SeqToken(message.id, index, self.token(token_id)),)))
            channel.send(Done(message.id, self.error_reason, message=self.error))
            return
        if isinstance(message, Prefill) and message.decode and not self.runs_ahead:
            ids, reason = ids[:1], reason if len(ids) == 1 else "handed_over"
        elif isinstance(message, Decode) and len(ids) == 1:
            return  # the prefill side has told it to drop its grant
        known = message.output if isinstance(message, Prefill) else []
        if self.goes_wrong and not known and not _is_probe(message):
            ids = [token_id + 1 for token_id in ids]
        for index, token_id in enumerate(ids):
            if index < len(known):
                continue
            if self.stepwise and not _is_probe(message):
                await self._permits.acquire()
            if index or self.token0_to_router or isinstance(message, Prefill):
                channel.send(Tokens((SeqToken(message.id, index, self.token(token_id)),)))
        channel.send(Done(message.id, reason, num_cached=self.num_cached, stages=self.stages))

    def _output(self, message: Prefill | Decode) -> tuple[list[int], str]:
        params = message.params
        ids: list[int] = []
        for token_id in self.reply(message.prompt):
            is_stop = token_id in params.stop_token_ids
            if is_stop and len(ids) < params.min_tokens:
                continue
            ids.append(token_id)
            if is_stop:
                return ids, "stop"
            if len(ids) == params.max_tokens:
                return ids, "length"
        return ids, "length"

    @staticmethod
    def token(token_id: int) -> Token:
        return Token(token_id, -0.5, ((token_id, -0.5), (token_id + 1, -1.5)))


def _is_probe(message: AnyMessage) -> bool:
    return isinstance(message, Prefill | Decode) and message.params.max_tokens == message.params.min_tokens == 2
