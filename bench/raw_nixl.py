"""NIXL's WRITE and nothing else: the same pieces as a transfer, no checksum, no copy out of the ring, no policy.

Both ends poll, with a short pause when there was nothing: a loop without one is what a busy machine's scheduler puts
last. The target says when all notes are here. What a transfer reaches is compared with this.
"""

import multiprocessing as mp
import time
from multiprocessing.connection import Connection

import torch

from server.transfer.nixl_agent import Agent, WriteState, memory_kind, piece

WAIT_S = 60.0
IN_FLIGHT = 16
_PAUSE_S = 0.00005


def _target(num_bytes: int, core: int, device: str, pipe: Connection) -> None:
    if core >= 0:
        import os

        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    agent = Agent("raw-target")
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    agent.register(memory)
    pipe.send((agent.metadata(), memory.data_ptr(), memory_kind(memory), max(0, memory.get_device())))
    while (num_notes := pipe.recv()) is not None:
        got = 0
        while got < num_notes:
            notes = len(agent.notes())
            got += notes
            if not notes:
                time.sleep(_PAUSE_S)
        pipe.send(time.monotonic())


class RawNixl:
    """`blocks` is the pool; `tables` as the transfer's own, cut into chunks of `chunk_blocks`."""

    def __init__(self, blocks: torch.Tensor, chunk_blocks: int, num_slots: int, core: int, device: str) -> None:
        self.blocks = blocks
        self.chunk_blocks = chunk_blocks
        self.num_slots = num_slots
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        num_bytes = num_slots * chunk_blocks * blocks.shape[1]
        self.child = context.Process(target=_target, args=(num_bytes, core, device, theirs), daemon=True)
        self.child.start()
        self.agent = Agent("raw-source")
        self.agent.register(blocks)
        metadata, self.address, self.kind, self.device = self.pipe.recv()
        self.remote = self.agent.add_remote(metadata)

    def throughput(self, tables: list[list[int]]) -> float:
        """MB/s of all tables."""
        step = self.chunk_blocks
        chunks = [table[i : i + step] for table in tables for i in range(0, len(table), step)]
        self.pipe.send(len(chunks))
        start = time.monotonic()
        under_way: list[object] = []
        for number, chunk in enumerate(chunks):
            under_way = self._poll(under_way)
            while len(under_way) >= IN_FLIGHT:
                time.sleep(_PAUSE_S)
                under_way = self._poll(under_way)
            under_way.append(self._write(chunk, number % self.num_slots))
        while not self.pipe.poll():
            under_way = self._poll(under_way)
            self.agent.notes()
            time.sleep(_PAUSE_S)
        end = float(self.pipe.recv())
        while under_way:
            under_way = self._poll(under_way)
        return sum(map(len, tables)) * self.blocks.shape[1] / (end - start) / 1e6

    def _write(self, chunk: list[int], slot: int) -> object:
        block_bytes = self.blocks.shape[1]
        at = self.address + slot * self.chunk_blocks * block_bytes
        source = [piece(self.blocks[block]) for block in chunk]
        target = [(at + i * block_bytes, block_bytes, self.device) for i in range(len(chunk))]
        return self.agent.write(self.remote, source, memory_kind(self.blocks), target, self.kind, b"note")

    def _poll(self, under_way: list[object]) -> list[object]:
        """They end in order, and each question costs: asks until one is not done."""
        done = 0
        while done < len(under_way) and self.agent.state(under_way[done]) is not WriteState.UNDER_WAY:
            self.agent.release(under_way[done])
            done += 1
        return under_way[done:]

    def close(self) -> None:
        self.pipe.send(None)
        self.child.join(WAIT_S)
        self.agent.close()
