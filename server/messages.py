"""The closed set of control messages. docs/protocol.md says who sends each one, in which state, and what follows.

Who talks to whom: the router connects to every worker; a prefill worker connects to every decode worker. A message is
one msgpack frame (`wire`), except ChunkTag, which travels beside its KV bytes on the transfer path.
"""

import msgspec

from server.sequence import SamplingParams, SeqId, Token

NAME_BYTES = 8  # of a block's digest in Blocks: two that are taken for each other cost a NotResident, no more


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, omit_defaults=True):
    """Base of all messages: small, immutable, named by meaning."""


class Card(msgspec.Struct, frozen=True):
    """What two processes must agree on before they work together.

    `same` must be equal key by key (model fingerprint, dtype, layers, block_size, ...); `offer` is what each side can
    do (transports, checksum, slot size), settled by the side that receives. A router fills only the keys it knows.
    """

    same: dict[str, str]
    offer: dict[str, str | int | list[str]] = {}


class Hello(Message, frozen=True):
    """Four of them open every connection: nonce, nonce + proof, proof + card, card. `refused` ends it instead."""

    name: str
    role: str
    instance: str
    nonce: bytes = b""
    proof: bytes = b""
    card: Card | None = None
    refused: str = ""


class Prefill(Message, frozen=True):
    """router -> prefill: read this prompt for decode worker `decode`. Said again with another `decode`: the first one
    is lost, and what is computed of the prompt goes to this one. router -> any worker with `decode` empty: do the whole
    sequence there; a decode worker that expects the sequence already gives up on prefill and goes on alone. `output`:
    what the client has been told of it already. The worker goes on from there."""

    id: SeqId
    prompt: list[int]
    params: SamplingParams
    salt: str = ""
    decode: str = ""
    num_resident: int = 0  # tokens believed to be cached there: with fewer the answer is NotResident
    output: list[int] = []


class NotResident(Message, frozen=True):
    """worker -> router: the blocks that this Prefill counted on are gone; nothing was begun."""

    id: SeqId


class Decode(Message, frozen=True):
    """router -> decode: expect this prompt's KV from prefill worker `prefill`, then go on from token 0."""

    id: SeqId
    prompt: list[int]
    params: SamplingParams
    salt: str = ""
    prefill: str = ""


class GrantRequest(Message, frozen=True):
    """prefill -> decode: this sequence is next in line."""

    id: SeqId
    num_tokens: int


class Grant(Message, frozen=True):
    """decode -> prefill: blocks are reserved; the first `num_resident_blocks` need not be sent. Valid for `lease_s`
    after each Renew. Sent again with `missing` [first, stop) ranges when blocks did not arrive."""

    id: SeqId
    generation: int
    num_resident_blocks: int
    lease_s: float
    missing: tuple[tuple[int, int], ...] = ()
    is_low: bool = False  # decode is under its low marks: prefill may ask further ahead


class Renew(Message, frozen=True):
    """prefill -> decode: these grants are still wanted. The answer, decode -> prefill: these are still held."""

    ids: tuple[SeqId, ...]


class ChunkTag(msgspec.Struct, frozen=True, array_like=True):
    """Travels with KV bytes into ring slot `slot`: blocks [first_block, first_block + num_blocks) of the sequence, as
    tensor-parallel rank `rank` of the writer has them, made `num_bytes` small by `codec` (0: as they are)."""

    id: SeqId
    generation: int
    slot: int
    first_block: int
    num_blocks: int
    num_bytes: int
    checksum: int
    codec: int = 0
    rank: int = 0


class SlotCredit(Message, frozen=True):
    """decode -> prefill: these ring slots may be written (again)."""

    slots: tuple[int, ...]


class SeqToken(msgspec.Struct, frozen=True, array_like=True):
    """Token `token` is output number `index` of sequence `id`. `num_cached`, prefix hits, counts at index 0."""

    id: SeqId
    index: int
    token: Token
    num_cached: int = 0


class Tokens(Message, frozen=True):
    """worker -> router: what one step sampled. prefill -> decode: token 0, the hand-over. Where prefill has run ahead
    of decode's grant, all that it has sampled: decode then grants anew, for the KV of these as well."""

    items: tuple[SeqToken, ...]


class Done(Message, frozen=True):
    """worker -> router: this worker is through with the sequence as far as the client is concerned.
    decode -> prefill: every block is here and verified (the acknowledgement), `reason` "received".

    reason: "handed_over" (prefill: token 0 is out, decode goes on), "stop", "length", "received", "error" (this worker
    cannot go on, with `message`), "refused" (no worker could: the request's own terms leave no token, with `message`).
    `stages`: seconds since this worker heard of the sequence, and counts; see docs/protocol.md.
    """

    id: SeqId
    reason: str
    num_cached: int = 0
    stages: dict[str, float] = {}
    message: str = ""


class Abort(Message, frozen=True):
    """Nobody wants this sequence any more. Always answered by AbortAck, also for unknown ids."""

    id: SeqId
    reason: str = ""


class AbortAck(Message, frozen=True):
    id: SeqId


class Pause(Message, frozen=True):
    """router -> worker: the client does not read what this sequence says. A worker need not heed it."""

    id: SeqId


class Resume(Message, frozen=True):
    """router -> worker: it reads again."""

    id: SeqId


class LinkState(msgspec.Struct, frozen=True):
    """How KV goes to one decode worker: over what and why, and what it has carried (verified there) in which time."""

    transport: str
    why: str
    codec: str
    bytes: int
    seconds: float


class Blocks(Message, frozen=True):
    """worker -> router: prefix blocks that can be hit now, and such that cannot any more, the first NAME_BYTES of each
    digest in a row. `is_all`: what was said before is void."""

    stored: bytes
    removed: bytes = b""
    is_all: bool = False


class SetKnobs(Message, frozen=True):
    """router -> worker: all live knobs as of revision `rev`. Applied at the next step or push; the worker's next Load
    carries the revision, which is the acknowledgement."""

    rev: int
    values: dict[str, int | float | str]


class Peers(Message, frozen=True):
    """router -> prefill: every decode worker there is now, by name. Links to new ones are made, to others ended."""

    addresses: dict[str, str]


class Load(Message, frozen=True):
    """worker -> router, a few times a second: what routing, watermarks and /admin/state need."""

    waiting: int
    running: int
    expected: int
    receiving: int
    pushing: int
    blocks_total: int
    blocks_used: int
    blocks_granted: int
    slots_total: int = 0
    slots_free: int = 0
    over_high: bool = False
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    busy_share: float = 0.0
    counters: dict[str, float] = {}
    integrity: str = ""
    rev: int = 0  # of the last SetKnobs applied
    utilisation: float = -1.0  # of the device, 0..1; -1 unknown
    links: dict[str, LinkState] = {}
    swapped: int = 0
    paused: int = 0
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    is_tight: bool = False  # decoding alone takes longer than slo.tpot_p95, however few decode


class Heartbeat(Message, frozen=True):
    """Any side, from a task that does not wait for the engine. Frozen = `step_age_s` over five times `predicted_s`."""

    steps: int = 0
    step_age_s: float = 0.0
    predicted_s: float = 0.0
    busy: str = ""


AnyMessage = (
    Hello
    | Prefill
    | NotResident
    | Decode
    | GrantRequest
    | Grant
    | Renew
    | SlotCredit
    | Tokens
    | Done
    | Abort
    | AbortAck
    | Pause
    | Resume
    | Blocks
    | SetKnobs
    | Peers
    | Load
    | Heartbeat
)
