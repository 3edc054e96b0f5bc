"""Decode attention in Triton against a plain softmax over gathered KV; on a CPU with TRITON_INTERPRET=1."""

import os

import pytest
import torch

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

from server.engine.attention_decode import attend_decode
from server.engine.kv_cache import KVCachePool, KVSpec

pytestmark = pytest.mark.gpu if DEVICE == "cuda" else []


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    "lengths",
    [[1], [400, 64, 65, 1], [600, 256, 257, *[7] * 7], [9000, 4200, *[7] * 31]],
    ids=["one", "few", "some", "many"],
)
def test_against_a_plain_softmax(lengths: list[int], window: int | None) -> None:
    heads, kv_heads, head_dim = 6, 2, 64
    generator = torch.Generator().manual_seed(3)
    counts = [-(-n // 16) for n in lengths]
    pool = KVCachePool(KVSpec(2, kv_heads, head_dim, torch.float32, 16), 1 + sum(counts), DEVICE)
    pool.data.copy_(torch.randn(pool.data.shape, generator=generator))
    blocks = torch.randperm(sum(counts), generator=generator) + 1
    starts = [sum(counts[:i]) for i in range(len(counts))]
    query = torch.randn(len(lengths), heads, head_dim, generator=generator).to(DEVICE)
    out = torch.full_like(query, float("nan"))
    numbers = [torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in ([n - 1 for n in lengths], starts)]
    attend_decode(query, pool.layer(1), *numbers, blocks.int().to(DEVICE), 0.125, window, out)
    for row, (length, start, count) in enumerate(zip(lengths, starts, counts, strict=True)):
        table = blocks[start : start + count].to(DEVICE)
        low = 0 if window is None else max(0, length - window)
        k, v = (t[table].transpose(1, 2).reshape(-1, kv_heads, head_dim)[low:length] for t in pool.layer(1))
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        probs = torch.softmax(torch.einsum("hd,nhd->hn", query[row], k) * 0.125, -1)
        torch.testing.assert_close(out[row], torch.einsum("hn,nhd->hd", probs, v), rtol=1e-2, atol=1e-2)
