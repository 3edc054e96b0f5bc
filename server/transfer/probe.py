"""What the transports of this machine give, measured between two processes: `python -P -m server.transfer.probe`.

One JSON object on stdout: for each transport why it is missing, or seconds and bytes/s for each size from post to
arrival; what a plain copy of the same bytes takes; what the codecs cost and save. It takes about five seconds.
"""

import json
import multiprocessing as mp
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from server.errors import PdctlError
from server.messages import ChunkTag
from server.sequence import SeqId
from server.transfer.base import Arrived, Offer, PeerGone
from server.transfer.codec import Codec
from server.transfer.nixl import NixlTransport
from server.transfer.nixl_agent import why_missing
from server.transfer.ring import LandingRing
from server.transfer.tcp import TcpTransport

SIZES = {"64KiB": 64 * 2**10, "1MiB": 2**20, "64MiB": 64 * 2**20}
_ROUNDS = {"64KiB": 40, "1MiB": 20, "64MiB": 5}
_TRANSPORTS: dict[str, type[NixlTransport] | type[TcpTransport]] = {"nixl": NixlTransport, "tcp": TcpTransport}
_WAIT_S = 20.0


def _receive(name: str, pipe: Connection) -> None:
    """The other process: takes chunks and says so."""
    torch.set_num_threads(1)
    largest = max(SIZES.values())
    ring = LandingRing(2 * largest, largest, 1, 1)
    transport = _TRANSPORTS[name]("receiver", ring=ring)
    pipe.send((transport.offer(), ring.assign("sender")))
    while not pipe.poll():
        for event in transport.poll(0.5):
            if isinstance(event, Arrived):
                ring.credit(event.peer, event.tag.slot)
                pipe.send(event.tag.num_bytes)
    transport.close()


def measure(name: str) -> dict[str, dict[str, float]]:
    """{size: {"ms", "MBps"}}, medians. Raises PdctlError."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_receive, args=(name, theirs), daemon=True)
    child.start()
    transport = _TRANSPORTS[name]("sender")
    source = torch.randint(0, 256, (max(SIZES.values()),), dtype=torch.uint8)
    transport.register(source)
    try:
        if not ours.poll(_WAIT_S):
            raise PdctlError(f"{name}: the receiving process did not start")
        offer: Offer
        offer, slots = ours.recv()
        transport.connect("receiver", offer)
        return {label: _size(transport, ours, source[:size], slots[0], _ROUNDS[label]) for label, size in SIZES.items()}
    finally:
        transport.close()
        ours.send("over")
        child.join(5.0)
        child.kill()


def _size(
    transport: NixlTransport | TcpTransport, pipe: Connection, piece: torch.Tensor, slot: int, rounds: int
) -> dict[str, float]:
    tag = ChunkTag(SeqId("probe", 0, 0), 0, slot, 0, 1, piece.numel(), 0)
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        transport.post("receiver", tag, [piece])
        while not pipe.poll():
            lost = [event for event in transport.poll(0.0002) if isinstance(event, PeerGone)]
            if lost or time.perf_counter() - start > _WAIT_S:
                raise PdctlError(f"{transport.name}: {lost[0].reason if lost else 'nothing arrived'}")
        times.append(time.perf_counter() - start)
        pipe.recv()
    seconds = statistics.median(times[2:])
    return {"ms": round(seconds * 1e3, 3), "MBps": round(piece.numel() / seconds / 1e6, 1)}


def _rate(work: Callable[[], object], num_bytes: int) -> float:
    """MB/s, the median of five."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return round(num_bytes / statistics.median(times) / 1e6, 1)


def codec(name: str) -> dict[str, float]:
    """On a chunk of 1 MiB of bf16 numbers as wide as KV is."""
    blocks = torch.randn(64, 8192).to(torch.bfloat16).view(torch.uint8)
    made = Codec(name, torch.bfloat16, 1024)
    target = torch.zeros(blocks.numel(), dtype=torch.uint8)
    ids = list(range(64))
    code, size = made.encode(blocks, ids, target)
    return {
        "ratio": round(size / blocks.numel(), 3),
        "encode_MBps": _rate(lambda: made.encode(blocks, ids, target), blocks.numel()),
        "decode_MBps": _rate(lambda: made.decode(code, target[:size], blocks.numel()), blocks.numel()),
    }


def main() -> None:
    torch.set_num_threads(1)
    source = torch.ones(max(SIZES.values()), dtype=torch.uint8)
    target = torch.zeros_like(source)
    result: dict[str, Any] = {"copy_MBps": _rate(lambda: target.copy_(source), source.numel()), "transports": {}}
    for name in _TRANSPORTS:
        missing = why_missing() if name == "nixl" else ""
        try:
            result["transports"][name] = {"missing": missing} if missing else measure(name)
        except PdctlError as error:
            result["transports"][name] = {"missing": error.message}
    result["codecs"] = {name: codec(name) for name in ("zstd", "fp8")}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
