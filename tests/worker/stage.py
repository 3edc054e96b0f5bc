"""One worker on a stage: its own scheduler, sender and receiver, no model, no threads; router and peers are played.

1. `tell(peer, message)` is a message of that peer; what the worker answers is in `peer.heard` at once.
2. `step()` is one step of the engine; a sampled token is always 7.
3. `wait(seconds)` moves the one clock and lets the timers look at it.
4. Chunks that prefill posts stay in `wire.posts` until `all_sent`; decode gets chunks by `chunk`.
"""

from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch

from server.boot import Boot
from server.config import Config
from server.decode import DecodeWorker
from server.engine.block_pool import BlockPool
from server.engine.engine import Engine
from server.engine.kv_cache import KVCachePool, KVSpec
from server.engine.limits import Limits
from server.engine.model_runner import Launched
from server.engine.scheduler import Scheduler
from server.knobs import turned
from server.messages import (
    AnyMessage,
    Card,
    ChunkTag,
    Decode,
    Done,
    Grant,
    GrantRequest,
    Prefill,
    SeqToken,
    SlotCredit,
    Tokens,
)
from server.prefill import PrefillWorker
from server.sequence import Batch, SamplingParams, SeqId, Stuck, Token
from server.transfer.base import Arrived, Sent
from server.transfer.build import ReceivingSide, SendingSide
from server.transfer.checksum import Xxh3
from server.transfer.receiver import Receiver
from server.transfer.ring import LandingRing
from server.transfer.sender import Sender
from server.wire import Identity
from server.worker import Worker
from tests.transfer.world import Clock, Wire

BLOCK, NUM_BLOCKS, NUM_SLOTS = 16, 64, 8
SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32, block_size=BLOCK)
PROMPT = list(range(3, 43))  # 40 tokens: two blocks and a partial one
PARAMS = SamplingParams(max_tokens=8, temperature=0.0)
TOKEN = Token(7)
LEASE_S = 10.0
AHEAD_S = 0.25

M = TypeVar("M")
W = TypeVar("W", bound=Worker[Any])


class Peer:
    """A connection whose other end the test plays."""

    def __init__(self, name: str, role: str) -> None:
        self.peer = Identity(name, role, f"{name}-instance")
        self.card: Card | None = Card({}, {"kv_slot_bytes": SPEC.block_bytes})
        self.heard: list[AnyMessage] = []
        self.is_closed = False

    def send(self, message: AnyMessage) -> None:
        self.heard.append(message)

    def abort(self) -> None:
        self.is_closed = True

    def take(self, kind: type[M]) -> list[M]:
        """Messages of `kind` since the last look; everything else is kept."""
        found = [message for message in self.heard if isinstance(message, kind)]
        self.heard = [message for message in self.heard if not isinstance(message, kind)]
        return found


class Inline:
    """A transfer thread that does at once what it is called for."""

    def __init__(self, side: Any) -> None:
        self._side = side

    def start(self) -> None: ...

    def call(self, fn: Any, *args: Any) -> None:
        fn(*args)

    def connect_peer(self, peer: str, offer: Any) -> None:
        self._side.connect_peer(peer, offer)

    def peer_gone(self, peer: str, reason: str) -> None:
        self._side.peer_gone(peer)

    def counters(self) -> dict[str, float]:
        return dict(self._side.counters)


class Runner:
    """Computes nothing."""

    max_len = 4096
    is_async = False

    def __init__(self) -> None:
        self.pool = KVCachePool(SPEC, NUM_BLOCKS)

    def launch(self, batch: Batch) -> Launched:
        tokens: list[Token | Stuck | None] = [TOKEN if piece.samples else None for piece in batch.slices]
        return Launched(lambda: tokens, lambda: True)


class IdleThread:
    busy_s = 0.0

    def wake(self) -> None: ...


class Stage(Generic[W]):
    """`router` and the peers of `make` are connected."""

    def __init__(self, worker: W, clock: Clock, limits: Limits) -> None:
        self.worker, self.clock = worker, clock
        self.engine = Engine(Scheduler(limits, BlockPool(NUM_BLOCKS, BLOCK, True), clock), Runner(), clock)  # type: ignore[arg-type]
        worker.clock, worker.engine = clock, self.engine
        worker.thread = IdleThread()  # type: ignore[assignment]
        worker.facts = {}
        worker.soon = lambda work, *args: work(*args)  # type: ignore[method-assign]
        worker.start_transfer()
        self.router = self.join(Peer("router", "router"))

    def join(self, peer: Peer) -> Peer:
        self.worker.channels.add(peer)  # type: ignore[arg-type]
        self.worker.joined(peer)  # type: ignore[arg-type]
        return peer

    def lose(self, peer: Peer) -> None:
        self.worker.channels.discard(peer)  # type: ignore[arg-type]
        self.worker.lost(peer)  # type: ignore[arg-type]

    def tell(self, peer: Peer, *messages: AnyMessage) -> None:
        """What a handler raises is the test's to see; a worker would log it and go on."""
        for message in messages:
            handler = self.worker.handlers().get(type(message))
            if handler is None:
                self.worker._handle(peer, message)  # type: ignore[arg-type]
            else:
                handler(peer, message)  # type: ignore[arg-type]

    def step(self) -> None:
        result = self.engine.step()
        if result is not None:
            self.worker._stepped(result)

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.worker.tick(self.clock.now)

    @property
    def num_held(self) -> int:
        """Blocks that anybody holds."""
        self.engine.scheduler.check_integrity()
        return self.engine.scheduler.pool.num_used


def _boot(name: str, folder: Path) -> Boot:
    (folder / "secret").write_bytes(b"x")
    config = Config.model_validate(
        {
            "prefill": {"workers": 1},
            "decode": {"workers": 2},
            "transfer": {"chunk_tokens": 16},
            "hybrid": {"threshold_tokens": 0},
        }
    )
    return Boot(name, config, "", str(folder), str(folder / "secret"), {})


class PrefillStage(Stage[PrefillWorker]):
    """One block a step, one block a chunk; two decode workers with slots to spare."""

    STATES = ("unknown", "waiting", "granted", "running", "pushing", "finished", "ahead", "cut")
    NUM_AHEAD = 3  # outputs of one that runs ahead, or did until it was granted

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wire = Wire()
        monkeypatch.setattr("server.prefill.sending_side", self._side)
        limits = Limits(chunk_tokens=BLOCK, reserves_growth=True)
        super().__init__(PrefillWorker(_boot("prefill-0", folder)), Clock(), limits)
        self.num_ended = 0
        self.decode, self.other = self.join(Peer("decode-0", "decode")), self.join(Peer("decode-1", "decode"))
        for peer in (self.decode, self.other):
            self.tell(peer, SlotCredit(tuple(range(NUM_SLOTS))))

    def _side(self, config: Any, instance: str, blocks: torch.Tensor, spec: Any, **on: Any) -> SendingSide:
        on.pop("on_peer_lost")
        self.sender = Sender(self.wire, blocks, BLOCK, chunk_tokens=BLOCK, max_inflight=16, checksum=True, **on)
        self.wire.chosen = {}  # type: ignore[attr-defined]
        return SendingSide(Inline(self.sender), self.sender, self.wire)  # type: ignore[arg-type]

    def prefill(self, id: SeqId, decode: str = "decode-0") -> None:
        self.tell(self.router, Prefill(id, PROMPT, PARAMS, decode=decode))

    def grant(self, id: SeqId, peer: Peer | None = None, generation: int = 1, resident: int = 0) -> None:
        self.tell(peer or self.decode, Grant(id, generation, resident, LEASE_S))

    def bring(self, id: SeqId, state: str) -> None:
        """`id` into `state`; what was said on the way is forgotten."""
        steps = (
            lambda: self.prefill(id),
            lambda: self.grant(id),
            self.step,
            lambda: (self.step(), self.step()),
            lambda: (self.tell(self.decode, Done(id, "received")), self.all_sent()),
        )
        if state in ("ahead", "cut"):
            self.run_ahead(id)
            steps = steps[1:2]
        for do in steps[: {"ahead": 0, "cut": 1}.get(state, self.STATES.index(state))]:
            do()
        for peer in (self.router, self.decode, self.other):
            peer.heard.clear()

    def run_ahead(self, id: SeqId) -> None:
        """Nobody grants it: three steps for the prompt, and then for more tokens."""
        self.prefill(id)
        self.be_hybrid()
        self.wait(AHEAD_S)
        self.be_hybrid(False)
        for _ in range(2 + self.NUM_AHEAD):
            self.step()

    def be_hybrid(self, is_hybrid: bool = True) -> None:
        self.worker.config = turned(self.worker.boot.config, {"hybrid.threshold_tokens": 256 * is_hybrid})

    def posted(self, instance: str = "decode-0-instance") -> list[int]:
        """First blocks of the chunks that went to that peer."""
        return [tag.first_block for peer, tag, _ in self.wire.posts if peer == instance]

    def all_sent(self) -> None:
        """Everything posted so far is terminal."""
        while self.num_ended < len(self.wire.posts):
            self.num_ended += 1
            self.sender.ended(Sent(self.num_ended))

    def state(self, id: SeqId) -> str:
        entry = self.worker.ledger.get(id)
        if entry is None:
            return "finished" if self.worker.ledger.knew(id) else "unknown"
        state = entry.seq.state.value
        if state == "running" and not entry.seq.needs_grant:
            return "ahead"
        if state == "pushing" and not entry.is_granted and entry.num_told:
            return "cut"
        return "granted" if state == "waiting" and entry.is_granted else state


class DecodeStage(Stage[DecodeWorker]):
    """Up to two prefill workers."""

    STATES = ("unknown", "expected", "receiving", "running", "finished", "cut")
    NUM_AHEAD = 3  # outputs that prefill has when it is granted, of one that is cut

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("server.decode.receiving_side", self._side)
        clock = Clock()
        limits = Limits(chunk_tokens=BLOCK, idle_swap_s=30.0)
        super().__init__(DecodeWorker(_boot("decode-0", folder)), clock, limits)
        self.source = torch.randint(0, 256, (NUM_BLOCKS, SPEC.block_bytes), dtype=torch.uint8)
        self.prefill = self.join(Peer("prefill-0", "prefill"))
        (credit,) = self.prefill.take(SlotCredit)
        self.slots = list(credit.slots)

    def _side(
        self, config: Any, instance: str, blocks: torch.Tensor, spec: Any, max_peers: int, **on: Any
    ) -> ReceivingSide:
        on.pop("on_peer_lost")
        self.ring = LandingRing(NUM_SLOTS * SPEC.block_bytes, SPEC.block_bytes, 1, 1)
        self.receiver = Receiver(self.ring, blocks, checksum=True, clock=self._now, **on)
        return ReceivingSide(Inline(self.receiver), self.receiver, self.ring, Wire(), {})  # type: ignore[arg-type]

    def _now(self) -> float:
        return self.clock.now

    def expect(self, id: SeqId) -> None:
        self.tell(self.router, Decode(id, PROMPT, PARAMS, prefill="prefill-0"))

    def ask(self, id: SeqId) -> None:
        self.tell(self.prefill, GrantRequest(id, len(PROMPT)))

    def token0(self, id: SeqId) -> None:
        self.outputs(id, 0, 1)

    def outputs(self, id: SeqId, first: int, stop: int) -> None:
        """Prefill tells outputs [first, stop)."""
        self.tell(self.prefill, Tokens(tuple(SeqToken(id, index, TOKEN) for index in range(first, stop))))

    def chunk(self, id: SeqId, block: int, *, generation: int = 0, flip: bool = False) -> None:
        """Block `block` of the sequence arrives whole in the next credited slot, under the grant that it has now."""
        entry = self.worker.ledger.get(id)
        generation = generation or (entry.seq.generation if entry is not None else 1)
        slot = self.slots.pop(0)
        data = self.source[block]
        peer = self.prefill.peer.instance
        assert self.ring.begin_write(peer, slot, data.numel()) == ""
        self.ring.data[slot].copy_(data)
        self.ring.data[slot, 5] ^= flip
        self.ring.landed(peer, slot)
        tag = ChunkTag(id, generation, slot, block, 1, data.numel(), Xxh3(data.numel())([data]))
        self.receiver.arrived(Arrived(peer, tag))
        self.slots += [slot for credit in self.prefill.take(SlotCredit) for slot in credit.slots]

    def wait(self, seconds: float) -> None:
        super().wait(seconds)
        self.receiver.tick(self.clock.now)

    def bring(self, id: SeqId, state: str) -> None:
        """`id` into `state`; what was said on the way is forgotten."""
        stop = self.STATES.index("receiving" if state == "cut" else state)
        steps = (
            lambda: self.expect(id),
            lambda: self.ask(id),
            lambda: ([self.chunk(id, block) for block in range(3)], self.token0(id), self.step()),
            lambda: [self.step() for _ in range(PARAMS.max_tokens)],
        )
        for do in steps[:stop]:
            do()
        if state == "cut":
            self.outputs(id, 0, self.NUM_AHEAD)
        for peer in (self.router, self.prefill):
            peer.heard.clear()

    def state(self, id: SeqId) -> str:
        entry = self.worker.ledger.get(id)
        if entry is None:
            return "finished" if self.worker.ledger.knew(id) else "unknown"
        state = entry.seq.state.value
        return "cut" if state == "receiving" and entry.seq.output else state

    @property
    def slots_are_back(self) -> bool:
        return sorted(self.slots) == list(range(NUM_SLOTS))
