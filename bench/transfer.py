"""KV transfer between two pinned processes on this machine, beside a plain socket that moves the same pieces.

    python -m bench.transfer [--transport nixl] [--blocks-per-chunk 4] [--block-bytes 368640] [--cores 0,1]
    python -m bench.transfer --transport nixl --device cuda:0 --target cuda:1 --block-bytes 2097152 --cores ""

Prints one JSON object. Defaults are SmolLM2-135M in bf16: blocks of 16 tokens, chunks of 64 tokens (1.47 MB).
Throughput is 24 sequences of 1024 tokens; latency is one chunk, from `push` to every block verified in the pool. The
plain socket does what any transfer must: sendmsg of the blocks, recv_into a ring, one byte back for latency. For nixl
the comparison is NIXL's own WRITE of the same pieces (bench/raw_nixl.py), in the same run, rounds taken in turn.
"""

import argparse
import json
import multiprocessing as mp
import os
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from bench.raw_nixl import RawNixl
from server.sequence import SeqId
from server.transfer.checksum import Xxh3
from server.transfer.nixl import NixlTransport
from server.transfer.receiver import Receiver
from server.transfer.ring import LandingRing
from server.transfer.sender import Sender
from server.transfer.tcp import TcpTransport
from server.transfer.tcp_path import tune
from server.transfer.thread import TransferThread

RING_BYTES = 64 * 2**20
NUM_SEQUENCES = 24
NUM_SINGLE = 200
ROUNDS = 5
WAIT_S = 60.0


class Shape:
    def __init__(self, args: argparse.Namespace) -> None:
        self.block_bytes: int = args.block_bytes
        self.chunk_blocks: int = args.blocks_per_chunk
        self.seq_blocks = 64
        self.num_blocks = 2 * self.seq_blocks + 1
        self.cores = [int(core) for core in args.cores.split(",") if core]
        self.transport: str = args.transport
        self.device: str = args.device
        self.target: str = args.target or args.device

    @property
    def ring_bytes(self) -> int:
        return max(RING_BYTES, 32 * self.chunk_bytes)

    @property
    def chunk_bytes(self) -> int:
        return self.block_bytes * self.chunk_blocks

    def table(self, number: int) -> list[int]:
        """Not adjacent: as many pieces as blocks, the common case of a pool that has been in use."""
        return [1 + 2 * i + number % 2 for i in range(self.seq_blocks)]


def pin(cores: list[int], index: int) -> None:
    if cores:
        os.sched_setaffinity(0, {cores[index]})
    torch.set_num_threads(1)


def end(shape: Shape, instance: str, ring: LandingRing | None = None) -> TcpTransport | NixlTransport:
    return (NixlTransport if shape.transport == "nixl" else TcpTransport)(instance, ring=ring)


def decode(shape: Shape, has_checksum: bool, pipe: Connection) -> None:
    pin(shape.cores, 1)
    lock = threading.Lock()

    def tell(*message: Any) -> None:
        with lock:
            pipe.send(message)

    ring = LandingRing(shape.ring_bytes, shape.block_bytes, shape.chunk_blocks, 1, shape.target)
    pool = torch.zeros(shape.num_blocks, shape.block_bytes, dtype=torch.uint8, device=shape.target)
    transport = end(shape, "D", ring)
    receiver = Receiver(
        ring,
        pool,
        checksum=has_checksum,
        on_complete=lambda seq_id, stats: tell("complete", seq_id.seq, stats.kv_ready),
        on_missing=lambda seq_id, ranges: tell("missing", seq_id.seq, ranges),
        on_failed=lambda seq_id, prefix: tell("failed", seq_id.seq, prefix),
        on_credit=lambda peer, slots: tell("credit", slots),
    )
    thread = TransferThread(transport, receiver=receiver, device=pool.device)
    thread.start()
    tell("offer", transport.offer(), receiver.peer_joined("P"))
    while (message := pipe.recv()) is not None:
        number, num_blocks = message
        receiver.open(SeqId("bench", number, 0), "P", 1, shape.table(number), 0, num_blocks)
        tell("opened")
    thread.close()


class Prefill:
    """The sending process; a pipe to the decode process stands for the control connection."""

    def __init__(self, shape: Shape, has_checksum: bool) -> None:
        self.shape = shape
        self.told: queue.Queue[tuple[Any, ...]] = queue.Queue()
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.child = context.Process(target=decode, args=(shape, has_checksum, theirs))
        self.child.start()
        transport = end(shape, "P")
        blocks = torch.randint(0, 256, (shape.num_blocks, shape.block_bytes), dtype=torch.uint8, device=shape.device)
        self.sender = Sender(
            transport,
            blocks,
            16,
            chunk_tokens=16 * shape.chunk_blocks,
            max_inflight=16,
            checksum=has_checksum,
            on_released=lambda seq_id: None,
            on_failed=lambda seq_id, reason: self.told.put(("failed", seq_id.seq, reason)),
        )
        self.thread = TransferThread(transport, sender=self.sender, device=blocks.device)
        self.thread.start()
        _, offer, slots = self.pipe.recv()
        self.thread.run(self.sender.connect_peer, "D", offer)
        self.thread.run(self.sender.credit, "D", slots)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        try:
            while True:
                message = self.pipe.recv()
                if message[0] == "credit":
                    self.thread.call(self.sender.credit, "D", message[1])
                else:
                    self.told.put(message)
        except EOFError:
            return

    def open(self, number: int, num_blocks: int) -> SeqId:
        self.pipe.send((number, num_blocks))
        assert self.told.get(timeout=WAIT_S) == ("opened",)
        seq_id = SeqId("bench", number, 0)
        self.thread.run(self.sender.open, seq_id, "D", 1, self.shape.table(number), 16 * num_blocks, 0)
        return seq_id

    def complete(self) -> float:
        message = self.told.get(timeout=WAIT_S)
        assert message[0] == "complete", message
        return float(message[2])

    def throughput(self, first: int) -> float:
        ids = [self.open(first + i, self.shape.seq_blocks) for i in range(NUM_SEQUENCES)]
        start = time.monotonic()
        for seq_id in ids:
            self.thread.call(self.sender.push, seq_id, self.shape.seq_blocks)
        end = max(self.complete() for _ in ids)
        for seq_id in ids:
            self.thread.call(self.sender.drop, seq_id)
        return NUM_SEQUENCES * self.shape.seq_blocks * self.shape.block_bytes / (end - start) / 1e6

    def latency(self, first: int) -> list[float]:
        times = []
        for i in range(NUM_SINGLE):
            seq_id = self.open(first + i, self.shape.chunk_blocks)
            start = time.monotonic()
            self.thread.call(self.sender.push, seq_id, self.shape.chunk_blocks)
            times.append(self.complete() - start)
            self.thread.call(self.sender.drop, seq_id)
        return times

    def close(self) -> None:
        self.pipe.send(None)
        self.child.join(WAIT_S)
        self.thread.close()


def plain_receiver(shape: Shape, port: Any) -> None:
    pin(shape.cores, 1)
    ring = memoryview(bytearray(RING_BYTES // shape.chunk_bytes * shape.chunk_bytes))
    server = socket.create_server(("127.0.0.1", 0))
    port.send(server.getsockname()[1])
    sock, _ = server.accept()
    tune(sock)
    sock.setblocking(True)
    position = 0
    while True:
        got = 0
        while got < shape.chunk_bytes:
            count = sock.recv_into(ring[position + got : position + shape.chunk_bytes])
            if not count:
                return
            got += count
        sock.send(b"x")
        position = (position + shape.chunk_bytes) % len(ring)


def plain(shape: Shape) -> tuple[float, list[float]]:
    """(MB/s with every chunk sent at once, seconds of single chunks) of a bare socket."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=plain_receiver, args=(shape, theirs))
    child.start()
    blocks = torch.randint(0, 256, (shape.num_blocks, shape.block_bytes), dtype=torch.uint8)
    sock = socket.create_connection(("127.0.0.1", ours.recv()))
    tune(sock)
    sock.setblocking(True)
    table = shape.table(0)

    def send(chunk: int) -> None:
        first = chunk * shape.chunk_blocks % shape.seq_blocks
        views = [blocks[block].numpy().data for block in table[first : first + shape.chunk_blocks]]
        while views:
            sent = sock.sendmsg(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if views:
                views[0] = views[0][sent:]

    num_chunks = NUM_SEQUENCES * shape.seq_blocks // shape.chunk_blocks
    rates = [_plain_rate(sock, send, num_chunks, shape.chunk_bytes) for _ in range(3)]
    times = []
    for chunk in range(NUM_SINGLE):
        start = time.monotonic()
        send(chunk)
        sock.recv(1)
        times.append(time.monotonic() - start)
    sock.close()
    child.join(WAIT_S)
    return statistics.median(rates), times


def _plain_rate(sock: socket.socket, send: Callable[[int], None], num_chunks: int, chunk_bytes: int) -> float:
    start = time.monotonic()
    for chunk in range(num_chunks):
        send(chunk)
    got = 0
    while got < num_chunks:
        got += len(sock.recv(4096))
    return num_chunks * chunk_bytes / (time.monotonic() - start) / 1e6


def per_second(fn: Callable[[], object], num_bytes: int) -> float:
    """GB/s of the median of 50 calls."""
    times = []
    for _ in range(50):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return round(num_bytes / statistics.median(times) / 1e9, 2)


def on_one_core(shape: Shape) -> dict[str, float]:
    pin(shape.cores, 0)
    source: Tensor = torch.randint(0, 256, (shape.chunk_bytes,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    checksum = Xxh3(shape.chunk_bytes)
    return {
        "checksum_GBps": per_second(lambda: checksum([source]), shape.chunk_bytes),
        "copy_GBps": per_second(lambda: target.copy_(source), shape.chunk_bytes),
    }


def in_ms(times: list[float]) -> dict[str, float]:
    times = sorted(times)
    return {"p50_ms": round(1e3 * statistics.median(times), 3), "p99_ms": round(1e3 * times[int(len(times) * 0.99)], 3)}


def against_raw_nixl(shape: Shape) -> dict[str, Any]:
    """Five rounds of each, taken in turn, so that whatever else the machine does falls on all alike."""
    blocks = torch.randint(0, 256, (shape.num_blocks, shape.block_bytes), dtype=torch.uint8, device=shape.device)
    num_slots = shape.ring_bytes // shape.chunk_bytes
    core = shape.cores[1] if shape.cores else -1
    raw = RawNixl(blocks, shape.chunk_blocks, num_slots, core, shape.target)
    ends = {"nixl_checksum_off": Prefill(shape, False), "nixl_checksum_full": Prefill(shape, True)}
    rates: dict[str, list[float]] = {name: [] for name in ("nixl_raw", *ends)}
    tables = [shape.table(i) for i in range(NUM_SEQUENCES)]
    for i in range(ROUNDS + 1):
        rates["nixl_raw"].append(raw.throughput(tables))
        for name, prefill in ends.items():
            rates[name].append(prefill.throughput(1000 * (i + 1)))
    raw.close()
    result: dict[str, Any] = {}
    base = statistics.median(rates["nixl_raw"][1:])
    for name, found in rates.items():
        median = statistics.median(found[1:])  # the first is for connections and first touches
        result[name] = {
            "MBps": round(median),
            "of_raw": round(median / base, 3),
            "rounds": [round(r) for r in found[1:]],
        }
    for name, prefill in ends.items():
        result[name] |= in_ms(prefill.latency(100_000))
        prefill.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-bytes", type=int, default=368640)
    parser.add_argument("--blocks-per-chunk", type=int, default=4)
    parser.add_argument("--transport", choices=("tcp", "nixl"), default="tcp")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--target", default="", help="device of the receiving side; default: the same")
    parser.add_argument("--cores", default="0,1")
    shape = Shape(parser.parse_args())
    result: dict[str, Any] = {"chunk_bytes": shape.chunk_bytes, "load_before": os.getloadavg()[0]}
    if shape.device == "cpu":
        result |= on_one_core(shape)
    if shape.transport == "tcp":
        rate, times = plain(shape)
        result["plain_socket"] = {"MBps": round(rate), **in_ms(times)}
        for name, has_checksum in (("tcp_checksum_off", False), ("tcp_checksum_full", True)):
            prefill = Prefill(shape, has_checksum)
            rates = [prefill.throughput(1000 * (i + 1)) for i in range(3)]
            result[name] = {"MBps": round(statistics.median(rates)), **in_ms(prefill.latency(10_000))}
            prefill.close()
    else:
        result |= against_raw_nixl(shape)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
