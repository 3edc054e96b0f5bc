"""One end of a transfer as a program, for test_netns: `receive HOST CODEC CHUNK_BLOCKS` or `send CODEC CHUNK_BLOCKS`.
JSON lines both ways.

The ring holds a slot for every chunk, so that no credit has to travel back.
"""

import json
import sys
import threading
import time

import torch

from server.sequence import SeqId
from server.transfer.codec import Codec
from server.transfer.receiver import Receiver, ReceiveStats
from server.transfer.ring import LandingRing
from server.transfer.sender import Sender
from server.transfer.tcp import TcpTransport
from server.transfer.thread import TransferThread

BLOCK_BYTES, NUM_BLOCKS = 64 * 1024, 512
ID = SeqId("router", 1, 0)


def pool() -> torch.Tensor:
    values = torch.randn(NUM_BLOCKS, BLOCK_BYTES // 2, generator=torch.Generator().manual_seed(1))
    return values.to(torch.bfloat16).view(torch.uint8)


def codec(name: str) -> Codec | None:
    return None if name == "none" else Codec(name, torch.bfloat16, 1024)


def receive(host: str, name: str, chunk_blocks: int) -> None:
    ring = LandingRing(NUM_BLOCKS * BLOCK_BYTES, BLOCK_BYTES, chunk_blocks, 1)
    blocks, done = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8), threading.Event()
    found: list[ReceiveStats] = []

    def complete(_: SeqId, stats: ReceiveStats) -> None:
        found.append(stats)
        done.set()

    transport = TcpTransport("D", ring=ring, host=host)
    receiver = Receiver(
        ring,
        blocks,
        checksum=True,
        codec=codec(name),
        on_complete=complete,
        on_missing=lambda _, ranges: print(json.dumps({"missing": ranges}), flush=True),
        on_failed=lambda _, prefix: done.set(),
        on_credit=lambda peer, slots: None,
    )
    thread = TransferThread(transport, receiver=receiver)
    receiver.open(ID, "P", 1, list(range(NUM_BLOCKS)), 0, NUM_BLOCKS)
    thread.start()
    print(
        json.dumps({"offer": {**transport.offer(), "kv_codec": name}, "slots": receiver.peer_joined("P")}), flush=True
    )
    done.wait(100)
    stats = found[0]
    error = float((blocks.view(torch.bfloat16).float() - pool().view(torch.bfloat16).float()).abs().max())
    answer = {"transfer": stats.transfer, "kv": stats.kv_bytes, "wire": stats.wire_bytes, "error": error}
    print(json.dumps(answer), flush=True)
    thread.close()


def send(name: str, chunk_blocks: int) -> None:
    start = json.loads(sys.stdin.readline())
    transport = TcpTransport("P")
    sender = Sender(
        transport,
        pool(),
        16,
        chunk_tokens=16 * chunk_blocks,
        max_inflight=16,
        checksum=True,
        codec=codec(name),
        on_released=lambda _: None,
        on_failed=lambda _, reason: print(reason, file=sys.stderr),
    )
    thread = TransferThread(transport, sender=sender)
    thread.start()
    thread.run(sender.connect_peer, "D", start["offer"])
    thread.run(sender.open, ID, "D", 1, list(range(NUM_BLOCKS)), 16 * NUM_BLOCKS, 0)
    thread.run(sender.push, ID, NUM_BLOCKS)
    thread.run(sender.credit, "D", start["slots"], timeout_s=60.0)
    sys.stdin.readline()  # until the test has what it wants
    time.sleep(0.1)
    thread.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "receive":
        receive(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        send(sys.argv[2], int(sys.argv[3]))
