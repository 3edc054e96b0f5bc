"""CUDA: the fused loop with Triton and FlashInfer, its launches recorded in CUDA graphs.

1. A step that only decodes replays one whole graph: the smallest batch bucket that holds it. Padding rows are token 0
   of the null block.
2. Any other step of up to 1024 tokens replays the pieces between the attentions of its prompts, by token bucket; those
   run as planned for what is there. Where rows decode beside them, their attention is in the pieces, for as many
   rows as may come: those that are not there end at once. So launches cost little, whatever the mix of rows.
3. A longer step runs launch by launch: the device is busy for longer than the launches take.

`prepare` records them all, the largest first, in one memory pool. Before it, every step runs launch by launch.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from server.engine import kernels
from server.engine.attention import BatchMeta
from server.engine.attention_decode import most_shares
from server.engine.attention_flashinfer import FlashInferAttention, StepBuffer, StepInputs, block_list, padded
from server.engine.cuda_ops import CudaOps
from server.engine.forward import Forward, TransformersForward
from server.engine.fused import FusedModel, FusedWeights
from server.engine.kv_cache import KVCachePool
from server.engine.limits import PIECE_TOKENS

logger = logging.getLogger(__name__)

_WARM_UPS = 2
_FEW_ROWS = 32  # decode beside prompts, as a rule: long contexts are shared out as for so many


def decode_buckets(max_running: int) -> list[int]:
    """1, 2, 4, then multiples of 8 up to 64, of 16 up to 128, of 32 up to 256, as far as `max_running` needs. More rows
    than that go by pieces: launches are a small part of their time."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    return [size for below, size in zip([0, *sizes], sizes, strict=False) if below < max_running]


def make_cuda_forward(model: Any, weights: FusedWeights | None, pool: KVCachePool, max_running: int) -> Forward:
    if weights is None:
        num_heads = model.config.get_text_config(decoder=True).num_attention_heads
        return TransformersForward(model, FlashInferAttention(pool, num_heads), pool.data.device)
    return CudaForward(weights, FlashInferAttention(pool, weights.num_heads), max_running)


@dataclass(slots=True)
class NextDecode:
    """The decode step that comes if every row of the one before goes on, and no other; its buffer is filled but for the
    token ids and the blocks that begin."""

    size: int
    context_lens: list[int]
    tables: list[list[int]]  # with block 0 for one that is not known yet
    fresh: list[tuple[int, int]]  # rows that begin a block, and where it goes in the list of all blocks

    @classmethod
    def after(cls, meta: BatchMeta, size: int, block_size: int) -> Self:
        tables, fresh, end = [], [], 0
        for row, (length, table) in enumerate(zip(meta.context_lens, meta.block_tables, strict=True)):
            if length % block_size == 0:
                fresh.append((row, end + len(table)))
                table = [*table, 0]
            tables.append(table)
            end += len(table)
        return cls(size, [length + 1 for length in meta.context_lens], tables, fresh)

    def is_met_by(self, meta: BatchMeta) -> bool:
        if meta.context_lens != self.context_lens:
            return False
        for row, _ in self.fresh:
            self.tables[row][-1] = meta.block_tables[row][-1]
        return self.tables == meta.block_tables


class DecodeGraph:
    """One decode step of as many rows as `inputs` has tokens: logits of every row."""

    def __init__(self, model: FusedModel, ops: CudaOps, attention: FlashInferAttention, inputs: StepInputs) -> None:
        self.size = inputs.token_ids.shape[0]
        self._model = model
        self._ops = ops
        self._attention = attention
        self._inputs = inputs
        self._graph = torch.cuda.CUDAGraph()
        self._logits: torch.Tensor

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._ops.begin_step(self._inputs, self._attend)
        for _ in range(_WARM_UPS):
            self._step()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            self._logits = self._step()

    def _step(self) -> torch.Tensor:
        residual, attended = self._model.forward(self._inputs.token_ids)
        return self._model.finish(attended, residual)

    def _attend(self, query: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        self._attention.decode(query, layer, self._inputs, out)

    def replay(self) -> torch.Tensor:
        self._graph.replay()
        return self._logits


class PieceGraphs:
    """What stands between the attentions of prompts, for up to as many tokens as `inputs` has; the attention of the
    first `rows` is in it, as far as they decode. What goes into attention and comes out of it lies in `queries` and
    `attended`, at least that many tokens each, which all sizes share."""

    def __init__(
        self,
        model: FusedModel,
        ops: CudaOps,
        attention: FlashInferAttention,
        inputs: StepInputs,
        rows: int,
        queries: torch.Tensor,
        attended: torch.Tensor,
    ) -> None:
        size = inputs.token_ids.shape[0]
        self._model = model
        self._ops = ops
        self._attention = attention
        self._inputs = inputs
        self._rows = min(rows, size)
        self._queries, self._attended = queries[:size], attended[:size]
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._residual: torch.Tensor

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        token_ids = self._inputs.token_ids
        last = len(self._model.weights.layers) - 1
        self._ops.begin_step(self._inputs, lambda query, layer, out: None, self._queries)
        for _ in range(_WARM_UPS):
            residual = self._enter(token_ids)
            if last:
                self._between(0, residual)
        self._residual = self._record(pool, stream, lambda: self._enter(token_ids))
        for index in range(last):
            self._record(pool, stream, functools.partial(self._between, index, self._residual))

    def _enter(self, token_ids: torch.Tensor) -> torch.Tensor:
        residual, _ = self._model.enter(token_ids)
        self._decode(0)
        return residual

    def _between(self, index: int, residual: torch.Tensor) -> None:
        self._model.between(index, self._attended, residual)
        self._decode(index + 1)

    def _decode(self, layer: int) -> None:
        if rows := self._rows:
            query, out = self._ops.heads(self._queries[:rows]), self._ops.heads(self._attended[:rows])
            self._attention.decode(query, layer, self._inputs, out, most_shares(min(rows, _FEW_ROWS)))

    def _record(self, pool: Any, stream: torch.cuda.Stream, piece: Callable[[], Any]) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            result = piece()
        self._graphs.append(graph)
        return result

    def replay(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As `FusedModel.forward`; attention is planned."""
        attend = self._attention.prompts(self._ops.heads(self._queries), self._ops.heads(self._attended))
        for index, graph in enumerate(self._graphs):
            graph.replay()
            attend(index)
        return self._residual, self._attended


class CudaForward:
    def __init__(self, weights: FusedWeights, attention: FlashInferAttention, max_running: int) -> None:
        self._attention = attention
        self._fixed = attention.buffer  # of the graphs, once there are any; never grows
        self._ops = CudaOps(weights, attention)
        self._model = FusedModel(weights, self._ops)
        self._max_running = max_running
        self._decodes: dict[int, DecodeGraph] = {}
        self._pieces: dict[int, PieceGraphs] = {}  # of steps in which nothing decodes
        self._mixed: dict[int, PieceGraphs] = {}
        self._next: NextDecode | None = None

    def logits(self, meta: BatchMeta, keep: list[int]) -> torch.Tensor | None:
        self._attention.wait()
        size = _bucket(self._decodes, len(meta.token_ids)) if len(meta.token_ids) == meta.num_decode else 0
        if size and keep == list(range(meta.num_decode)):
            return self._decode(meta, size)
        self._next = None
        return self._other(meta, keep)

    # -- decode -------------------------------------------------------------------------------------------------------

    def _decode(self, meta: BatchMeta, size: int) -> torch.Tensor:
        following, self._next = self._next, None
        if following is not None and following.is_met_by(meta):
            self._complete(following, meta)
        else:
            self._fixed.fill(meta, size, [], block_list(meta))
        self._fixed.send(size, sum(map(len, meta.block_tables)))
        self._attention.mark()
        _take_drawn(self._fixed.inputs(size), meta)
        logits = self._decodes[size].replay()
        if meta.drawn is None:  # else this step waits for another one, and what it is sent for it
            self._foresee(meta, size)
        return logits[: len(meta.token_ids)]

    def _complete(self, following: NextDecode, meta: BatchMeta) -> None:
        numbers, size, rows = self._fixed.numbers, following.size, len(meta.token_ids)
        numbers[:rows] = meta.token_ids
        numbers[2 * size : 2 * size + rows] = meta.slot_mapping
        blocks = self._fixed.capacity(size, 0)
        for row, at in following.fresh:
            numbers[blocks + at] = meta.block_tables[row][-1]

    def _foresee(self, meta: BatchMeta, size: int) -> None:
        """Fills the buffer for the step that will most likely follow, while the device computes this one."""
        following = NextDecode.after(meta, size, self._attention.spec.block_size)
        ahead = replace(meta, positions=meta.context_lens, block_tables=following.tables)
        blocks = block_list(ahead)
        self._next = following if self._fixed.holds(size, len(blocks)) else None
        if self._next is not None:
            self._attention.wait()
            self._fixed.fill(ahead, size, [], blocks)

    # -- any other step -----------------------------------------------------------------------------------------------

    def _other(self, meta: BatchMeta, keep: list[int]) -> torch.Tensor | None:
        blocks = block_list(meta)
        graphs, buffer = self._mixed if meta.num_decode else self._pieces, self._fixed
        size = _bucket(graphs, len(meta.token_ids)) if meta.num_decode <= self._max_running else 0
        pieces = graphs.get(size) if buffer.holds(size, len(blocks)) else None
        if pieces is None:
            size, buffer = padded(len(meta.token_ids)), self._attention.buffer
        buffer.fill(meta, size, keep, blocks)
        buffer.send(size, len(blocks))
        inputs = buffer.inputs(size)
        _take_drawn(inputs, meta)
        self._attention.plan_rows(meta, inputs)
        self._attention.mark()
        if pieces is not None:
            residual, attended = pieces.replay()
        else:
            self._ops.begin_step(inputs, self._attention.attend)
            residual, attended = self._model.forward(inputs.token_ids)
        if not keep:
            return None
        kept = inputs.keep[: len(keep)]
        return self._model.finish(attended.index_select(0, kept), residual.index_select(0, kept))

    # -- capture ------------------------------------------------------------------------------------------------------

    def prepare(self, max_len: int, progress: Callable[[str, float], None]) -> None:
        """Records all graphs, for rows of up to `max_len` tokens. Nothing else may run on the device meanwhile."""
        device = self._fixed.data.device
        torch.cuda.empty_cache()  # recording does it too: what it frees is not the graphs' doing
        started, free = time.perf_counter(), torch.cuda.mem_get_info(device)[0]
        decodes, pieces = decode_buckets(self._max_running), list(PIECE_TOKENS)
        blocks = decodes[-1] * self._attention.spec.num_blocks_for(max_len)
        # Graphs keep addresses, so their buffer is as large as it will ever have to be.
        self._fixed = StepBuffer(device, StepBuffer.capacity(max(pieces[-1], decodes[-1]), blocks))
        between = self._ops.piece_buffers(pieces[-1])
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(sorted(pieces, reverse=True)):
            progress(f"graphs: {size} tokens", done / (len(pieces) + len(decodes)))
            for graphs, rows in ((self._pieces, 0), (self._mixed, self._max_running)):
                piece = PieceGraphs(self._model, self._ops, self._attention, self._fixed.inputs(size), rows, *between)
                piece.capture(pool, stream)
                graphs[size] = piece
        for done, size in enumerate(sorted(decodes, reverse=True), len(pieces)):
            progress(f"graphs: decode of {size}", done / (len(pieces) + len(decodes)))
            decode = DecodeGraph(self._model, self._ops, self._attention, self._fixed.inputs(size))
            with _blas("cublaslt"):
                decode.capture(pool, stream)
            self._decodes[size] = decode
        kernels.take_drawn(self._fixed.data, torch.zeros(1, dtype=torch.long, device=device), 1)  # compiles it
        torch.cuda.synchronize(device)
        logger.info(
            "CUDA graphs for decode of %s rows and up to %d tokens: %.1f s, %d MiB",
            ", ".join(map(str, decodes)), pieces[-1], time.perf_counter() - started,
            (free - torch.cuda.mem_get_info(device)[0]) >> 20,
        )  # fmt: skip


@contextlib.contextmanager
def _blas(library: str) -> Iterator[None]:
    """cublasLt's choice for a product of 64 rows is up to 10 % faster than cuBLAS's, for fewer rows the same."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def _take_drawn(inputs: StepInputs, meta: BatchMeta) -> None:
    if meta.drawn is not None:
        kernels.take_drawn(inputs.token_ids, meta.drawn, meta.num_decode)


def _bucket(graphs: dict[int, Any], size: int) -> int:
    """The smallest bucket that holds `size`; 0 if there is none."""
    return min((have for have in graphs if have >= size), default=0)
