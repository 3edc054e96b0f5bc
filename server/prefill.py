"""The prefill worker: reads prompts, hands their KV to a decode worker, and says the first token.

    WAITING   the router's Prefill is here. The next few in line ask their decode worker for a grant (GrantRequest).
    (ahead)   no grant for `hybrid.ahead_s`, and nothing else to do: RUNNING as if all of it were to be done here. With
              the grant it stops, PUSHING; decode is told all its tokens and grants anew (adr/0011).
    (granted) Grant is here; the scheduler admits the sequence once all of its own blocks are free.
    RUNNING   after each compute chunk its finished blocks go to the transfer thread while the next one is computed.
    PUSHING   token 0 went to the router and to the decode worker; blocks stay until decode says Done(received), so that
              a lost chunk can be sent again.
    FINISHED  no post reads the blocks any more, and they are free.

A decode worker that is lost, at whatever moment, takes nothing of the prompt with it: what is computed stays here for
HOLD_S. The router names another one by a second Prefill; that one grants anew and gets everything from here.

One connection to each decode worker carries control messages; its end ends the transfer path too, and is made anew.
"""

import asyncio
import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from server.boot import Boot
from server.engine.engine import StepResult
from server.engine.model_runner import ModelRunner
from server.engine.scheduler import Step
from server.errors import HandshakeRefused, PdctlError, PeerLost, ProtocolError
from server.ledger import Entry
from server.messages import (
    Abort,
    Done,
    Grant,
    GrantRequest,
    LinkState,
    Load,
    Peers,
    Prefill,
    Renew,
    SeqToken,
    SlotCredit,
    Tokens,
)
from server.pool_worker import PoolWorker
from server.sequence import Batch, SeqId, SeqState, Sequence, Token
from server.transfer.build import sending_side
from server.wire import Channel, connect, greet
from server.worker import main

HOLD_S = 10.0  # blocks without a decode worker to take them
# Grants asked for or held before admission: more while decode is under its low marks, so that it never runs dry.
AHEAD, AHEAD_DRY = 4, 8
RELINK_S = (0.1, 2.0)

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PrefillEntry(Entry):
    """`decode` names the decode worker ("": the whole sequence is computed here), `link` leads there while it lives."""

    decode: str = ""
    link: Channel | None = None
    deadline: float = math.inf  # of the lease; without a grant, of what is held for whoever grants next
    lease_s: float = 0.0
    renewed: float = 0.0
    is_asked: bool = False
    is_granted: bool = False
    asked_at: float = math.inf  # and no grant since; from when it runs ahead there is nothing to wait for
    is_opened: bool = False  # the sender knows it
    outputs: list[Token] = field(default_factory=list)  # token 0; of one that ran ahead, those after it too
    num_told: int = 0  # of them to decode
    is_handed_over: bool = False  # all of them are there, and it has blocks for their KV
    is_received: bool = False  # decode has every block; may be known before the loop here hears of token 0


class PrefillWorker(PoolWorker[PrefillEntry]):
    """Adds grants and pushes to a worker."""

    role = "prefill"

    def __init__(
        self, boot: Boot, clock: Callable[[], float] = time.monotonic, runner: ModelRunner | None = None
    ) -> None:
        super().__init__(boot, clock, runner)
        self.links: dict[str, Channel] = {}
        self.peers: dict[str, str] = {}  # decode workers that there are, linked or not
        self.counters |= {"prefetched_blocks": 0, "lease_expired": 0, "regranted": 0, "ran_ahead": 0, "cuts": 0}
        self._refusals: dict[str, str] = {}  # by decode worker: which card fields differ

    def handlers(self) -> dict[type, Callable[[Channel, Any], None]]:
        return super().handlers() | {
            Grant: self.on_grant,
            SlotCredit: self.on_credit,
            Done: self.on_done,
            Peers: self.on_peers,
            Renew: self.on_renew,
        }

    # -- links to decode workers ---------------------------------------------------------------------------------

    def start_transfer(self) -> None:
        pool = self.engine.runner.pool
        side = sending_side(
            self.boot.transfer,
            self.me.instance,
            pool.blocks,
            pool.spec,
            on_released=self._released,
            on_failed=lambda id, reason: self.soon(self._push_failed, id, reason),
            on_peer_lost=lambda peer, reason: self.soon(self._path_lost, peer, reason),
        )
        self.transfer, self.sender, self.transport = side.thread, side.sender, side.transport
        self.offer = side.transport.offer()
        self.engine.before_execute = self.scheduled
        self.transfer.start()

    def load(self, busy_share: float) -> Load:
        load = super().load(busy_share)
        links = {name: self._link_state(channel.peer.instance) for name, channel in self.links.items()}
        refused = {name: LinkState("", f"refused: {why}", "none", 0, 0.0) for name, why in self._refusals.items()}
        known = {name: link for name, link in links.items() if link is not None}
        return msgspec.structs.replace(load, links=refused | known)

    def _link_state(self, instance: str) -> LinkState | None:
        chosen, known = self.transport.chosen.get(instance), self.sender.link(instance)
        if chosen is None or known is None:
            return None
        link, codec = known
        return LinkState(*chosen, codec, link.bytes, round(link.seconds, 6))

    def turn(self) -> None:
        super().turn()
        self.sender.chunk_tokens = self.config.transfer.chunk_tokens
        self.sender.max_inflight = self.config.transfer.max_inflight

    def start_links(self) -> None:
        self._meet({name: address for name, address in self.boot.addresses.items() if name.startswith("decode-")})

    def on_peers(self, channel: Channel, message: Peers) -> None:
        self._meet(message.addresses)

    def _meet(self, addresses: dict[str, str]) -> None:
        new = addresses.keys() - self.peers.keys()
        for name in self.peers.keys() - addresses.keys():
            if (link := self.links.get(name)) is not None:
                link.abort()
        self.peers = dict(addresses)
        for name in sorted(new):
            self.spawn(self._link(name, addresses[name]))

    async def _link(self, name: str, address: str) -> None:
        """Keeps one connection to `name` for as long as it is a peer."""
        delay = RELINK_S[0]
        while self.peers.get(name) == address:
            try:
                channel = await connect(address)
                await greet(channel, self.me, self.secret, self.card())
            except HandshakeRefused as error:
                logger.error("%s refuses this worker: %s", name, error)
                self._refusals[name] = error.message
                delay = RELINK_S[1]
            except (PeerLost, ProtocolError, TimeoutError):
                delay = min(RELINK_S[1], delay * 2)
            else:
                delay = RELINK_S[0]
                self._refusals.pop(name, None)
                await self.converse(channel)
            await asyncio.sleep(delay)

    def joined(self, channel: Channel) -> None:
        super().joined(channel)
        if channel.peer.role == "decode" and channel.card is not None:
            self.links[channel.peer.name] = channel
            self.transfer.connect_peer(channel.peer.instance, channel.card.offer)

    def lost(self, channel: Channel) -> None:
        super().lost(channel)
        if self.links.get(channel.peer.name) is channel:
            del self.links[channel.peer.name]
            self.transfer.peer_gone(channel.peer.instance, "control connection lost")
        for entry in self.ledger:
            if entry.link is channel:
                self._hold(entry)

    def _hold(self, entry: PrefillEntry) -> None:
        """Its decode worker is gone. The router hears of that by itself, and names another one or aborts. One that ran
        ahead is the router's at once: if only the connection is gone, decode has begun it anew, of its own accord and
        not knowing what the client has been told."""
        with self.engine.lock:
            entry.link, entry.deadline, entry.asked_at = None, self.clock() + HOLD_S, math.inf
            entry.is_asked = entry.is_granted = entry.is_handed_over = entry.is_received = False
            is_alone = not entry.seq.needs_grant or len(entry.seq.output) > max(1, entry.num_told)
            entry.num_told = 0
            self.engine.scheduler.ungrant(entry.id)
        if is_alone:
            self.fail(entry, f"{entry.decode} was lost")

    def _path_lost(self, peer: str, reason: str) -> None:
        """The transfer path ended before its control connection: both go, and come back together."""
        for name, channel in list(self.links.items()):
            if channel.peer.instance == peer:
                logger.warning("transfer path to %s ended: %s", name, reason)
                channel.abort()

    # -- WAITING: ask for grants, take them ----------------------------------------------------------------------

    def new_entry(self, seq: Sequence, owner: Channel) -> Entry:
        return PrefillEntry(seq, owner, heard=self.clock())

    def on_prefill(self, channel: Channel, message: Prefill) -> None:
        if not message.decode:
            super().on_prefill(channel, message)
            return
        if self.ledger.knew(message.id):
            self._on_prefill_again(channel, message)
            return
        seq = self.sequence_of(message)
        seq.needs_grant = True
        entry = cast("PrefillEntry", self.new_entry(seq, channel))
        self.ledger.add(entry)
        if self._has_link(entry, message.decode):
            self.admit(entry)
            self._ask()

    def _has_link(self, entry: PrefillEntry, decode: str) -> bool:
        """Whether `decode` can be asked; without a connection the sequence fails."""
        entry.decode, entry.link = decode, self.links.get(decode)
        if entry.link is None:
            self.fail(entry, f"{self.me.name} has no connection to {decode}")
        return entry.link is not None

    def _on_prefill_again(self, channel: Channel, message: Prefill) -> None:
        """Another decode worker takes the place of one that was lost; what is computed is not computed again."""
        entry = self.ledger.get(message.id)
        if entry is None:  # let go already. If it was aborted before it came, nobody listens
            channel.send(Done(message.id, "error", message="its KV is not here any more"))
            return
        if not entry.decode or (message.decode == entry.decode and entry.link is not None):
            return
        if entry.link is not None:  # the router noticed first
            entry.link.send(Abort(entry.id, "another decode worker has it"))
            self._hold(entry)
        if entry.is_dropped or not self._has_link(entry, message.decode):
            return
        self.counters["regranted"] += 1
        with self.engine.lock:
            has_begun = self.engine.scheduler.get(entry.id) is not None
        if has_begun:
            self._ask_for(entry)
        else:
            entry.deadline = math.inf  # it holds nothing, and may wait in line
            self.admit(entry)
            self._ask()

    def _ask(self) -> None:
        with self.engine.lock:
            wanted = self.engine.scheduler.grants_wanted()
        for seq in wanted:
            entry = self.ledger.get(seq.id)
            if entry is not None:
                self._ask_for(entry)

    def _ask_for(self, entry: PrefillEntry) -> None:
        if entry.link is not None:
            entry.is_asked, entry.asked_at = True, self.clock()
            entry.mark("grant_asked", entry.asked_at)
            entry.link.send(GrantRequest(entry.id, len(entry.seq.prompt)))

    def on_grant(self, channel: Channel, message: Grant) -> None:
        entry = self.ledger.get(message.id)
        if entry is None or entry.link is not channel:
            channel.send(Abort(message.id, "not wanted any more"))
        elif message.missing:
            self.transfer.call(self.sender.resend, message.id, message.missing)
        elif not entry.is_granted:
            now, scheduler = self.clock(), self.engine.scheduler
            with self.engine.lock:
                scheduler.limits.ahead = AHEAD_DRY if message.is_low else AHEAD
                if not scheduler.granted(message.id, message.generation, message.num_resident_blocks):
                    return
                entry.is_granted, entry.asked_at = True, math.inf
                entry.lease_s, entry.renewed, entry.deadline = message.lease_s, now, now + message.lease_s
                entry.mark("granted", now)
                if entry.seq.state in (SeqState.RUNNING, SeqState.PUSHING) and self._has_blocks_for(entry):
                    self._push_computed(entry)
            self._hand_over(entry)
            self.wake()

    def _run_ahead(self, entry: PrefillEntry) -> None:
        """Decode is full. Until it is not, the sequence is computed here as on any colocated worker, if that takes
        nothing from those that have grants."""
        with self.engine.lock:
            runs = self.engine.scheduler.run_ahead(entry.id)
            self.engine.copy_blocks()
        if runs:
            entry.deadline = entry.asked_at = math.inf
            self.counters["ran_ahead"] += "ahead" not in entry.stages
            entry.mark("ahead", self.clock())
            self.wake()
            self._ask()

    def on_renew(self, channel: Channel, message: Renew) -> None:
        """Decode's answer: it holds these grants still."""
        for id in message.ids:
            entry = self.ledger.get(id)
            if entry is not None and entry.link is channel and entry.is_granted:
                entry.deadline = self.clock() + entry.lease_s

    def on_credit(self, channel: Channel, message: SlotCredit) -> None:
        self.transfer.call(self.sender.credit, channel.peer.instance, message.slots)

    # -- RUNNING: push what is computed --------------------------------------------------------------------------

    def stepped(self, result: StepResult) -> None:
        super().stepped(result)
        with self.engine.lock:  # a drop on the control thread comes wholly before or wholly after
            for step in result.steps:
                entry = self._entry(step.seq)
                if entry is not None and entry.is_granted and not entry.is_dropped and self._has_blocks_for(entry):
                    self._push(entry, step)

    def scheduled(self, batch: Batch) -> None:
        """A cached prefix is complete before its sequence's first step is: it crosses while that one computes. What a
        step under way writes is not."""
        for piece in batch.slices:
            seq, entry = piece.seq, self.ledger.get(piece.seq.id)
            if entry is None or entry.link is None or entry.is_opened or entry.is_dropped or not entry.is_granted:
                continue
            if seq.output:  # it ran ahead, gave way and reads all of it again: this grant is for less
                continue
            num_cached = seq.num_computed // self.engine.pool.spec.block_size
            if num_cached > seq.num_resident_blocks:
                self._open(entry, entry.link)
                self.transfer.call(self.sender.push, seq.id, num_cached)
                self.counters["prefetched_blocks"] += num_cached - seq.num_resident_blocks

    def _push(self, entry: PrefillEntry, step: Step) -> None:
        if not entry.is_opened and entry.link is not None:
            self._open(entry, entry.link)
        self.transfer.call(self.sender.push, entry.id, step.ready.stop)

    def _push_computed(self, entry: PrefillEntry) -> None:
        """A grant that came after computing began: the first one was lost with its decode worker, or did not come."""
        seq, size = entry.seq, self.engine.pool.spec.block_size
        is_read = seq.state is SeqState.PUSHING
        if entry.link is not None:
            self._open(entry, entry.link)
            stop = -(-seq.num_to_hand_over // size) if is_read else seq.num_computed // size
            self.transfer.call(self.sender.push, entry.id, stop)

    @staticmethod
    def _has_blocks_for(entry: PrefillEntry) -> bool:
        """Whether the grant is for all that is to be pushed. The first one is for the prompt: enough until there are
        outputs, and then if it came in time to stop with token 0. A later one is for the outputs told before it."""
        seq = entry.seq
        return not seq.output or (seq.state is SeqState.PUSHING and len(seq.output) in (1, entry.num_told))

    def _open(self, entry: PrefillEntry, link: Channel) -> None:
        entry.is_opened = True
        seq = entry.seq
        self.transfer.call(
            self.sender.open,
            seq.id,
            link.peer.instance,
            seq.generation,
            list(seq.block_table),
            seq.num_to_hand_over,
            seq.num_resident_blocks,
        )

    # -- PUSHING: hand over, let go ------------------------------------------------------------------------------

    def advanced(self, entry: PrefillEntry, step: Step) -> None:
        if not entry.decode:
            super().advanced(entry, step)
            return
        if step.token is None:
            return
        entry.mark("end", self.clock())
        seq = entry.seq
        if step.finished:
            entry.owner.send(Done(seq.id, seq.finish_reason, seq.num_cached, entry.stages))
            self.drop(entry, "ended on prefill")
            return
        entry.outputs.append(step.token)
        self._hand_over(entry)

    def _hand_over(self, entry: PrefillEntry) -> None:
        """Once it is granted, and has stopped: decode is told what it has not been told. If that is more than token 0,
        it grants anew, for the KV of all of them; the sequence is handed over with that grant."""
        seq, outputs = entry.seq, entry.outputs
        if not entry.is_granted or seq.state is not SeqState.PUSHING or len(outputs) < len(seq.output):
            return
        items = tuple(SeqToken(entry.id, i, outputs[i]) for i in range(entry.num_told, len(outputs)))
        entry.num_told = len(outputs)
        if items and entry.link is not None:
            entry.link.send(Tokens(items))
        if items and len(outputs) > 1:
            entry.is_granted, entry.deadline, entry.asked_at = False, math.inf, self.clock()
            return
        if len(outputs) > 1:
            self.counters["cuts"] += 1
            entry.stages["cut"] = len(outputs)
        entry.is_handed_over = True
        entry.owner.send(Done(entry.id, "handed_over", seq.num_cached, entry.stages))
        if entry.is_received:
            self._let_go(entry)

    def after_step(self) -> None:
        self._ask()

    def on_done(self, channel: Channel, message: Done) -> None:
        entry = self.ledger.get(message.id)
        if entry is not None and entry.link is channel:
            entry.is_received = True
            if entry.is_handed_over:
                self._let_go(entry)

    def on_abort(self, channel: Channel, message: Abort) -> None:
        entry = self.ledger.get(message.id)
        if entry is not None and entry.link is channel:
            self._let_go(
                entry
            )  # decode goes on without us, or has been told to stop: no answer to it, none to the router
        else:
            super().on_abort(channel, message)

    def fail(self, entry: PrefillEntry, message: str, reason: str = "error") -> None:
        """The router has decode go on alone, or aborts there itself: an Abort from here would take that from it."""
        entry.is_asked = False
        super().fail(entry, message, reason)

    def drop(self, entry: PrefillEntry, reason: str) -> None:
        if entry.is_asked and entry.link is not None:
            entry.link.send(Abort(entry.id, reason))
        self._let_go(entry)

    def _let_go(self, entry: PrefillEntry) -> None:
        """Ends the sequence here; its blocks follow once no post reads them."""
        with self.engine.lock:
            entry.is_dropped = True
            self.engine.scheduler.abort(entry.id)
        self.ledger.bury(entry.id, self.clock())
        if entry.is_opened:
            self.transfer.call(self.sender.drop, entry.id)
        elif entry.decode:
            self._released(entry.id)
        self.wake()

    def _released(self, id: SeqId) -> None:
        """On any thread: nothing reads the sequence's blocks any more."""
        with self.engine.lock:
            self.engine.scheduler.release(id)
        self.wake()
        self.soon(self._ask)

    def _push_failed(self, id: SeqId, reason: str) -> None:
        entry = self.ledger.get(id)
        if entry is not None:
            logger.warning("%s: %s", id, reason)

    # -- timers --------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        due: dict[Channel, list[SeqId]] = {}
        hybrid = self.config.hybrid
        patience_s = hybrid.ahead_s if hybrid.ahead_s and hybrid.threshold_tokens != 0 else math.inf
        for entry in self.ledger:
            # One that has stopped for its grant holds blocks: it goes on, whatever the threshold is by now.
            if now - entry.asked_at >= (hybrid.ahead_s if entry.num_told else patience_s):
                self._run_ahead(entry)
            if now > entry.deadline:
                self.counters["lease_expired"] += 1
                self.fail(entry, f"{entry.decode} does not answer" if entry.link else "no decode worker took it over")
            elif entry.is_granted and entry.link is not None and now - entry.renewed >= entry.lease_s / 3:
                entry.renewed = now
                due.setdefault(entry.link, []).append(entry.id)
        for channel, ids in due.items():
            channel.send(Renew(tuple(ids)))


if __name__ == "__main__":
    try:
        sys.exit(main(PrefillWorker))
    except PdctlError as error:
        sys.exit(error.message)
