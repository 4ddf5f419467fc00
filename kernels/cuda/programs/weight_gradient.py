"""Gradients of weights: for each sample the tree over virtual slices, a slice being a chain over its tokens."""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from rlk.kernels.cuda.programs.arithmetic import dot, hold, real
from rlk.kernels.cuda.programs.gemm import place, within


@triton.jit
def slice_chain(dy, x, left, right, edges, dy_t, x_t, BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr):
    """Tokens edges[0] to edges[1], ascending, padded with zero rows.

    dy, x: addresses of a tile's first element at token 0; left [BM, BT], right [BT, BN]: places of the others, int32.
    """
    low = tl.load(edges)
    high = tl.load(edges + 1)
    i = tl.arange(0, BT)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(low, high, BT):
        live = start + i < high
        a = tl.load(dy + start * dy_t + left, mask=live[None, :], other=0.0)
        b = tl.load(x + start * x_t + right, mask=live[:, None], other=0.0)
        acc = dot(a, b, acc)
    return acc


@triton.jit
def two_slices(dy, x, left, right, edges, dy_t, x_t, BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr):
    """0+1."""
    first = slice_chain(dy, x, left, right, edges, dy_t, x_t, BM, BN, BT)
    return hold(first + slice_chain(dy, x, left, right, edges + 2, dy_t, x_t, BM, BN, BT))


@triton.jit
def four_slices(dy, x, left, right, edges, dy_t, x_t, BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr):
    """(0+1)+(2+3)."""
    half = two_slices(dy, x, left, right, edges, dy_t, x_t, BM, BN, BT)
    return hold(half + two_slices(dy, x, left, right, edges + 4, dy_t, x_t, BM, BN, BT))


@triton.jit(do_not_specialize=["n", "k", "shards", "edges_s"])
def weight_gradients(dy, x, edges, out, n, k, shards, dy_t, x_t, x_s, edges_s, SLICES: tl.constexpr, BM: tl.constexpr,
                     BN: tl.constexpr, BT: tl.constexpr, GROUP: tl.constexpr, EVEN_M: tl.constexpr,
                     EVEN_N: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """out [samples, shards, n, k] of dy [T, n] and x [T, shards, k], rows contiguous; edges int64, SLICES pairs of
    tokens a sample.

    The pairs of a sample lie edges_s apart. ADD joins the other half of a tree, which out holds: eight slices are done
    four by four, since four partials of a wide tile fit in the registers and eight do not. The second grid axis is the
    sample.
    """
    across = tl.cdiv(k, BN)
    im, inn = place(n, shards * across * BN, BM, BN, GROUP)
    shard, inn = inn // across, inn % across
    sample = tl.program_id(1).to(tl.int64)
    rm = im * BM + tl.arange(0, BM)
    rn = inn * BN + tl.arange(0, BN)
    i = tl.arange(0, BT)
    left = i[None, :] * dy_t + within(rm, n, EVEN_M)[:, None]
    right = i[:, None] * x_t + within(rn, k, EVEN_N)[None, :]
    e, x = edges + sample * edges_s, x + shard * x_s
    if SLICES == 1:
        total = slice_chain(dy, x, left, right, e, dy_t, x_t, BM, BN, BT)
    elif SLICES == 2:
        total = two_slices(dy, x, left, right, e, dy_t, x_t, BM, BN, BT)
    else:
        total = four_slices(dy, x, left, right, e, dy_t, x_t, BM, BN, BT)
    first = ((sample * shards + shard) * n + im * BM) * k + inn * BN
    at = out + first + tl.arange(0, BM)[:, None] * k + tl.arange(0, BN)[None, :]
    inside = real(rm, n, EVEN_M)[:, None] & real(rn, k, EVEN_N)[None, :]
    if ADD:
        total = tl.load(at, mask=inside, other=0.0) + total
    tl.store(at, total, mask=inside)
