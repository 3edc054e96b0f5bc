"""The Llama family as a plain loop over its layers, from transformers' config and loaded weights.

1. `FusedWeights.of(model)` merges Q, K, V and gate, up; the model's own parameters become views of the merged ones, so
   that nothing is held twice and transformers' forward still runs (the start-up check compares with it).
2. `FusedModel(weights, ops)` is the loop. What a device does in its own way is in `Ops`; `TorchOps` does it anywhere.

The loop falls into pieces between attentions (`enter`, one `between` a layer, `finish`): CUDA records each as a graph.
"""

from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F  # noqa: N812

from server.engine.attention import AttentionBackend
from server.engine.packed_linear import pack, packed_linear

FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
# Of rope types, those whose angles depend on the position alone.
_ROPES = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(slots=True)
class Linear:
    weight: torch.Tensor  # [out, in], or packed
    bias: torch.Tensor | None
    is_packed: bool = False

    def pack(self) -> None:
        """Into oneDNN's own order, for CPUs. The old order stays only where somebody else holds it."""
        self.weight, self.is_packed = pack(self.weight), True


@dataclass(slots=True)
class Layer:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


def is_fusable(config: Any) -> bool:
    """Whether the model is of the family, without a feature that the loop does not know."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        getattr(config, "model_type", None) in FAMILY
        and getattr(config, "hidden_act", "silu") == "silu"
        and rope.get("rope_type", "default") in _ROPES
        and rope.get("partial_rotary_factor", 1.0) == 1.0
    )


@dataclass(slots=True)
class FusedWeights:
    """`cos_sin` is float32 [max_len, head_dim]: cosines, then sines, of each position."""

    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: Linear
    cos_sin: torch.Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    def pack(self) -> int:
        """Packs all linears for a CPU, and returns how many."""
        linears = [part for layer in self.layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        for linear in (*linears, self.head):
            linear.pack()
        return len(linears) + 1

    @classmethod
    def of(cls, model: Any, max_len: int) -> Self | None:
        """None when the model is not of the family."""
        config = model.config
        if not is_fusable(config):
            return None
        body = model.model
        attention = body.layers[0].self_attn
        return cls(
            embedding=body.embed_tokens.weight,
            layers=[_layer(layer) for layer in body.layers],
            norm=body.norm.weight,
            head=_linear(model.lm_head),
            cos_sin=_angles(body.rotary_emb, max_len, model.device),
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            eps=config.rms_norm_eps,
        )


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=_merge([attention.q_proj, attention.k_proj, attention.v_proj]),
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        out=_linear(attention.o_proj),
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=_merge([mlp.gate_proj, mlp.up_proj]),
        down=_linear(mlp.down_proj),
    )


def _linear(module: Any) -> Linear:
    return Linear(module.weight, module.bias)


def _merge(modules: list[Any]) -> Linear:
    """One linear of several with the same input. The modules keep views of it."""
    weight = torch.cat([m.weight for m in modules])
    bias = None if modules[0].bias is None else torch.cat([m.bias for m in modules])
    sizes = [m.weight.shape[0] for m in modules]
    for module, part in zip(modules, torch.split(weight, sizes), strict=True):
        module.weight.data = part
    if bias is not None:
        for module, part in zip(modules, torch.split(bias, sizes), strict=True):
            module.bias.data = part
    return Linear(weight, bias)


def _angles(rotary: Any, max_len: int, device: torch.device) -> torch.Tensor:
    positions = torch.arange(max_len, device=device).unsqueeze(0)
    cos, sin = rotary(torch.empty(0, dtype=torch.float32, device=device), positions)
    half = cos.shape[-1] // 2  # transformers repeats the halves
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], -1).contiguous()


class Ops(Protocol):
    """What one device does in its own way. Rows are tokens of the packed batch."""

    def begin(self, positions: torch.Tensor) -> None:
        """The positions of the step that follows, [tokens]."""
        ...

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor: ...

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor: ...

    def linear_add_norm(
        self, x: torch.Tensor, linear: Linear, residual: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Adds linear(x) to `residual` in place and gives the norm of the sum."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...

    def rotate(self, qkv: torch.Tensor, layer: Layer, index: int) -> torch.Tensor:
        """Norms of q and k where the model has them, and rope; what comes out is for `attend`."""
        ...

    def attend(self, qkv: torch.Tensor, index: int) -> torch.Tensor:
        """Paged attention of layer `index`: [tokens, heads * head_dim]."""
        ...


class FusedModel:
    def __init__(self, weights: FusedWeights, ops: Ops) -> None:
        self.weights = weights
        self.ops = ops

    def forward(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual, attention of the last layer) of all tokens, for `finish`; their KV is written."""
        residual, x = self.enter(token_ids)
        last = len(self.weights.layers) - 1
        for index in range(last):
            x = self.between(index, self.ops.attend(x, index), residual)
        return residual, self.ops.attend(x, last)

    def enter(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual, what the first attention takes)."""
        residual = F.embedding(token_ids, self.weights.embedding)
        first = self.weights.layers[0]
        return residual, self._into_attention(self.ops.norm(residual, first.input_norm), 0)

    def between(self, index: int, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """From the attention of layer `index`, not the last, to what the next one takes."""
        following = self.weights.layers[index + 1]
        return self._into_attention(self._out_of_attention(index, attended, residual, following.input_norm), index + 1)

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Logits of those tokens whose rows of the last attention and residual are given: what follows the last
        attention is wanted of few tokens of a prompt."""
        hidden = self._out_of_attention(len(self.weights.layers) - 1, attended, residual, self.weights.norm)
        return self.ops.linear(hidden, self.weights.head)

    def _out_of_attention(
        self, index: int, attended: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor
    ) -> torch.Tensor:
        ops, layer = self.ops, self.weights.layers[index]
        x = ops.linear_add_norm(attended, layer.out, residual, layer.post_norm)
        return ops.linear_add_norm(ops.silu_and_mul(ops.linear(x, layer.gate_up)), layer.down, residual, norm)

    def _into_attention(self, x: torch.Tensor, index: int) -> torch.Tensor:
        layer = self.weights.layers[index]
        return self.ops.rotate(self.ops.linear(x, layer.qkv), layer, index)


class TorchOps:
    """Ops in plain torch, rounding where transformers' own modules do."""

    def __init__(self, weights: FusedWeights, attention: AttentionBackend) -> None:
        self._attention = attention
        self._num_heads = weights.num_heads
        self._num_kv_heads = weights.num_kv_heads
        self._head_dim = weights.head_dim
        self._eps = weights.eps
        self._scaling = weights.head_dim**-0.5
        self._cos_sin = weights.cos_sin.to(weights.embedding.dtype)
        self._cos = self._sin = self._cos_sin

    def begin(self, positions: torch.Tensor) -> None:
        self._cos, self._sin = self._cos_sin[positions].unsqueeze(1).chunk(2, -1)  # [tokens, 1, head_dim / 2]

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        if linear.is_packed:
            return packed_linear(x, linear.weight, linear.bias)
        return F.linear(x, linear.weight, linear.bias)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return weight * wide.to(x.dtype)

    def linear_add_norm(
        self, x: torch.Tensor, linear: Linear, residual: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return self.norm(residual.add_(self.linear(x, linear)), weight)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def rotate(self, qkv: torch.Tensor, layer: Layer, index: int) -> torch.Tensor:
        heads = qkv.view(qkv.shape[0], -1, self._head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            end = self._num_heads + self._num_kv_heads
            heads[:, : self._num_heads] = self.norm(heads[:, : self._num_heads], layer.q_norm)
            heads[:, self._num_heads : end] = self.norm(heads[:, self._num_heads : end], layer.k_norm)
        first, second = heads[:, : self._num_heads + self._num_kv_heads].chunk(2, -1)
        turned = first * self._cos - second * self._sin
        second.copy_(second * self._cos + first * self._sin)
        first.copy_(turned)
        return heads

    def attend(self, qkv: torch.Tensor, index: int) -> torch.Tensor:
        sizes = [self._num_heads, self._num_kv_heads, self._num_kv_heads]
        q, k, v = torch.split(qkv.transpose(0, 1).unsqueeze(0), sizes, 1)  # [1, heads, tokens, head_dim]
        return self._attention.run(q, k, v, index, self._scaling).reshape(qkv.shape[0], -1)
