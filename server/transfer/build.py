"""The two ends of a KV transfer as a profile wants them. Nothing is started here."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from server.config import Transfer
from server.errors import StartError
from server.sequence import SeqId
from server.transfer.base import KVTransport, Offer, Range
from server.transfer.checksum import checksum_name
from server.transfer.codec import BlockSpec, Codec
from server.transfer.either import EitherTransport
from server.transfer.faults import with_faults
from server.transfer.nixl import NixlTransport
from server.transfer.nixl_agent import why_missing
from server.transfer.receiver import Receiver, ReceiveStats
from server.transfer.ring import LandingRing
from server.transfer.sender import Sender
from server.transfer.tcp import TcpTransport
from server.transfer.thread import TransferThread


@dataclass(frozen=True, slots=True)
class SendingSide:
    thread: TransferThread
    sender: Sender
    transport: EitherTransport


@dataclass(frozen=True, slots=True)
class ReceivingSide:
    thread: TransferThread
    receiver: Receiver
    ring: LandingRing
    transport: KVTransport
    offer: Offer


def make_transport(config: Transfer, instance: str, ring: LandingRing | None) -> EitherTransport:
    """What the profile's `transfer.backend` asks for. Raises StartError when that is not to be had."""
    absent = {"nixl": reason} if config.backend != "tcp" and (reason := why_missing()) else {}
    if config.backend == "nixl" and absent:
        raise StartError(
            f"transfer.backend is nixl: {absent['nixl']}", help="pip install 'pdctl[nixl]', or backend tcp"
        )
    ends: list[NixlTransport | TcpTransport] = []
    host = config.host or "127.0.0.1"
    if config.backend != "tcp" and not absent:
        ends.append(NixlTransport(instance, ring=ring, host=host, timeout_s=config.timeout))
    if config.backend == "tcp" or (config.backend == "auto" and not (ring is not None and ring.data.is_cuda)):
        ends.append(TcpTransport(instance, ring=ring, host=host, timeout_s=config.timeout))
    return EitherTransport(ends, absent)


def make_codec(config: Transfer, spec: BlockSpec) -> Codec | None:
    if config.compression == "none":
        return None
    return Codec(config.compression, spec.dtype, spec.block_size * spec.head_dim)


def sending_side(
    config: Transfer,
    instance: str,
    blocks: Tensor,
    spec: BlockSpec,
    *,
    on_released: Callable[[SeqId], None],
    on_failed: Callable[[SeqId, str], None],
    on_peer_lost: Callable[[str, str], None],
) -> SendingSide:
    """`blocks`: uint8 [num_blocks, block_bytes], the pool that is read."""
    transport = make_transport(config, instance, None)
    sender = Sender(
        transport,
        blocks,
        spec.block_size,
        chunk_tokens=config.chunk_tokens,
        max_inflight=config.max_inflight,
        checksum=config.checksum == "full",
        codec=make_codec(config, spec),
        on_released=on_released,
        on_failed=on_failed,
    )
    return SendingSide(
        TransferThread(transport, sender=sender, on_peer_lost=on_peer_lost, device=blocks.device), sender, transport
    )


def receiving_side(
    config: Transfer,
    instance: str,
    blocks: Tensor,
    spec: BlockSpec,
    max_peers: int,
    *,
    on_complete: Callable[[SeqId, ReceiveStats], None],
    on_missing: Callable[[SeqId, tuple[Range, ...]], None],
    on_failed: Callable[[SeqId, int], None],
    on_credit: Callable[[str, tuple[int, ...]], None],
    on_peer_lost: Callable[[str, str], None],
) -> ReceivingSide:
    """`blocks`: uint8 [num_blocks, block_bytes], the pool that verified chunks are copied into."""
    # A one-sided write lands on the device itself, and is verified and copied there; a socket fills host memory.
    device = blocks.device if config.backend != "tcp" and not why_missing() else torch.device("cpu")
    ring = LandingRing(config.ring_bytes, blocks.shape[1], config.chunk_tokens // spec.block_size, max_peers, device)
    transport = with_faults(make_transport(config, instance, ring), ring, os.environ.get("PDCTL_FAULTS", ""))
    receiver = Receiver(
        ring,
        blocks,
        checksum=config.checksum == "full",
        codec=make_codec(config, spec),
        on_complete=on_complete,
        on_missing=on_missing,
        on_failed=on_failed,
        on_credit=on_credit,
        clock=time.monotonic,
        wake=transport.wake,
    )
    thread = TransferThread(transport, receiver=receiver, on_peer_lost=on_peer_lost, device=blocks.device)
    offer = {**transport.offer(), "kv_codec": config.compression, "kv_rank": 0, "kv_checksum": checksum_name(device)}
    return ReceivingSide(thread, receiver, ring, transport, offer)
