"""From a described step to logits: one Forward for each way a model can run.

`TransformersForward` takes any model that goes through our attention; `FusedForward` is the loop of `fused` in torch.
CUDA brings its own for the Llama family (`server.engine.graphs`), and only then are FlashInfer and Triton imported.
"""

import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import torch

from server.device import on_device
from server.engine.attention import AttentionBackend, BatchMeta, token_ids
from server.engine.attention_torch import TorchAttention
from server.engine.fused import FusedModel, FusedWeights, TorchOps
from server.engine.kv_cache import KVCachePool
from server.errors import StartError


class Forward(Protocol):
    def logits(self, meta: BatchMeta, keep: list[int]) -> torch.Tensor | None:
        """Gives the device a step to compute. Logits [len(keep), vocab] of those tokens of the packed batch, in the
        order of `keep`, valid until the next step; None if `keep` is empty."""
        ...

    def prepare(self, max_len: int, progress: Callable[[str, float], None]) -> None:
        """Whatever makes later steps faster, once the pool is the one to serve from."""
        ...


class TransformersForward:
    def __init__(self, model: Any, attention: AttentionBackend, device: torch.device) -> None:
        self._model = model
        self._attention = attention
        self._device = device

    def logits(self, meta: BatchMeta, keep: list[int]) -> torch.Tensor | None:
        self._attention.plan(meta)
        inputs = {
            "input_ids": token_ids(meta, self._device).unsqueeze(0),
            "position_ids": on_device(meta.positions, torch.long, self._device).unsqueeze(0),
            "use_cache": False,
            "paged": self._attention,
        }
        if not keep:
            self._model.base_model(**inputs)
            return None
        kept = on_device(keep, torch.long, self._device)
        return self._model(**inputs, logits_to_keep=kept).logits[0]  # type: ignore[no-any-return]

    def prepare(self, max_len: int, progress: Callable[[str, float], None]) -> None:
        pass


class FusedForward:
    def __init__(self, weights: FusedWeights, attention: AttentionBackend, device: torch.device) -> None:
        self._attention = attention
        self._device = device
        self._ops = TorchOps(weights, attention)
        self._model = FusedModel(weights, self._ops)

    def logits(self, meta: BatchMeta, keep: list[int]) -> torch.Tensor | None:
        self._attention.plan(meta)
        self._ops.begin(torch.tensor(meta.positions, device=self._device))
        residual, attended = self._model.forward(token_ids(meta, self._device))
        if not keep:
            return None
        if keep != list(range(len(meta.token_ids))):
            kept = torch.tensor(keep, device=self._device)
            residual, attended = residual[kept], attended[kept]
        return self._model.finish(attended, residual)

    def prepare(self, max_len: int, progress: Callable[[str, float], None]) -> None:
        pass


def require_cuda(device: torch.device, dtype: torch.dtype) -> None:
    """Refuses a CUDA worker that could not run, before its weights are loaded."""
    if not torch.cuda.is_available():
        raise StartError(f"device {device}: torch {torch.__version__} sees no CUDA device")
    missing = [name for name in ("flashinfer", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        raise StartError(
            f"device {device} needs {' and '.join(missing)}, not installed here", help="pip install 'pdctl[cuda]'"
        )
    if dtype == torch.float32:
        raise StartError("FlashInfer has no float32 attention", help="set model.dtype to bfloat16 or float16")


def make_forward(model: Any, weights: FusedWeights | None, pool: KVCachePool, max_running: int) -> Forward:
    """The fastest way to run this model on the device of `pool`."""
    device = pool.data.device
    if device.type == "cuda":
        from server.engine.graphs import make_cuda_forward

        return make_cuda_forward(model, weights, pool, max_running)
    attention = TorchAttention(pool)
    if weights is None:
        return TransformersForward(model, attention, device)
    return FusedForward(weights, attention, device)
