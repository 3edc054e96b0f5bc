"""The gauges of /metrics, read from the workers' last Load when somebody asks: one set a worker, one a pool."""

from collections.abc import Iterable

from server.metrics import Sample
from server.router.dispatch import Dispatcher
from server.router.worker import Worker

# Load's fields that are numbers of their own, and what they say.
_LOAD = {
    "waiting": "Sequences waiting to be computed",
    "running": "Sequences being computed",
    "expected": "Sequences announced and not granted yet",
    "receiving": "Sequences whose KV is arriving or that are in line to run",
    "pushing": "Prefill halves whose blocks wait for the other side's acknowledgement",
    "blocks_total": "KV blocks of the pool",
    "blocks_used": "KV blocks that hold KV of a sequence",
    "blocks_granted": "KV blocks promised to prompts that are still arriving",
    "slots_total": "Slots of the landing ring",
    "slots_free": "Slots of the landing ring that nobody may write",
    "over_high": "1 while no grants are given: over the high mark, until under the low one",
    "is_tight": "1 where decoding takes longer than slo.tpot_p95 however few decode (decode.prefill_tokens auto)",
    "preemptions": "Sequences preempted since the start",
    "prefix_hit_tokens": "Prompt tokens found in the prefix cache since the start",
    "busy_share": "Share of the last moment spent in steps",
    "utilisation": "GPU use as NVML counts it, else CPU time over the worker's cores; -1 unknown",
    "swapped": "Sequences that gave their KV blocks to others and will go on",
    "paused": "Sequences whose client does not read",
    "host_blocks_total": "KV blocks that host memory has room for",
    "host_blocks_used": "KV blocks that lie in host memory",
    "rev": "Revision of the knobs in use",
}
_LOAD_TOTALS = {
    "swapped_out_blocks": "KV blocks copied to host memory",
    "swapped_in_blocks": "KV blocks brought back from host memory",
    "swapped_out_bytes": "Bytes copied to host memory",
    "swapped_in_bytes": "Bytes brought back from host memory",
}
_COUNTERS = {
    "unexpected": "Messages that fit no state",
    "failed": "Sequences and messages that failed",
    "ran_ahead": "Sequences that prefill decoded because no grant came",
    "cuts": "Of them, those that were handed over once it came",
    "recomputed": "Prompts computed on the decode side because their KV did not come",
    "local_prefill_tokens": "Prompt tokens that a step may carry beside sequences that decode",
}
_TRANSFER_COUNTERS = {
    "checksum_failures_total": "Chunks whose bytes were not those that were sent",
    "lost_total": "Chunks that came empty",
    "lease_expired_total": "Grants whose other side stopped renewing, or answering",
    "regranted_total": "Prompts handed to another decode worker when the first one was lost",
    "recomputed_total": "Sequences computed on the decode side after all",
    "quarantined_slots": "Ring slots that an ended path might still write",
    "encode_s_total": "Seconds in the codec, sending",
    "decode_s_total": "Seconds in the codec, receiving",
}
_POOL = {
    "queue": "Sequences of the pool that wait: to be computed, to be granted, or to run",
    "running": "Sequences of the pool being computed",
    "blocks_granted": "KV blocks of the pool promised to prompts that are still arriving",
    "blocks_free": "KV blocks of the pool that nobody holds",
    "over_high": "Workers of the pool that give no grants",
    "utilisation": "Mean use of the pool's devices",
    "workers": "Workers of the pool that are connected and not draining",
}


def samples(dispatcher: Dispatcher) -> Iterable[Sample]:
    workers = dispatcher.workers.all.values()
    for worker in workers:
        yield from _worker(worker)
    for role in dict.fromkeys(worker.role for worker in workers):
        for name, value in _pool(dispatcher.workers.with_role(role)).items():
            yield f"pdctl_pool_{name}", _POOL[name], {"pool": role}, value
    chooser = dispatcher.chooser
    threshold = chooser.crossover.tokens if chooser.threshold is None else chooser.threshold
    yield "pdctl_hybrid_threshold_tokens", "Shorter uncached prompts stay on one worker", {}, float(threshold)


def _worker(worker: Worker) -> Iterable[Sample]:
    labels = {"worker": worker.name, "role": worker.role}
    yield "pdctl_worker_up", "1 while connected", labels, float(worker.is_connected)
    yield "pdctl_worker_draining", "1 while it gets no new work", labels, float(worker.is_draining)
    yield "pdctl_worker_open", "Sequences the router has there", labels, float(len(worker.open))
    yield "pdctl_worker_prompt_tokens", "Prompt tokens sent there and not read yet", labels, float(worker.prompt_tokens)
    yield "pdctl_worker_cached_blocks", "Prefix blocks it says it can hit", labels, float(len(worker.cached))
    load = worker.load
    if load is None:
        return
    for name, help in _LOAD.items():
        yield f"pdctl_worker_{name}", help, labels, float(getattr(load, name))
    for name, help in _LOAD_TOTALS.items():
        yield f"pdctl_worker_{name}_total", help, labels, float(getattr(load, name))
    for name, value in load.counters.items():
        help = _COUNTERS.get(name, f"The transfer's own count of {name.replace('_', ' ')}")
        yield f"pdctl_worker_{name}", help, labels, float(value)
    yield from _transfer_samples(worker)


def _transfer_samples(worker: Worker) -> Iterable[Sample]:
    """Of a path: bytes verified at the other end, and the seconds in which something was under way."""
    if worker.load is None:
        return
    labels = {"worker": worker.name}
    for name, doc in _TRANSFER_COUNTERS.items():
        if (value := worker.load.counters.get(name.removesuffix("_total"))) is not None:
            yield f"pdctl_kv_transfer_{name}", doc, labels, value
    for decode, link in worker.load.links.items():
        pair = {"prefill": worker.name, "decode": decode, "transport": link.transport, "codec": link.codec}
        yield "pdctl_kv_link_bytes_total", "Wire bytes verified at the other end", pair, float(link.bytes)
        yield "pdctl_kv_link_seconds_total", "Seconds with any of them under way", pair, link.seconds


def _pool(workers: list[Worker]) -> dict[str, float]:
    loads = [worker.load for worker in workers if worker.load is not None and worker.is_connected]
    known = [load.utilisation for load in loads if load.utilisation >= 0]
    return {
        "queue": sum(load.waiting + load.expected for load in loads),
        "running": sum(load.running for load in loads),
        "blocks_granted": sum(load.blocks_granted for load in loads),
        "blocks_free": sum(load.blocks_total - load.blocks_used - load.blocks_granted for load in loads),
        "over_high": sum(load.over_high for load in loads),
        "utilisation": sum(known) / len(known) if known else -1.0,
        "workers": sum(worker.is_connected and not worker.is_draining for worker in workers),
    }
