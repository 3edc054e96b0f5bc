"""What a worker tells routers of itself: its load, and which prefix blocks are cached here."""

from collections.abc import Iterable

from server.engine.engine import Engine
from server.engine.scheduler import Scheduler
from server.messages import NAME_BYTES, Blocks, Load


def load_of(engine: Engine, *, looks_closer: bool) -> Load:
    """The scheduler's part of a Load. `looks_closer` is for idle moments: it walks all blocks."""
    with engine.lock:
        counts = engine.scheduler.counters()
        integrity = _integrity(engine.scheduler) if looks_closer else ""
    return Load(
        waiting=counts.num_waiting,
        running=counts.num_running,
        expected=counts.num_expected,
        receiving=counts.num_receiving + counts.num_received,
        pushing=counts.num_pushing,
        blocks_total=counts.blocks_total,
        blocks_used=counts.blocks_used,
        blocks_granted=counts.blocks_granted,
        over_high=not counts.grants_open,
        preemptions=counts.preemptions,
        prefix_hit_tokens=counts.prefix_hit_tokens,
        integrity=integrity,
        swapped=counts.num_swapped,
        paused=counts.num_paused,
        host_blocks_total=counts.host_blocks_total,
        host_blocks_used=counts.host_blocks_used,
        swapped_out_blocks=counts.swapped_out_blocks,
        swapped_in_blocks=counts.swapped_in_blocks,
        swapped_out_bytes=counts.swapped_out_blocks * engine.pool.spec.block_bytes,
        swapped_in_bytes=counts.swapped_in_blocks * engine.pool.spec.block_bytes,
    )


def all_blocks(engine: Engine) -> Blocks | None:
    """For a router that has just connected; None when nobody is to be told."""
    pool = engine.scheduler.pool
    if not pool.is_watched:
        return None
    with engine.lock:
        return Blocks(_packed(pool.digests), is_all=True)


def changed_blocks(engine: Engine) -> Blocks | None:
    """What came and went since the last call; None for nothing."""
    with engine.lock:
        changes = engine.scheduler.pool.take_changes()
    if not changes:
        return None
    stored = _packed(digest for digest, is_here in changes.items() if is_here)
    removed = _packed(digest for digest, is_here in changes.items() if not is_here)
    return Blocks(stored, removed)


def _packed(digests: Iterable[bytes]) -> bytes:
    return b"".join(digest[:NAME_BYTES] for digest in digests)


def _integrity(scheduler: Scheduler) -> str:
    """Empty, or what does not add up."""
    try:
        scheduler.check_integrity()
    except AssertionError as error:
        return str(error) or "block tables, counts and queues disagree"
    return ""
