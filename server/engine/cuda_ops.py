"""Ops of the fused loop on CUDA: Triton kernels between cuBLAS products, attention as the step brings it.

Imported on CUDA only.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from server.engine import kernels
from server.engine.attention_flashinfer import FlashInferAttention, StepInputs
from server.engine.fused import FusedWeights, Layer, Linear

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
        """`attend(queries, layer, out)` is the attention of this step. Turned queries go to `queries`, if given."""
        self._inputs, self._attend, self._queries = inputs, attend, queries

    def begin(self, positions: torch.Tensor) -> None:
        raise NotImplementedError("begin_step knows the slots too")

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        out = kernels.linear_one_row(x, linear.weight, linear.bias)
        return F.linear(x, linear.weight, linear.bias) if out is None else out

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return kernels.norm(x, weight, self._weights.eps)

    def linear_add_norm(
        self, x: torch.Tensor, linear: Linear, residual: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        parts = kernels.linear_parts(x, linear.weight) if linear.bias is None else None
        return kernels.add_norm(self.linear(x, linear) if parts is None else parts, residual, weight, self._weights.eps)

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
        self._attend(self.heads(qkv), index, self.heads(out))
        return out

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, head_dim] of what goes into attention or comes out of it."""
        return x.view(-1, self._weights.num_heads, self._weights.head_dim)

    def piece_buffers(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(queries, attended) for `PieceGraphs`."""
        weights = self._weights.embedding
        both = torch.zeros(2, size, self._width, dtype=weights.dtype, device=weights.device)
        return both[0], both[1]

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape[0], self._width, dtype=like.dtype, device=like.device)
