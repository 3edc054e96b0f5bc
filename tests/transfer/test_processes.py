"""The writing end is a real process: stopped, woken up too late, killed, and come back as another."""

import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from server.sequence import SeqId
from server.transfer.base import Offer
from server.transfer.nixl import NixlTransport
from server.transfer.receiver import Receiver
from server.transfer.ring import LandingRing
from server.transfer.sender import Sender
from server.transfer.tcp import TcpTransport
from server.transfer.thread import TransferThread
from tests.transfer.world import BLOCK_BYTES, BLOCK_SIZE, NUM_BLOCKS, WAIT_S, Box, random_pool, seq, until

END = {"tcp": TcpTransport, "nixl": NixlTransport}
SLOTS, CHUNK_BLOCKS = 4, 4
SEEDS = {"P": 1, "P-restarted": 2, "Q": 3}  # of the pools that they send from


def sending(kind: str, instance: str, offer: Offer, slots: tuple[int, ...], pipe: Connection) -> None:
    """The process. It takes (method of Sender, arguments) and tells what its callbacks hear."""
    torch.set_num_threads(1)
    transport = END[kind](instance)
    sender = Sender(
        transport,
        random_pool(SEEDS[instance]),
        BLOCK_SIZE,
        chunk_tokens=CHUNK_BLOCKS * BLOCK_SIZE,
        max_inflight=16,
        checksum=True,
        on_released=lambda id: pipe.send(("released", id)),
        on_failed=lambda id, reason: pipe.send(("failed", id)),
    )
    thread = TransferThread(transport, sender=sender, on_peer_lost=lambda peer, reason: pipe.send(("lost", peer)))
    thread.start()
    thread.run(sender.connect_peer, "D", offer, timeout_s=WAIT_S)
    thread.run(sender.credit, "D", slots, timeout_s=WAIT_S)
    while (order := pipe.recv()) is not None:
        thread.run(getattr(sender, order[0]), *order[1:], timeout_s=WAIT_S)
        pipe.send(("done", order[0]))
    thread.close()


class Writer:
    def __init__(self, decode: "DecodeEnd", instance: str) -> None:
        slots = decode.thread.run(decode.receiver.peer_joined, instance)
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        args = (decode.kind, instance, decode.transport.offer(), slots, theirs)
        self.process = context.Process(target=sending, args=args, daemon=True)
        self.process.start()
        decode.writers[instance] = self

    def tell(self, *order: Any) -> None:
        self.pipe.send(order)
        self.hear("done")

    def hear(self, what: str) -> None:
        while self.pipe.poll(WAIT_S):
            if self.pipe.recv()[0] == what:
                return
        raise AssertionError(f"never heard: {what}")

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)


class DecodeEnd:
    """A pool that nobody has written yet, behind a ring of four slots for each of two peers."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.ring = LandingRing(2 * SLOTS * CHUNK_BLOCKS * BLOCK_BYTES, BLOCK_BYTES, CHUNK_BLOCKS, 2)
        self.pool = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8)
        self.transport = END[kind]("D", ring=self.ring)
        self.heard = Box()
        self.writers: dict[str, Writer] = {}
        self.receiver = Receiver(
            self.ring,
            self.pool,
            checksum=True,
            on_complete=lambda id, stats: self.heard.put("complete", id),
            on_missing=lambda id, ranges: self.heard.put("missing", id, ranges),
            on_failed=lambda id, prefix: self.heard.put("failed", id, prefix),
            on_credit=self._credit,
            wake=self.transport.wake,
        )
        self.thread = TransferThread(self.transport, receiver=self.receiver)
        self.thread.start()

    def _credit(self, peer: str, slots: tuple[int, ...]) -> None:
        if peer in self.writers:
            self.writers[peer].pipe.send(("credit", "D", slots))

    def grant(self, id: SeqId, writer: str, table: list[int], generation: int = 1) -> None:
        self.receiver.open(id, writer, generation, table, 0, len(table))
        self.writers[writer].tell("open", id, "D", generation, table, len(table) * BLOCK_SIZE, 0)

    def freeze(self, then: Callable[[], None]) -> threading.Event:
        """Its thread stands still until the event is set; `then` comes before anything that arrived meanwhile."""
        thaw = threading.Event()
        self.thread.call(lambda: (thaw.wait(WAIT_S), then()))
        return thaw

    def same(self, writer: str, table: list[int]) -> bool:
        return torch.equal(random_pool(SEEDS[writer])[table], self.pool[table])

    def close(self) -> None:
        for writer in self.writers.values():
            writer.end()
        assert self.thread.close(WAIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tcp", "nixl"])
def test_stopped_woken_killed_restarted(kind: str) -> None:
    d = DecodeEnd(kind)
    table = list(range(10, 26))
    try:
        p, q = Writer(d, "P"), Writer(d, "Q")
        # 1. P has four chunks under way when it is stopped: posted, and not taken by D yet.
        d.grant(seq(1), "P", table)
        thaw = d.freeze(then=lambda: d.thread._disconnect("P", "fell silent"))
        p.tell("push", seq(1), len(table))
        p.signal(signal.SIGSTOP)
        # 2. D gives P up. The blocks go to a sequence of Q, which completes.
        thaw.set()
        assert d.heard.get("failed")[1] == seq(1)
        d.grant(seq(2), "Q", table)
        q.tell("push", seq(2), len(table))
        assert d.heard.get("complete")[1] == seq(2)
        assert d.same("Q", table)
        # 3. P wakes up and its writes land, or what is left of them: in slots of nobody. The text of Q is unharmed.
        p.signal(signal.SIGCONT)
        p.hear("lost")
        until(lambda: d.ring.counts().quarantined == 0, what="P's slots are quiet")
        assert d.same("Q", table)
        # 4. P is killed in the middle of another transfer; what was verified is known.
        p.end()
        again = Writer(d, "P-restarted")
        d.grant(seq(3), "P-restarted", table)
        again.tell("push", seq(3), 4)
        until(lambda: d.receiver.counters["received"] >= 5, what="its first chunk")
        again.signal(signal.SIGKILL)
        failed = d.heard.get("failed")
        assert failed[1:] == (seq(3), 4)
        assert d.same("P-restarted", table[:4])
        # 5. Nothing leaked: every slot is free or Q's.
        d.thread.run(d.receiver.peer_gone, "P-restarted")
        until(lambda: d.ring.counts().free == SLOTS, what="its slots are free")
        d.ring.check_integrity()
        assert not d.receiver.is_busy
        assert d.thread.counters()["errors"] == 0
    finally:
        d.close()
