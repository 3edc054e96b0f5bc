# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Triton kernels of the CUDA path: what stands between two matrix products or before attention, each one pass.

Imported on CUDA only. Results are rounded where transformers' modules round, so that bfloat16 logits stay as close as
sums allow. Row i is token i of the packed batch.
"""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def _add_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, rows, size, eps,
    PARTS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    mask = at < size
    x = tl.load(x_ptr + row + at, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + part * rows * size + row + at, mask=mask, other=0.0)
    x = x.to(out_ptr.dtype.element_ty)
    if ADD:
        residual = tl.load(residual_ptr + row + at, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row + at, x, mask=mask)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0)
    normed = (wide * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row + at, normed.to(x.dtype), mask=mask)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _norm(x.unsqueeze(0), x, weight, eps, False)


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x to `residual` in place; the norm of the sum. x is [rows, size], or the [parts, rows, size] of
    `linear_parts`."""
    return _norm(x if x.dim() == 3 else x.unsqueeze(0), residual, weight, eps, True)


def _norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, add: bool) -> torch.Tensor:
    parts, rows, size = x.shape
    out = torch.empty_like(residual)
    block = triton.next_power_of_2(size)
    warps = min(16, max(1, block // 512))
    _add_norm_kernel[(rows,)](
        x, residual, weight, out, rows, size, eps, PARTS=parts, ADD=add, BLOCK=block, num_warps=warps
    )
    return out


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    gate = tl.load(x_ptr + row * 2 * size + at, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * 2 * size + size + at, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    gate = (wide * tl.sigmoid(wide)).to(gate.dtype)
    tl.store(out_ptr + row * size + at, gate * up, mask=mask)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    block = 1024
    _silu_and_mul_kernel[(rows, triton.cdiv(size, block))](x, out, size, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _rotated(first, second, cos, sin, weight_ptr, half_at, mask, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """Halves of some heads [heads, BLOCK_HALF], normed if the model does, and turned."""
    dtype = first.dtype
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        weight_a = tl.load(weight_ptr + half_at, mask=mask, other=0.0).to(tl.float32)[None, :]
        weight_b = tl.load(weight_ptr + HALF + half_at, mask=mask, other=0.0).to(tl.float32)[None, :]
        a = ((a * scale).to(dtype).to(tl.float32) * weight_a).to(dtype).to(tl.float32)
        b = ((b * scale).to(dtype).to(tl.float32) * weight_b).to(dtype).to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit
def _rotate_and_write_kernel(
    qkv_ptr, q_out_ptr, cos_sin_ptr, positions_ptr, slots_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, eps, num_kv_heads,
    stride_block, stride_head,
    GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One token and one KV head: turns its queries, turns K and writes K and V into the pool."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK_HALF)
    mask = at < HALF
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * 2 * HALF + at, mask=mask, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * 2 * HALF + HALF + at, mask=mask, other=0.0)[None, :]

    row = qkv_ptr + token * (GROUP + 2) * num_kv_heads * 2 * HALF
    group = tl.arange(0, BLOCK_GROUP)
    q = row + (head * GROUP + group[:, None]) * 2 * HALF + at[None, :]
    q_mask = (group[:, None] < GROUP) & mask[None, :]
    a, b = _rotated(
        tl.load(q, mask=q_mask, other=0.0), tl.load(q + HALF, mask=q_mask, other=0.0),
        cos, sin, q_norm_ptr, at, mask, eps, HALF, NORM,
    )  # fmt: skip
    to = q_out_ptr + token * GROUP * num_kv_heads * 2 * HALF + (head * GROUP + group[:, None]) * 2 * HALF + at[None, :]
    tl.store(to, a, mask=q_mask)
    tl.store(to + HALF, b, mask=q_mask)

    one = tl.arange(0, 1)[:, None]  # K as a group of one head
    k = row + (GROUP * num_kv_heads + head) * 2 * HALF + one + at[None, :]
    k_mask = (one == 0) & mask[None, :]
    a, b = _rotated(
        tl.load(k, mask=k_mask, other=0.0), tl.load(k + HALF, mask=k_mask, other=0.0),
        cos, sin, k_norm_ptr, at, mask, eps, HALF, NORM,
    )  # fmt: skip
    slot = tl.load(slots_ptr + token).to(tl.int64)
    place = (slot // BLOCK_SIZE) * stride_block + head * stride_head + (slot % BLOCK_SIZE) * 2 * HALF
    tl.store(k_ptr + place + one + at[None, :], a, mask=k_mask)
    tl.store(k_ptr + place + HALF + one + at[None, :], b, mask=k_mask)
    v = row + ((GROUP + 1) * num_kv_heads + head) * 2 * HALF
    tl.store(v_ptr + place + at, tl.load(v + at, mask=mask), mask=mask)
    tl.store(v_ptr + place + HALF + at, tl.load(v + HALF + at, mask=mask), mask=mask)


def rotate_and_write(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    q_out: torch.Tensor,
) -> None:
    """`qkv` is [tokens, (heads + 2 kv_heads) * head_dim], contiguous; turned queries go to `q_out`, contiguous too.
    `kv` are the views of `KVCachePool.layer`."""
    k, v = kv
    _, num_kv_heads, block_size, head_dim = k.shape
    group = num_heads // num_kv_heads
    q_norm, k_norm = norms or (qkv, qkv)
    _rotate_and_write_kernel[(qkv.shape[0], num_kv_heads)](
        qkv, q_out, cos_sin, positions, slots, k, v, q_norm, k_norm, eps, num_kv_heads, k.stride(0), k.stride(1),
        GROUP=group, BLOCK_GROUP=triton.next_power_of_2(group), HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2), BLOCK_SIZE=block_size, NORM=norms is not None, num_warps=1,
    )  # fmt: skip


@triton.jit
def _write_kernel(
    key_ptr, value_ptr, slots_ptr, k_ptr, v_ptr, key_token, key_head, value_token, value_head, stride_block,
    stride_head, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK_DIM)
    mask = at < DIM
    slot = tl.load(slots_ptr + token).to(tl.int64)
    to = (slot // BLOCK_SIZE) * stride_block + head * stride_head + (slot % BLOCK_SIZE) * DIM + at
    tl.store(k_ptr + to, tl.load(key_ptr + token * key_token + head * key_head + at, mask=mask), mask=mask)
    tl.store(v_ptr + to, tl.load(value_ptr + token * value_token + head * value_head + at, mask=mask), mask=mask)


def write_kv(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Writes [kv_heads, tokens, head_dim] keys and values, any strides of heads and tokens, into their slots."""
    k, v = kv
    _, num_kv_heads, block_size, head_dim = k.shape
    _write_kernel[(slots.shape[0], num_kv_heads)](
        key, value, slots, k, v, key.stride(1), key.stride(0), value.stride(1), value.stride(0),
        k.stride(0), k.stride(1),
        DIM=head_dim, BLOCK_DIM=triton.next_power_of_2(head_dim), BLOCK_SIZE=block_size, num_warps=1,
    )  # fmt: skip


# -- products with few rows -------------------------------------------------------------------------------------------
#
# A decode step reads every weight once for a few rows; cuBLAS leaves 5 to 40 % of the bandwidth unused there (measured
# on an H200: docs/benchmarks.md). Weights are loaded with evict_first: nothing reads them again in this step.

_PARTS = 4
MAX_PART_ROWS = 16


@triton.jit
def _one_row_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, size_in, BIAS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr
):  # fmt: skip
    at_out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    at_in = tl.arange(0, BLOCK_IN)
    weights = weight_ptr + at_out[:, None].to(tl.int64) * size_in + at_in[None, :]
    sums = tl.zeros((BLOCK_OUT, BLOCK_IN), dtype=tl.float32)
    for start in range(0, size_in, BLOCK_IN):
        weight = tl.load(weights + start, eviction_policy="evict_first").to(tl.float32)
        sums += weight * tl.load(x_ptr + start + at_in).to(tl.float32)[None, :]
    result = tl.sum(sums, 1)
    if BIAS:
        result += tl.load(bias_ptr + at_out).to(tl.float32)
    tl.store(out_ptr + at_out, result.to(out_ptr.dtype.element_ty))


def linear_one_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """[1, in] x [out, in]; None for a shape it is not made for."""
    size_out, size_in = weight.shape
    block_out, block_in = (16, 256) if size_out >= 16384 else (8, 512)
    if x.shape[0] != 1 or size_out % block_out or size_in % block_in:
        return None
    out = torch.empty(1, size_out, dtype=x.dtype, device=x.device)
    _one_row_kernel[(size_out // block_out,)](
        x, weight, x if bias is None else bias, out, size_in,
        BIAS=bias is not None, BLOCK_OUT=block_out, BLOCK_IN=block_in, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _parts_kernel(
    x_ptr, weight_ptr, out_ptr, rows, size_out, size_in, part_in,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """Weights are the left operand: their rows fill the matrix unit's 64, the few rows of x are its columns."""
    at_out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    part = tl.program_id(1)
    row = tl.arange(0, BLOCK_ROWS)
    at_in = part * part_in + tl.arange(0, BLOCK_IN)
    mask = row[None, :] < rows
    weights = weight_ptr + at_out[:, None].to(tl.int64) * size_in + at_in[None, :]
    columns = x_ptr + row[None, :] * size_in + at_in[:, None]
    sums = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
    for start in range(0, part_in, BLOCK_IN):
        weight = tl.load(weights + start, eviction_policy="evict_first")
        sums = tl.dot(weight, tl.load(columns + start, mask=mask, other=0.0), sums)
    tl.store(out_ptr + (part * rows + row[None, :]) * size_out + at_out[:, None], sums, mask=mask)


def linear_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """[rows, in] x [out, in] in float32 parts [parts, rows, out] that `add_norm` sums: with a few output columns only,
    one pass over `in` does not fill the device. None for a shape it is not made for."""
    rows, (size_out, size_in) = x.shape[0], weight.shape
    block_out, block_in = 64, 128
    if rows > MAX_PART_ROWS or size_out % block_out or size_in % (_PARTS * block_in):
        return None
    out = torch.empty(_PARTS, rows, size_out, dtype=torch.float32, device=x.device)
    _parts_kernel[(size_out // block_out, _PARTS)](
        x, weight, out, rows, size_out, size_in, size_in // _PARTS,
        BLOCK_ROWS=MAX_PART_ROWS, BLOCK_OUT=block_out, BLOCK_IN=block_in, num_stages=4, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _take_drawn_kernel(ids_ptr, drawn_ptr, rows, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at, mask=at < rows, other=0)
    is_coming = ids < 0
    drawn = tl.load(drawn_ptr + (-1 - ids), mask=is_coming, other=0)
    tl.store(ids_ptr + at, drawn.to(tl.int32), mask=is_coming)


def take_drawn(ids: torch.Tensor, drawn: torch.Tensor, rows: int) -> None:
    """Of the first rows of int32 `ids`, each -1 - i becomes the i-th of int64 `drawn`."""
    block = 128
    _take_drawn_kernel[(triton.cdiv(rows, block),)](ids, drawn, rows, BLOCK=block, num_warps=1)
