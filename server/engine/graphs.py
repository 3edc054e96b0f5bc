"""CUDA: the fused loop with Triton and FlashInfer, its launches recorded in CUDA graphs.

1. A step that only decodes replays one whole graph: the smallest batch bucket that holds it. Padding rows are token 0
   of the null block.
2. Any other step of up to _PIECE_TOKENS tokens replays the pieces between attentions, by token bucket; attention itself
   runs as planned for the rows that are there. So launches cost little, whatever the mix of rows.
3. A longer step runs launch by launch: the device is busy for longer than the launches take.

`prepare` records them all, the largest first, in one memory pool. Before it, every step runs launch by launch.
"""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import flashinfer
import torch
import torch.nn.functional as F  # noqa: N812

from server.engine import kernels
from server.engine.attention import BatchMeta
from server.engine.attention_flashinfer import FlashInferAttention, Rows, StepBuffer, StepInputs, block_list, padded
from server.engine.forward import Forward, TransformersForward
from server.engine.fused import FusedModel, FusedWeights, Layer, Linear
from server.engine.kv_cache import KVCachePool

logger = logging.getLogger(__name__)

_PIECE_TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
_WARM_UPS = 2


def decode_buckets(max_running: int) -> list[int]:
    """1, 2, 4, then multiples of 8 up to 64, of 16 up to 128, of 32 from there; the last is `max_running` or more."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, max(160, max_running) + 32, 32)]
    last = next(i for i, size in enumerate(sizes) if size >= max_running)
    return sizes[: last + 1]


def make_cuda_forward(model: Any, weights: FusedWeights | None, pool: KVCachePool, max_running: int) -> Forward:
    if weights is None:
        num_heads = model.config.get_text_config(decoder=True).num_attention_heads
        return TransformersForward(model, FlashInferAttention(pool, num_heads), pool.data.device)
    return CudaForward(weights, FlashInferAttention(pool, weights.num_heads), max_running)


Attend = Callable[[torch.Tensor, int, torch.Tensor], None]


class CudaOps:
    """Ops of the fused loop for one step at a time (`begin_step`)."""

    def __init__(self, weights: FusedWeights, attention: FlashInferAttention) -> None:
        self._weights = weights
        self._attention = attention
        self._width = weights.num_heads * weights.head_dim
        self._inputs: StepInputs
        self._attend: Attend
        self._queries: torch.Tensor | None

    def begin_step(self, inputs: StepInputs, attend: Attend, queries: torch.Tensor | None = None) -> None:
        """`attend(queries, layer, out)` is the attention of this step. Turned queries go to `queries` if it is given."""
        self._inputs, self._attend, self._queries = inputs, attend, queries

    def begin(self, positions: torch.Tensor) -> None:
        raise NotImplementedError("begin_step knows the slots too")

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return F.linear(x, linear.weight, linear.bias)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return kernels.norm(x, weight, self._weights.eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return kernels.add_norm(x, residual, weight, self._weights.eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return kernels.silu_and_mul(gate_up)

    def rotate(self, qkv: torch.Tensor, layer: Layer, index: int) -> torch.Tensor:
        weights, inputs = self._weights, self._inputs
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        queries = self._empty(qkv) if self._queries is None else self._queries
        kernels.rotate_and_write(
            qkv, weights.cos_sin, inputs.positions, inputs.slots, self._attention.layers[index],
            weights.num_heads, norms, weights.eps, queries,
        )  # fmt: skip
        return queries

    def attend(self, qkv: torch.Tensor, index: int) -> torch.Tensor:
        out = self._empty(qkv)
        self.attend_into(qkv, index, out)
        return out

    def attend_into(self, queries: torch.Tensor, index: int, out: torch.Tensor) -> None:
        heads = (-1, self._weights.head_dim)
        self._attend(queries.unflatten(1, heads), index, out.unflatten(1, heads))

    def piece_buffers(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(queries, attended) for `PieceGraphs`."""
        weights = self._weights.embedding
        both = torch.zeros(2, size, self._width, dtype=weights.dtype, device=weights.device)
        return both[0], both[1]

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape[0], self._width, dtype=like.dtype, device=like.device)


class DecodeGraph:
    """One decode step of `size` rows: hidden states and logits of every row."""

    def __init__(self, model: FusedModel, ops: CudaOps, attention: FlashInferAttention, inputs: StepInputs) -> None:
        self.size = inputs.token_ids.shape[0]
        self._model = model
        self._ops = ops
        self._attention = attention
        self._inputs = inputs
        self._graph = torch.cuda.CUDAGraph()
        self.logits: torch.Tensor
        self._wrapper: flashinfer.BatchDecodeWithPagedKVCacheWrapper

    def capture(self, pool: Any, stream: torch.cuda.Stream, blocks: torch.Tensor) -> None:
        """`blocks` is memory for the block tables of all rows, shared by all decode graphs."""
        numbers = torch.zeros(2 * self.size + 1, dtype=torch.int32, device=blocks.device)
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._attention.workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=numbers[: self.size + 1],
            paged_kv_indices_buffer=blocks,
            paged_kv_last_page_len_buffer=numbers[self.size + 1 :],
        )
        nothing = BatchMeta([], [], [], [0], [], [], 0)
        self._plan(nothing, torch.zeros(self.size, dtype=torch.int32, device=blocks.device))
        self._ops.begin_step(self._inputs, self._attend)
        for _ in range(_WARM_UPS):
            self._step()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            self.logits = self._step()

    def _step(self) -> torch.Tensor:
        return self._model.logits(self._model.forward(self._inputs.token_ids))

    def _attend(self, query: torch.Tensor, layer: int, out: torch.Tensor) -> None:
        self._wrapper.run(query, self._attention.layers[layer], out=out)

    def _plan(self, meta: BatchMeta, blocks: torch.Tensor) -> None:
        rows = len(meta.context_lens)
        where = Rows.of(meta, 0, rows, self.size - rows, self._attention.spec.block_size)
        self._attention.plan_decode(self._wrapper, where, blocks)

    def replay(self, meta: BatchMeta, blocks: torch.Tensor) -> torch.Tensor:
        self._plan(meta, blocks)
        self._attention.mark()
        self._graph.replay()
        return self.logits


class PieceGraphs:
    """What stands between attentions, for up to as many tokens as `inputs` has. What goes into attention and comes out
    of it lies in `queries` and `attended`, at least that many rows each, which all sizes share."""

    def __init__(
        self, model: FusedModel, ops: CudaOps, inputs: StepInputs, queries: torch.Tensor, attended: torch.Tensor
    ) -> None:
        size = inputs.token_ids.shape[0]
        self._model = model
        self._ops = ops
        self._inputs = inputs
        self._queries, self._attended = queries[:size], attended[:size]
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._hidden: torch.Tensor

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        token_ids = self._inputs.token_ids
        last = len(self._model.weights.layers) - 1
        self._ops.begin_step(self._inputs, lambda query, layer, out: None, self._queries)
        for _ in range(_WARM_UPS):
            residual, _ = self._model.enter(token_ids)
            self._model.between(last, self._attended, residual)
        residual, _ = self._record(pool, stream, lambda: self._model.enter(token_ids))
        for index in range(last + 1):
            piece = functools.partial(self._model.between, index, self._attended, residual)
            self._hidden = self._record(pool, stream, piece)

    def _record(self, pool: Any, stream: torch.cuda.Stream, piece: Callable[[], Any]) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            result = piece()
        self._graphs.append(graph)
        return result

    def replay(self, attend: Attend) -> torch.Tensor:
        """Hidden states; attention is planned."""
        self._ops.begin_step(self._inputs, attend)
        for index, graph in enumerate(self._graphs[:-1]):
            graph.replay()
            self._ops.attend_into(self._queries, index, self._attended)
        self._graphs[-1].replay()
        return self._hidden


class CudaForward:
    def __init__(self, weights: FusedWeights, attention: FlashInferAttention, max_running: int) -> None:
        self._attention = attention
        self._fixed = attention.buffer  # of the graphs, once there are any; never grows
        self._ops = CudaOps(weights, attention)
        self._model = FusedModel(weights, self._ops)
        self._max_running = max_running
        self._decodes: dict[int, DecodeGraph] = {}
        self._pieces: dict[int, PieceGraphs] = {}

    def logits(self, meta: BatchMeta, keep: list[int]) -> torch.Tensor | None:
        self._attention.wait()
        logits = self._decode(meta, keep)
        if logits is None:
            hidden, kept = self._hidden(meta, keep)
            logits = self._model.logits(hidden.index_select(0, kept)) if keep else None
        if not keep:
            torch.cuda.synchronize(self._fixed.data.device)
        return logits

    def _decode(self, meta: BatchMeta, keep: list[int]) -> torch.Tensor | None:
        """None when no whole graph fits this step."""
        tokens = len(meta.token_ids)
        size = _bucket(self._decodes, tokens) if tokens == meta.num_decode else 0
        if not size or not keep:
            return None
        kept, blocks = self._fixed.fill(meta, size, keep, block_list(meta, padding=size - tokens))
        logits = self._decodes[size].replay(meta, blocks)
        return logits[:tokens] if len(keep) == tokens else logits.index_select(0, kept)

    def _hidden(self, meta: BatchMeta, keep: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden states, `keep` on the device)"""
        blocks = block_list(meta)
        size = _bucket(self._pieces, len(meta.token_ids))
        buffer = self._fixed
        if not size or not buffer.holds(size, keep, len(blocks)):
            size, buffer = padded(len(meta.token_ids)), self._attention.buffer
        kept, block_tables = buffer.fill(meta, size, keep, blocks)
        inputs = buffer.inputs(size)
        self._attention.plan_rows(meta, block_tables, inputs.slots)
        self._attention.mark()
        if buffer is self._fixed and size in self._pieces:
            return self._pieces[size].replay(self._attention.attend), kept
        self._ops.begin_step(inputs, self._attention.attend)
        return self._model.forward(inputs.token_ids), kept

    # -- capture ------------------------------------------------------------------------------------------------------

    def prepare(self, max_len: int, progress: Callable[[str, float], None]) -> None:
        """Records all graphs, for rows of up to `max_len` tokens. Nothing else may run on the device meanwhile."""
        device = self._fixed.data.device
        started, free = time.perf_counter(), torch.cuda.mem_get_info(device)[0]
        decodes, pieces = decode_buckets(self._max_running), list(_PIECE_TOKENS)
        blocks = decodes[-1] * self._attention.spec.num_blocks_for(max_len)
        # Graphs keep addresses, so their buffer is as large as it will ever have to be.
        self._fixed = StepBuffer(device, 3 * max(pieces[-1], decodes[-1]) + decodes[-1] + blocks)
        tables = torch.zeros(blocks, dtype=torch.int32, device=device)
        between = self._ops.piece_buffers(pieces[-1])
        stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        for done, size in enumerate(sorted(pieces, reverse=True)):
            progress(f"graphs: {size} tokens", done / (len(pieces) + len(decodes)))
            piece = PieceGraphs(self._model, self._ops, self._fixed.inputs(size), *between)
            piece.capture(pool, stream)
            self._pieces[size] = piece
        for done, size in enumerate(sorted(decodes, reverse=True), len(pieces)):
            progress(f"graphs: decode of {size}", done / (len(pieces) + len(decodes)))
            decode = DecodeGraph(self._model, self._ops, self._attention, self._fixed.inputs(size))
            decode.capture(pool, stream, tables)
            self._decodes[size] = decode
        torch.cuda.synchronize(device)
        logger.info(
            "CUDA graphs for decode of %s rows and up to %d tokens: %.1f s, %d MiB",
            ", ".join(map(str, decodes)), pieces[-1], time.perf_counter() - started,
            (free - torch.cuda.mem_get_info(device)[0]) >> 20,
        )  # fmt: skip


def _bucket(graphs: dict[int, Any], size: int) -> int:
    """The smallest bucket that holds `size`; 0 if there is none."""
    return min((have for have in graphs if have >= size), default=0)
