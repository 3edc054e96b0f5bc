"""The ModelRunner: a batch of token slices in, one token a slice out.

1. `load`: config and weights, the start-up check, memory for the KV cache, warm-up. After it `spec` and `pool` stand.
2. `launch(batch)`: flat input tensors, one forward over the packed tokens, logits only for the rows that sample. A GPU
   computes by itself then; what `launch` returns waits for it. On a CPU everything is done when it returns.

It reads sequences and never changes them: that is the Scheduler's. One thread calls `launch` and what it returns.
"""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from server.engine import loading
from server.engine.attention import BatchMeta, Coming, row_order
from server.engine.forward import Forward, make_forward, require_cuda
from server.engine.fused import FusedWeights
from server.engine.kv_cache import HostBlocks, KVCachePool, KVSpec
from server.engine.packed_linear import can_pack, pack_linears
from server.engine.prompt_logprobs import PromptLogprobs
from server.engine.sampler import Sampler
from server.engine.selfcheck import check_logits, check_sequence, eager_logits
from server.errors import ModelError, StartError
from server.grammar import Grammars
from server.sequence import Batch, SamplingParams, SeqId, Sequence, Slice, Stuck, Token

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
Auto = Literal["auto"]

# Of the memory that is free once the weights are loaded: a GPU is the worker's own and keeps room for graphs and
# activations; other workers share the host's.
_KV_SHARE = {"cuda": 0.85, "cpu": 0.25}
_WARM_UP_TOKENS = 256
# auto takes no more on a CPU, or four sequences of max_len: zeroing memory that the host has yet to find takes seconds.
_CPU_KV_BYTES = 2 * 2**30


def _silent(stage: str, share: float) -> None:
    pass


@dataclass(slots=True)
class Launched:
    """A step that a device computes, or has."""

    # Waits until the batch's KV is in the pool. One entry a slice, in the batch's order: the sampled token, or why
    # there is none; None where the slice ends before the last known token.
    collect: Callable[[], list[Token | Stuck | None]]
    is_done: Callable[[], bool]
    # What the device took, once it is done (a clock here would count how late Python looks); None where it was at once.
    seconds: Callable[[], float] | None = None


class ModelRunner:
    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        threads: int = 0,
        block_size: int = 16,
        max_len: int = 0,
        max_running: int = 64,
        kv_bytes: int | Auto = "auto",
        host_swap_bytes: int = 0,
        check: bool = True,
        pack: bool = True,
    ) -> None:
        """`model` is a folder, or "dummy:" and a folder or config.json. 0 means: the model's or the machine's own."""
        self.device = torch.device(device)
        self.dtype = loading.choose_dtype(dtype, self.device)
        if self.device.type == "cuda":
            require_cuda(self.device, self.dtype)
        self.folder, self.is_dummy = loading.model_folder(model)
        self.config = loading.load_config(self.folder)
        self.spec = KVSpec.from_config(self.config, self.dtype, block_size)
        text = self.config.get_text_config(decoder=True)
        self.vocab_size = int(text.vocab_size)
        own_len = int(getattr(text, "max_position_embeddings", 0) or 0)
        self.max_len = max_len or own_len
        if not self.max_len:
            raise ModelError("the model's config has no max_position_embeddings: set model.max_len")
        if own_len and self.max_len > own_len:
            raise ModelError(f"model.max_len ({self.max_len}) is above the model's own limit of {own_len} tokens")
        self.logit_differences: dict[str, float] = {}
        self.weight_bytes = 0  # from load() on, as all that follows
        self.free_bytes = 0  # on the device, once the weights were loaded
        self.graph_bytes = 0
        self.pool: KVCachePool
        self.host: HostBlocks
        self._threads = threads
        self._max_running = max_running
        self._kv_bytes = kv_bytes
        self._host_swap_bytes = host_swap_bytes
        self._check = check
        self._pack = pack
        self._model: Any = None
        self._weights: FusedWeights | None = None
        self._forward: Forward
        self._prompt_logprobs = PromptLogprobs()
        self.grammars = Grammars(self.folder, self.vocab_size)
        self._sampler = Sampler(self.grammars)
        self._coming: Coming | None = None  # of the last launch

    # -- load ---------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def load(self, progress: Progress = _silent) -> None:
        """`progress(stage, share done)` is called as it goes: weights, packing, check, warm-up, kv cache, ready."""
        if self._threads:
            torch.set_num_threads(self._threads)
        if self.device.type == "cpu":
            loading.keep_freed_memory()
        progress("weights", 0.0)
        self._model = loading.load_model(self.folder, self.config, self.dtype, self.device, self.is_dummy)
        self.weight_bytes = sum(p.numel() * p.element_size() for p in self._model.parameters())
        with loading.model_errors(f"{type(self._model).__name__} does not run with paged attention"):
            self._try_out(progress)
        progress("kv cache", 0.9)
        self._use_pool(KVCachePool(self.spec, self._decide_num_blocks(), self.device))
        self.host = HostBlocks(self.pool, self._decide_num_host_blocks())
        before = self._free_bytes()
        self._forward.prepare(self.max_len, progress)
        if self.device.type == "cuda":
            self.graph_bytes = max(0, before - self._free_bytes())
        progress("ready", 1.0)

    def _try_out(self, progress: Progress) -> None:
        """The start-up check and the warm-up, in a small pool that is dropped afterwards."""
        seq = check_sequence(self.spec, self.vocab_size)
        # Before packing, so that the check covers that too.
        theirs = eager_logits(self._model, seq.prompt) if self._check else None
        name = type(self._model).__name__
        self._weights = FusedWeights.of(self._model, self.max_len)
        if self._pack and self.device.type == "cpu" and can_pack(self.dtype):
            progress("packing", 0.4)
            logger.info("packed %d linear layers for this CPU", self._pack_linears())
        warm_len = min(self.max_len - 1, _WARM_UP_TOKENS)
        num_blocks = self.spec.num_blocks_for(max(len(seq.prompt), warm_len + 1))
        self._use_pool(KVCachePool(self.spec, 1 + num_blocks, self.device))
        if theirs is not None:
            progress("check", 0.5)
            self.logit_differences = check_logits(theirs, self._all_logits, seq, self.spec, name)
        progress("warm-up", 0.7)
        self._warm_up(warm_len)

    def _pack_linears(self) -> int:
        if self._weights is None:
            return pack_linears(self._model)
        self._model = None  # its parameters are views of what packing is to free
        return self._weights.pack()

    def fingerprint(self) -> str:
        """Of config and weights, for the model card."""
        return loading.fingerprint(self.folder, self.is_dummy)

    def _use_pool(self, pool: KVCachePool) -> None:
        self.pool = pool
        self._forward = make_forward(self._model, self._weights, pool, self._max_running)

    def _warm_up(self, prompt_len: int) -> None:
        """One prompt forward and one decode step, so that the first client does not pay for what torch sets up."""
        table = list(range(1, 1 + self.spec.num_blocks_for(prompt_len + 1)))
        seq = Sequence(SeqId("warm", 0, 0), [0] * prompt_len, SamplingParams(max_tokens=2), block_table=table)
        started = time.perf_counter()
        self.execute(Batch([Slice(seq, 0, prompt_len)]))
        seq.output.append(0)
        self.execute(Batch([Slice(seq, prompt_len, 1)]))
        logger.info("warm-up took %.2f s", time.perf_counter() - started)

    def _decide_num_blocks(self) -> int:
        """Blocks of the pool, the null block among them; refuses a pool that one sequence of max_len cannot use."""
        block = self.spec.block_bytes
        least = 1 + self.spec.num_blocks_for(self.max_len)
        most = 1 + self._max_running * self.spec.num_blocks_for(self.max_len)
        free = self.free_bytes = self._free_bytes()
        if self._kv_bytes == "auto":
            affordable = int(free * _KV_SHARE[self.device.type]) // block
            if self.device.type == "cpu":
                affordable = min(affordable, max(_CPU_KV_BYTES // block, 4 * least))
            num_blocks, source = min(most, affordable), "auto"
        else:
            num_blocks, source = self._kv_bytes // block, "kv_bytes"
        logger.info(
            "KV cache (%s): %d blocks of %d tokens and %d KiB, room for %d tokens",
            source, num_blocks, self.spec.block_size, block >> 10, max(0, num_blocks - 1) * self.spec.block_size,
        )  # fmt: skip
        if num_blocks < least:
            raise StartError(
                f"the KV cache ({source}) has {num_blocks} blocks, {num_blocks * block / 2**20:.1f} MiB; one sequence "
                f"of max_len {self.max_len} needs {least}, {least * block / 2**20:.1f} MiB",
                help="raise kv_bytes or lower model.max_len",
            )
        if num_blocks * block > free:
            raise StartError(
                f"the KV cache of {num_blocks * block / 2**20:.0f} MiB does not fit into the "
                f"{free / 2**20:.0f} MiB that are free on {self.device}",
                help="lower kv_bytes",
            )
        return num_blocks

    def _decide_num_host_blocks(self) -> int:
        """Refuses host memory for swapped KV that is not there; a CPU worker's pool lies in the same."""
        asked, available = self._host_swap_bytes, int(psutil.virtual_memory().available)
        pool = self.pool.blocks.numel() if self.device.type == "cpu" else 0
        if asked and asked + pool > available:
            beside = f" beside a KV cache of {pool / 2**20:.0f} MiB" if pool else ""
            raise StartError(
                f"host_swap_bytes, {asked / 2**20:.0f} MiB{beside}, does not fit into the {available / 2**20:.0f} MiB "
                "of host memory that are free",
                help="lower host_swap_bytes",
            )
        return asked // self.spec.block_bytes

    def _free_bytes(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return int(psutil.virtual_memory().available)

    # -- execute ------------------------------------------------------------------------------------------------------

    @property
    def is_async(self) -> bool:
        """Whether a step can be launched while the one before it is computed."""
        return self.device.type == "cuda"

    def execute(self, batch: Batch) -> list[Token | Stuck | None]:
        """`launch`, waited for."""
        return self.launch(batch).collect()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Gives the device the batch to compute. A slice may begin with the token that the launch before draws."""
        slices = batch.slices
        begin = self._mark()
        order = row_order(slices)
        ordered = [slices[i] for i in order]
        sampling = [row for row, s in enumerate(ordered) if s.samples]
        meta = BatchMeta.build(ordered, self.spec.block_size, self._coming)
        reading = self._prompt_logprobs.rows(ordered, meta.query_starts)
        last = [meta.query_starts[row + 1] - 1 for row in sampling]
        logits = self._forward.logits(meta, last + [row.flat for row in reading])
        if logits is not None and reading:
            self._prompt_logprobs.add(reading, logits[len(last) :])
        seqs = [ordered[row].seq for row in sampling]
        self._coming = None
        sampled: Callable[[], Rows[Token | Stuck]] = list
        if logits is not None and last:
            drawn = self._sampler.begin(logits[: len(last)], seqs, [ordered[row].output_index for row in sampling])
            self._coming = Coming(drawn.ids, {seq: i for i, seq in enumerate(seqs)})
            sampled = drawn.tokens
        end = self._mark()

        def collect() -> list[Token | Stuck | None]:
            if end is not None:
                end.synchronize()
            tokens: list[Token | Stuck | None] = [None] * len(slices)
            for row, token in zip(sampling, sampled(), strict=True):
                tokens[order[row]] = self._with_prompt(ordered[row].seq, token)
            return tokens

        if begin is None or end is None:
            return Launched(collect, lambda: True)
        return Launched(collect, end.query, lambda: begin.elapsed_time(end) / 1e3)

    def _mark(self) -> torch.cuda.Event | None:
        """In the device's work so far."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _with_prompt(self, seq: Sequence, token: Token | Stuck) -> Token | Stuck:
        if seq.params.num_prompt_logprobs < 0 or seq.output or isinstance(token, Stuck):
            return token
        return Token(token.id, token.logprob, token.top, self._prompt_logprobs.take(seq))

    def _all_logits(self, slices: list[Slice]) -> torch.Tensor:
        meta = BatchMeta.build(slices, self.spec.block_size)
        logits = self._forward.logits(meta, list(range(len(meta.token_ids))))
        assert logits is not None
        return logits
