"""The decode worker: reserves room, takes a prompt's KV as it is computed elsewhere, writes all tokens but the first.

    EXPECTED   the router's Decode is here; prefill's GrantRequest puts it in line. Under the high mark it is granted.
    RECEIVING  blocks are reserved and granted. Chunks land in the ring, are verified, and copied into the blocks. If
               prefill has run ahead while there was no grant (adr/0011), it tells its outputs, and is granted anew.
    RUNNING    every block is covered and token 0 is here, in either order. It decodes from the next step on.
    FINISHED   a stop, a length or an abort; blocks are free after the last step that used them.

When prefill is lost, its lease runs out or chunks never come, the prompt is computed here from the verified prefix:
this worker has the same model, and the router takes each token from whoever is first. Outputs that the client has seen
are taken as they are, never sampled again.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from server.boot import Boot
from server.engine.model_runner import ModelRunner
from server.errors import PdctlError, TransferError
from server.ledger import Entry
from server.messages import (
    Abort,
    AbortAck,
    Decode,
    Done,
    Grant,
    GrantRequest,
    Load,
    Prefill,
    Renew,
    SeqToken,
    SlotCredit,
    Tokens,
)
from server.pool_worker import PoolWorker
from server.sequence import SeqId, SeqState, Sequence, Token
from server.transfer.build import receiving_side
from server.transfer.receiver import ReceiveStats
from server.wire import Channel
from server.worker import main

LEASE_S = 10.0
PARK_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DecodeEntry(Entry):
    """`source` is prefill's connection once it asked for a grant; `prefill` its name, known from the start."""

    prefill: str = ""
    source: Channel | None = None
    lease: float = 0.0  # deadline; 0 = holds no grant
    outputs: list[Token] = field(default_factory=list)  # prefill's: token 0, and those before its grant came
    is_covered: bool = False


class DecodeWorker(PoolWorker[DecodeEntry]):
    """Adds grants and arrivals to a worker."""

    role = "decode"

    def __init__(
        self, boot: Boot, clock: Callable[[], float] = time.monotonic, runner: ModelRunner | None = None
    ) -> None:
        super().__init__(boot, clock, runner)
        self._parked: dict[SeqId, tuple[float, Channel]] = {}
        self.counters |= {"lease_expired": 0, "recomputed": 0}
        self._is_dry = False

    def handlers(self) -> dict[type, Callable[[Channel, Any], None]]:
        return super().handlers() | {
            Decode: self.on_decode,
            GrantRequest: self.on_grant_request,
            Renew: self.on_renew,
            Tokens: self.on_tokens,
        }

    # -- transfer ------------------------------------------------------------------------------------------------

    def start_transfer(self) -> None:
        pool = self.engine.runner.pool
        side = receiving_side(
            self.boot.transfer,
            self.me.instance,
            pool.blocks,
            pool.spec,
            max(self.boot.max_prefill, self.boot.config.prefill.workers),
            on_complete=lambda id, stats: self.soon(self._covered, id, stats),
            on_missing=lambda id, ranges: self.soon(self._missing, id, ranges),
            on_failed=lambda id, verified: self.soon(self._never_came, id, verified),
            on_credit=lambda peer, slots: self.soon(self._credit, peer, slots),
            on_peer_lost=lambda peer, reason: self.soon(self._path_lost, peer, reason),
        )
        self.transfer, self.receiver, self.ring = side.thread, side.receiver, side.ring
        self.offer = side.offer
        self.transfer.start()

    def joined(self, channel: Channel) -> None:
        super().joined(channel)
        if channel.peer.role == "prefill":
            self.transfer.call(self._join, channel)

    def _join(self, channel: Channel) -> None:
        """On the transfer thread, after what an earlier connection of the same peer left there."""
        try:
            slots = self.receiver.peer_joined(channel.peer.instance)
        except TransferError as error:  # an earlier path's slots are not quiet yet: it comes again, and finds them so
            logger.warning("%s: %s", channel.peer.name, error)
            self.soon(channel.abort)
        else:
            self.soon(channel.send, SlotCredit(slots))

    def lost(self, channel: Channel) -> None:
        super().lost(channel)
        if channel.peer.role != "prefill":
            return
        self.transfer.peer_gone(channel.peer.instance, "control connection lost")
        self._parked = {id: parked for id, parked in self._parked.items() if parked[1] is not channel}
        for entry in self.ledger:
            if entry.source is channel or (entry.source is None and entry.prefill == channel.peer.name):
                self._compute_here(entry)

    def _path_lost(self, peer: str, reason: str) -> None:
        """The transfer path ended before its control connection: both go, and come back together."""
        for channel in list(self.channels):
            if channel.peer.instance == peer:
                logger.warning("transfer path from %s ended: %s", channel.peer.name, reason)
                channel.abort()

    def _credit(self, peer: str, slots: tuple[int, ...]) -> None:
        for channel in self.channels:
            if channel.peer.instance == peer:
                channel.send(SlotCredit(tuple(slots)))

    # -- EXPECTED ------------------------------------------------------------------------------------------------

    def new_entry(self, seq: Sequence, owner: Channel) -> Entry:
        return DecodeEntry(seq, owner, heard=self.clock())

    def on_prefill(self, channel: Channel, message: Prefill) -> None:
        """The whole sequence here; of one that is expected already: prefill failed, go on alone."""
        entry = self.ledger.get(message.id)
        if entry is None:
            super().on_prefill(channel, message)
        else:
            self._compute_here(entry, output=message.output)

    def on_decode(self, channel: Channel, message: Decode) -> None:
        if self._is_known(channel, message.id):
            return
        seq = self.sequence_of(message)
        seq.state = SeqState.EXPECTED
        entry = cast("DecodeEntry", self.new_entry(seq, channel))
        entry.prefill = message.prefill
        self.ledger.add(entry)
        parked = self._parked.pop(message.id, None)
        if parked is not None:
            self._expect(entry, parked[1])

    def on_abort(self, channel: Channel, message: Abort) -> None:
        """Prefill has let go. Whether anybody wants the sequence is its owner's to say, who tells both: until then it
        is computed here."""
        if channel.peer.role != "prefill":
            super().on_abort(channel, message)
            return
        entry = self.ledger.get(message.id)
        if entry is None:
            self._parked.pop(message.id, None)
        elif entry.source is channel or (entry.source is None and entry.prefill == channel.peer.name):
            self._compute_here(entry)
        channel.send(AbortAck(message.id))

    def on_grant_request(self, channel: Channel, message: GrantRequest) -> None:
        entry = self.ledger.get(message.id)
        if entry is not None and entry.lease:
            self._send_grant(entry)
        elif entry is not None and entry.source is None and entry.seq.state is SeqState.EXPECTED:
            self._expect(entry, channel)
        elif entry is None and not self.ledger.knew(message.id):
            self._parked[message.id] = (self.clock(), channel)
        elif entry is None:
            channel.send(Abort(message.id, "ended"))

    def _expect(self, entry: DecodeEntry, source: Channel) -> None:
        entry.source = source
        try:
            with self.engine.lock:
                self.engine.scheduler.expect(entry.seq)
        except PdctlError as error:
            self.fail(entry, error.message)
            return
        self._grant()

    def _grant(self) -> None:
        """Grants what the watermarks allow now. Called whenever something was asked for or given back."""
        with self.engine.lock:
            granted = self.engine.scheduler.grants_possible()
            self.engine.copy_blocks()  # before a chunk can land in them
            self._is_dry = bool(granted) and self.engine.scheduler.is_dry
        for seq in granted:
            entry = self.ledger.get(seq.id)
            if entry is None or entry.source is None:
                continue
            self._receive(entry, entry.source)

    def _receive(self, entry: DecodeEntry, source: Channel) -> None:
        seq = entry.seq
        table, resident = list(seq.block_table), seq.num_resident_blocks
        self.receiver.open(seq.id, source.peer.instance, seq.generation, table, resident, len(table) - resident)
        if entry.outputs:
            self.receiver.token0(seq.id)
        self._send_grant(entry)

    def _grant_again(self, entry: DecodeEntry) -> None:
        """Prefill has run ahead of the grant, which was for the prompt: one for the KV of its outputs too, or none for
        now. The last output has no KV yet: that is read here."""
        self.receiver.revoke(entry.id)
        entry.lease, entry.is_covered = 0.0, False
        with self.engine.lock:
            has_room = self.engine.scheduler.grant_again(entry.id, [token.id for token in entry.outputs[:-1]])
            self.engine.copy_blocks()
        if has_room and entry.source is not None:
            self._receive(entry, entry.source)

    def _send_grant(self, entry: DecodeEntry, missing: tuple[tuple[int, int], ...] = ()) -> None:
        entry.lease = self.clock() + LEASE_S
        seq = entry.seq
        if entry.source is not None:
            entry.source.send(Grant(seq.id, seq.generation, seq.num_resident_blocks, LEASE_S, missing, self._is_dry))

    # -- RECEIVING -----------------------------------------------------------------------------------------------

    def on_renew(self, channel: Channel, message: Renew) -> None:
        """Answered with the grants that are held still: prefill keeps blocks for no others."""
        held: list[SeqId] = []
        for id in message.ids:
            entry = self.ledger.get(id)
            if entry is None or entry.source is not channel:
                channel.send(Abort(id, "no such grant"))
            elif entry.lease:
                entry.lease = self.clock() + LEASE_S
                held.append(id)
        if held:
            channel.send(Renew(tuple(held)))

    def on_tokens(self, channel: Channel, message: Tokens) -> None:
        told: dict[SeqId, DecodeEntry] = {}
        for item in message.items:
            entry = self.ledger.get(item.id)
            if entry is None or not entry.lease or item.index != len(entry.outputs):
                continue
            if item.index != 1 or item.id in told:  # token 0 by itself is all that there is to come
                entry.outputs.append(item.token)
                told[item.id] = entry
        for id, entry in told.items():
            if len(entry.outputs) > 1:
                self._grant_again(entry)
            else:
                self.receiver.token0(id)
                self._start_if_complete(entry)

    def _covered(self, id: SeqId, stats: ReceiveStats) -> None:
        self.receiver.heard(id)
        entry = self.ledger.get(id)
        if entry is None or not entry.lease:
            return
        entry.is_covered = True
        entry.stages |= _stages(stats, entry.heard)
        if entry.source is not None:
            entry.source.send(Done(id, "received"))
        self._start_if_complete(entry)

    def _start_if_complete(self, entry: DecodeEntry) -> None:
        if not entry.outputs or not entry.is_covered:
            return
        entry.lease = 0.0
        entry.mark("ready", self.clock())
        with self.engine.lock:
            self.engine.scheduler.received(entry.id, entry.outputs[-1])
            # Asked with the lock held: without it the engine may have ended the sequence by now, and its tokens come
            # from there.
            has_ended = bool(entry.seq.finish_reason)
        self._repeat_outputs(entry)
        if has_ended:
            self.finish(entry)
        self.wake()

    def _repeat_outputs(self, entry: DecodeEntry) -> None:
        """The router takes each from whoever is first; prefill may have died with them unsent."""
        if entry.outputs:
            entry.owner.send(Tokens(tuple(SeqToken(entry.id, i, token) for i, token in enumerate(entry.outputs))))

    def _missing(self, id: SeqId, ranges: tuple[tuple[int, int], ...]) -> None:
        entry = self.ledger.get(id)
        if entry is not None and entry.lease:
            self._send_grant(entry, tuple(ranges))

    def _never_came(self, id: SeqId, verified: int) -> None:
        """The receiver gave up; it has ended its side of the entry."""
        self.receiver.heard(id)
        entry = self.ledger.get(id)
        if entry is not None and entry.lease:
            if entry.source is not None:
                entry.source.send(Abort(id, "chunks never came"))
            self._compute_here(entry, verified)

    def _compute_here(self, entry: DecodeEntry, verified: int | None = None, output: Iterable[int] = ()) -> None:
        """Goes on without prefill: from the verified prefix, and with the outputs that prefill has told, or the router
        (`output`: what the client knows)."""
        seq, state = entry.seq, entry.seq.state
        known = max([token.id for token in entry.outputs], list(output), key=len)
        if state is SeqState.RECEIVING and entry.lease:  # without one it has everything, or goes on alone already
            if verified is None and not entry.is_covered:
                verified = self.receiver.revoke(entry.id)
            if not known and seq.params.num_prompt_logprobs >= 0:
                verified = 0  # what prefill has read of the prompt's logprobs is lost with it
            self._repeat_outputs(entry)  # before its end, which they may be
            is_as_granted = seq.output == known[:-1]
            with self.engine.lock:
                token = Token(known[-1]) if known and is_as_granted else None
                self.engine.scheduler.recompute(entry.id, verified, token)
                has_ended = bool(seq.finish_reason)
            if has_ended:
                self.finish(entry)
            if not is_as_granted:
                self._begin_again(entry, known)
        elif state is SeqState.EXPECTED:
            self._repeat_outputs(entry)
            self._begin_again(entry, known)
        elif seq.output[: len(known)] != known:  # begun here before the router told what the client knows
            self._begin_again(entry, known)
            return
        else:
            return
        entry.lease = 0.0
        entry.source = None
        entry.stages["recomputed"] = 1.0
        self.counters["recomputed"] += 1
        self.wake()

    def _begin_again(self, entry: DecodeEntry, known: list[int]) -> None:
        """From the prompt and these outputs. Blocks that are verified or computed are found again by their prefix."""
        old = entry.seq
        with self.engine.lock:
            self.engine.scheduler.abort(entry.id)
        entry.seq = Sequence(old.id, old.prompt, old.params, arrival=old.arrival, salt=old.salt, output=known)
        self.admit(entry)

    # -- RUNNING and FINISHED ------------------------------------------------------------------------------------

    def drop(self, entry: DecodeEntry, reason: str) -> None:
        if entry.lease:
            entry.lease = 0.0
            self.receiver.revoke(entry.id)
        super().drop(entry, reason)
        self._grant()

    def after_step(self) -> None:
        self._grant()

    def turn(self) -> None:
        super().turn()
        self._grant()  # a mark may have moved

    def overslept(self, seconds: float) -> None:
        for entry in self.ledger:
            if entry.lease:
                entry.lease += seconds
        self._parked = {id: (since + seconds, channel) for id, (since, channel) in self._parked.items()}

    def tick(self, now: float) -> None:
        for entry in self.ledger:
            if entry.lease and now > entry.lease:
                logger.warning("%s: %s stopped renewing its grant", entry.id, entry.prefill)
                self.counters["lease_expired"] += 1
                self._compute_here(entry)
        for id, (since, channel) in list(self._parked.items()):
            if now - since > PARK_S and id not in self.building:
                del self._parked[id]
                channel.send(Abort(id, "unknown"))
        self._grant()  # an idle sequence gives its blocks away without a step

    def load(self, busy_share: float) -> Load:
        load = super().load(busy_share)
        counts = self.ring.counts()
        counters = {**load.counters, "quarantined_slots": float(counts.quarantined)}
        return msgspec.structs.replace(load, slots_total=counts.total, slots_free=counts.idle, counters=counters)


def _stages(stats: ReceiveStats, heard: float) -> dict[str, float]:
    return {
        "first_chunk": stats.first_chunk - heard,
        "kv_ready": stats.kv_ready - heard,
        "transfer": stats.transfer,
        "kv_bytes": stats.kv_bytes,
        "wire_bytes": stats.wire_bytes,
        "chunks": stats.chunks,
        "resends": stats.resends,
        "overlap": stats.overlap,
    }


if __name__ == "__main__":
    sys.exit(main(DecodeWorker))
