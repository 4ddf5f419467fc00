"""CUDA form of attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from rlk.kernels.attention import LOG2_E
from rlk.kernels.cuda import choice, flash, launch
from rlk.kernels.cuda.launch import take
from rlk.kernels.cuda.programs import attention as forward
from rlk.kernels.cuda.programs import attention_backward as backward
from rlk.kernels.cuda.tree import tree

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
ROWS, KEYS = 64, 64  # KEYS is part of the numeric program; ROWS and four warps keep a row within one warp
# Backward, tiles are free: no sum over a row is left to the layout. These are the largest without spilled registers.
LEAF_ROWS, LEAF_KEYS = 32, 128


def describe() -> str:
    """Which implementation runs."""
    return f"{launch.PLACE}: {choice.describe('RLK_ATTENTION')}"


def softmax_scale(head_dim: int) -> float:
    """1 / sqrt(D)."""
    return 1.0 / math.sqrt(head_dim)


def segments(positions: torch.Tensor, first: torch.Tensor, key_first: torch.Tensor) -> flash.Segments | None:
    """See rlk.kernels.attention."""
    return flash.Segments.of(positions, first, key_first) if choice.chosen("RLK_ATTENTION") == "fa3" else None


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    first: torch.Tensor,
    key_first: torch.Tensor,
    segments: flash.Segments | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See rlk.kernels.attention."""
    t, h, d = q.shape
    if choice.chosen("RLK_ATTENTION") == "fa3":
        return flash.packed(q, k, v, segments or flash.Segments.of(positions, first, key_first), softmax_scale(d))
    out, lse = torch.empty_like(take(q, BF16)), q.new_empty(t, h, dtype=F32)
    unused = first  # addresses that are not read
    launch.run(
        forward.attention, _grid(q, k.shape[1], first), q, take(k, BF16), take(v, BF16), out, lse, take(first, I64),
        take(key_first, I64), take(positions, I64), unused, unused, first.numel() - 1, 0, softmax_scale(d) * LOG2_E,
        **_constants(h, k.shape[1], d), ROWS=ROWS, KEYS=KEYS, PAGE=0,
    )  # fmt: skip
    return out, lse


def paged(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_first: torch.Tensor,
    seq_lens: torch.Tensor,
) -> torch.Tensor:
    """See rlk.kernels.attention."""
    _, h, d = q.shape
    if choice.chosen("RLK_ATTENTION") == "fa3":
        return flash.paged(q, cache, block_table, query_first, seq_lens, softmax_scale(d))
    _, kv_heads, page, _ = take(cache, BF16).shape
    out, unused = torch.empty_like(take(q, BF16)), query_first
    launch.run(
        forward.attention, _grid(q, kv_heads, query_first), q, cache, cache[..., d:], out, unused,
        take(query_first, I32), unused, unused, take(block_table, I32, contiguous=False), take(seq_lens, I32),
        query_first.numel() - 1, block_table.stride(0), softmax_scale(d) * LOG2_E, **_constants(h, kv_heads, d),
        ROWS=ROWS, KEYS=KEYS, PAGE=page,
    )  # fmt: skip
    return out


def write_pages(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """See rlk.kernels.attention."""
    (t, heads, d), page = k.shape, take(cache, BF16).shape[2]
    for x in (k, v):
        if take(x, BF16, contiguous=False).stride(2) != 1:
            raise TypeError(f"a head's row must be contiguous, got strides {x.stride()}")
    launch.run(
        forward.write_pages, (t,), k, v, cache, slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1), HK=heads,
        D=d, PAGE=page, HEADS=launch.power(heads), WIDTH=launch.power(d),
    )  # fmt: skip


def packed_gradients(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    positions: torch.Tensor, first: torch.Tensor, key_first: Sequence[int],
    slices: Sequence[Sequence[tuple[int, int]]],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See rlk.kernels.attention."""
    dq, dkv = torch.empty_like(q), q.new_empty(k.shape[0], 2, *k.shape[1:], dtype=F32)
    delta = _row_dots(dout, out)
    _query_gradient(dout, q, k, v, lse, delta, take(first, I64), launch.ranges(key_first, q.device), positions, dq)
    edges = launch.ranges(slices, q.device)
    for i in range(len(slices)):
        keys = slice(key_first[i], key_first[i + 1])
        leaves = q.new_empty(len(slices[i]), *dkv[keys].shape, dtype=F32)
        _key_gradients(
            dout, q, k[keys], v[keys], lse, delta, positions, edges[i], leaves[:, :, 0], leaves[:, :, 1], False
        )
        dkv[keys] = tree(leaves)
    return dq, dkv


def packed_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    positions: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor,
) -> None:  # fmt: skip
    """See rlk.kernels.attention."""
    delta = _row_dots(dout, out)
    rows, keys = (launch.ranges((0, n), q.device) for n in (q.shape[0], k.shape[0]))
    _query_gradient(dout, q, k, v, lse, delta, rows, keys, positions, dq)
    _key_gradients(dout, q, k, v, lse, delta, positions, rows[None], take(dk, F32)[None], take(dv, F32)[None], True)


def _row_dots(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """sum(dout * out) of each row and head, fp32 [T, H]."""
    t, h, d = out.shape
    delta = out.new_empty(t, h, dtype=F32)
    grid = (launch.tiles(t * h, 8),)
    launch.run(backward.row_dots, grid, take(dout, BF16), take(out, BF16), delta, t * h, D=d, ROWS=8)
    return delta


def _query_gradient(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    first: torch.Tensor, key_first: torch.Tensor, positions: torch.Tensor, dq: torch.Tensor,
) -> None:  # fmt: skip
    scale = softmax_scale(q.shape[-1])
    launch.run(
        backward.query_gradient, _grid(q, k.shape[1], first), dout, take(q, BF16), take(k, BF16), take(v, BF16),
        take(lse, F32), delta, first, key_first, take(positions, I64), take(dq, BF16), first.numel() - 1,
        scale * LOG2_E, scale, **_constants(q.shape[1], k.shape[1], q.shape[2]), ROWS=ROWS, KEYS=KEYS, stages=2,
    )  # fmt: skip


def _key_gradients(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    positions: torch.Tensor, edges: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, keep: bool,
) -> None:  # fmt: skip
    """dk, dv: [slices, keys, HK, D] fp32, heads contiguous; `keep` continues the chains that they hold."""
    (n, kv_heads, d), h = k.shape, q.shape[1]
    if q.numel() >= 1 << 31:
        raise ValueError(f"{q.numel()} elements of q: the backward program indexes fewer than 2^31; lower the budget")
    launch.run(
        backward.key_gradients, (launch.tiles(n, LEAF_KEYS), kv_heads, edges.shape[0]), dout, take(q, BF16),
        take(k, BF16), take(v, BF16), take(lse, F32), delta, take(positions, I64), edges, dk, dv, n,
        0 if dk.shape[0] == 1 else dk.stride(0), dk.stride(1), softmax_scale(d) * LOG2_E, **_constants(h, kv_heads, d),
        ROWS=LEAF_ROWS, KEYS=LEAF_KEYS, CONTINUE=keep, warps=8, stages=2,
    )  # fmt: skip


def _constants(heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    """Compile-time constants, the same for every program here and every number of rows."""
    return {"H": heads, "HK": kv_heads, "D": head_dim}


def _grid(q: torch.Tensor, kv_heads: int, first: torch.Tensor) -> tuple[int, int]:
    """Room for every tile of every sequence: see programs.attention.locate."""
    if first.numel() < 2 or not q.shape[0]:
        return 0, 0
    return q.shape[0] * (q.shape[1] // kv_heads) // ROWS + first.numel() - 1, kv_heads
