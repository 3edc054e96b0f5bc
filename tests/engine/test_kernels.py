"""The Triton kernels against the torch ops that they replace; on a CPU with TRITON_INTERPRET=1."""

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

from server.engine import kernels
from server.engine.fused import FusedWeights, Layer, TorchOps
from server.engine.kv_cache import KVCachePool, KVSpec

pytestmark = pytest.mark.gpu if DEVICE == "cuda" else []
HEADS, KV_HEADS, EPS = 6, 2, 1e-5


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


def torch_ops(head_dim: int, attention: Any = None) -> TorchOps:
    weights = FusedWeights(
        random(4, 4), [], random(4), None, random(300, head_dim), HEADS, KV_HEADS, head_dim, EPS  # type: ignore[arg-type]
    )  # fmt: skip
    return TorchOps(weights, attention)


@pytest.mark.parametrize("size", [64, 100, 4096])
def test_norms(size: int) -> None:
    x, residual, weight = random(5, size), random(5, size), random(size)
    ops = torch_ops(64)
    torch.testing.assert_close(kernels.norm(x, weight, EPS), ops.norm(x, weight), rtol=1e-4, atol=1e-5)
    mine, theirs = residual.clone(), residual.clone()
    normed = kernels.add_norm(x, mine, weight, EPS)
    torch.testing.assert_close(normed, ops.norm(theirs.add_(x), weight), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("size", [96, 1500])
def test_silu_and_mul(size: int) -> None:
    x = random(3, 2 * size)
    torch.testing.assert_close(kernels.silu_and_mul(x), torch_ops(64).silu_and_mul(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rotate_and_write(head_dim: int, normed: bool) -> None:
    pool = KVCachePool(KVSpec(3, KV_HEADS, head_dim, torch.float32, 16), 5, DEVICE)
    before = pool.data.clone()
    slots = torch.tensor([17, 16, 79, 0], device=DEVICE)
    positions = torch.tensor([1, 0, 299, 7], device=DEVICE)
    qkv = random(4, (HEADS + 2 * KV_HEADS) * head_dim)
    norms = (random(head_dim), random(head_dim)) if normed else None
    ops = torch_ops(head_dim)
    ops.begin(positions)
    layer = Layer(None, None, *(norms or (None, None)), None, None, None, None)  # type: ignore[arg-type]
    expected = ops.rotate(qkv.clone(), layer, 1)
    queries = torch.empty(4, HEADS * head_dim, device=DEVICE)
    where = (positions.int(), slots.int(), pool.layer(1))
    kernels.rotate_and_write(qkv, ops._cos_sin, *where, HEADS, norms, EPS, queries)
    q, k, v = expected.split([HEADS, KV_HEADS, KV_HEADS], 1)
    torch.testing.assert_close(queries.view(4, -1, head_dim), q, rtol=1e-4, atol=1e-5)
    pool_k, pool_v = pool.layer(1)
    torch.testing.assert_close(pool_k[slots // 16, :, slots % 16], k, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pool_v[slots // 16, :, slots % 16], v)
    pool_k[slots // 16, :, slots % 16] = 0
    pool_v[slots // 16, :, slots % 16] = 0
    torch.testing.assert_close(pool.data, before)  # nothing else was touched


def test_write_kv_takes_any_strides() -> None:
    pool = KVCachePool(KVSpec(2, KV_HEADS, 64, torch.float32, 16), 4, DEVICE)
    slots = torch.tensor([33, 5, 63], device=DEVICE)
    key, value = random(3, KV_HEADS, 64).transpose(0, 1), random(KV_HEADS, 3, 64)
    kernels.write_kv(key, value, slots.int(), pool.layer(1))
    pool_k, pool_v = pool.layer(1)
    torch.testing.assert_close(pool_k[slots // 16, :, slots % 16], key.transpose(0, 1))
    torch.testing.assert_close(pool_v[slots // 16, :, slots % 16], value.transpose(0, 1))


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_linear_in_parts_goes_into_the_norm(rows: int) -> None:
    x, weight, residual, scale = random(rows, 1024), random(128, 1024), random(rows, 128), random(128)
    parts = kernels.linear_parts(x, weight)
    assert parts is not None
    expected = residual + x @ weight.T
    normed = kernels.add_norm(parts, residual, scale, EPS)
    torch.testing.assert_close(residual, expected, rtol=1e-2, atol=0.1)  # tf32
    torch.testing.assert_close(normed, torch_ops(64).norm(residual, scale), rtol=1e-4, atol=1e-5)
    assert kernels.linear_parts(random(17, 1024), weight) is None
    assert kernels.linear_parts(x[:, :600], weight[:, :600]) is None


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("size_out", "size_in"), [(40, 1024), (16384, 256)])
def test_linear_of_one_row(size_out: int, size_in: int, biased: bool) -> None:
    x, weight, bias = random(1, size_in), random(size_out, size_in), random(size_out) if biased else None
    out = kernels.linear_one_row(x, weight, bias)
    assert out is not None
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, bias), rtol=1e-3, atol=1e-3)
    assert kernels.linear_one_row(random(2, size_in), weight, bias) is None
    assert kernels.linear_one_row(x[:, :100], weight[:, :100], bias) is None
