"""The seam between KV transfer policy and what moves bytes.

A transport carries one chunk into one slot of a peer's landing ring and says so on both sides. It knows nothing of
sequences beyond the tag it carries. All methods but `wake` are called from the one transfer thread.

It is constructed with what it may touch: the landing ring (decode side; it asks the ring before or after each write,
`LandingRing.begin_write` or `landed`) and, where memory must be registered, the source pool (prefill side).

A failed post ends its path: whether the peer has the chunk is unknown, so its slot is in doubt, and a slot in doubt can
only be taken back by ending the endpoint. So SendFailed is always followed by that peer's PeerGone.
"""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from server.messages import ChunkTag


@dataclass(frozen=True, slots=True)
class Sent:
    """Terminal: the transport no longer reads this post's memory and the peer can have the chunk."""

    handle: int


@dataclass(frozen=True, slots=True)
class SendFailed:
    """Terminal as well: the path has ended (PeerGone follows), and the peer may have all, part or none of this post. A
    one-sided write may even be under way still; it can land in slots only that the peer keeps out of use, so that the
    memory it is read from may be used again."""

    handle: int
    reason: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """`tag.slot` of the local ring holds `tag.num_bytes` bytes, claimed by `peer` (its instance id). `began`: when its
    bytes began to come, on this end's clock, as nearly as the transport knows."""

    peer: str
    tag: ChunkTag
    began: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The path to or from `peer` ended. Its posts have been reported SendFailed. `is_quiet`: nothing of it can land any
    more; otherwise that comes as EndpointGone, or never if nobody can prove it."""

    peer: str
    reason: str
    is_quiet: bool = True


@dataclass(frozen=True, slots=True)
class EndpointGone:
    """Nothing of the paths of `peer` that have ended can land any more."""

    peer: str


Event = Sent | SendFailed | Arrived | PeerGone | EndpointGone
Offer = dict[str, str | int | list[str]]
Range = tuple[int, int]  # [first, stop) of blocks


class KVTransport(Protocol):
    """One end of one tensor-parallel rank, which writes to the same rank of a peer. `offer` goes into the model card's
    offer, `connect` takes the peer's: its `kv_rank` says whose address it is (0: the only rank there is)."""

    name: str

    @property
    def counters(self) -> dict[str, float]:
        """For Load and metrics. Read by other threads; the keys never change."""

    def offer(self) -> Offer:
        """Address, key and ring geometry that let a peer write into this end's ring."""

    def register(self, memory: Tensor) -> None:
        """Posts will be made from `memory`. Before the transfer thread starts. Raises StartError."""

    def connect(self, peer: str, offer: Offer) -> None:
        """Opens the path to `peer` (its instance id). Raises TransferError."""

    def disconnect(self, peer: str) -> None:
        """Ends the path, if there is one; its SendFaileds and its PeerGone come with the next `poll`."""

    def post(self, peer: str, tag: ChunkTag, pieces: list[Tensor]) -> int:
        """Starts writing `pieces` (contiguous uint8, in order, `tag.num_bytes` together) into the peer's slot
        `tag.slot`; the tag follows the bytes. Returns a handle for Sent or SendFailed. Never blocks."""

    def poll(self, timeout_s: float) -> list[Event]:
        """What happened since the last call; waits up to `timeout_s` when nothing has."""

    def wake(self) -> None:
        """Makes a waiting `poll` return. From any thread."""

    def close(self) -> None: ...
