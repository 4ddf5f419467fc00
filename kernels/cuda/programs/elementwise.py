"""Residual sums, rotary embedding, SwiGLU, and the embedding's gradient."""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from rlk.kernels.cuda.programs.arithmetic import real, round_bf16, widen


@triton.jit(do_not_specialize=["n"])
def add(a, b, out, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """out = a + b. EVEN: BLOCK divides n."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = real(i, n, EVEN)
    total = widen(tl.load(a + i, mask=inside, other=0.0)) + widen(tl.load(b + i, mask=inside, other=0.0))
    tl.store(out + i, round_bf16(total), mask=inside)


@triton.jit
def rope(x, cos, sin, positions, y, sign, H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
    """Rotates the halves of every head of one token; sign -1 rotates back. HEADS, HALF: powers of two."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    inside = (h < H)[:, None] & (i < D // 2)[None, :]
    low = (t * H + h)[:, None] * D + i[None, :]
    p = tl.load(positions + t) * (D // 2)
    c = tl.load(cos + p + i, mask=i < D // 2, other=0.0)[None, :]
    s = sign * tl.load(sin + p + i, mask=i < D // 2, other=0.0)[None, :]
    a = widen(tl.load(x + low, mask=inside, other=0.0))
    b = widen(tl.load(x + low + D // 2, mask=inside, other=0.0))
    tl.store(y + low, round_bf16(a * c - b * s), mask=inside)
    tl.store(y + low + D // 2, round_bf16(b * c + a * s), mask=inside)


@triton.jit
def sigmoid(g):
    """1 / (1 + exp(-g)), the division correctly rounded."""
    return tl.div_rn(tl.full(g.shape, 1.0, tl.float32), 1.0 + tl.exp(0.0 - g))


@triton.jit
def swiglu(gate_up, y, F: tl.constexpr, BLOCK: tl.constexpr):
    """silu(gate) * up; a row of gate_up is [gate | up], F each. Grid: rows, blocks of columns."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = real(c, F, F % BLOCK == 0)
    at = gate_up + row * (2 * F) + c
    g = widen(tl.load(at, mask=inside, other=0.0))
    u = widen(tl.load(at + F, mask=inside, other=0.0))
    tl.store(y + row * F + c, round_bf16((g * sigmoid(g)) * u), mask=inside)


@triton.jit
def swiglu_backward(dy, gate_up, d, F: tl.constexpr, BLOCK: tl.constexpr):
    """Gradients of gate and up, in the layout of gate_up. Grid: rows, blocks of columns."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = real(c, F, F % BLOCK == 0)
    at = row * (2 * F) + c
    g = widen(tl.load(gate_up + at, mask=inside, other=0.0))
    u = widen(tl.load(gate_up + at + F, mask=inside, other=0.0))
    e = widen(tl.load(dy + row * F + c, mask=inside, other=0.0))
    s = sigmoid(g)
    tl.store(d + at, round_bf16((e * u) * (s + (g * s) * (1.0 - s))), mask=inside)
    tl.store(d + at + F, round_bf16(e * (g * s)), mask=inside)


@triton.jit(do_not_specialize=["count", "height"])
def embedding_leaf(dx, order, rows, out, count, height, N: tl.constexpr, BLOCK: tl.constexpr):
    """Adds rows of dx [count, N] to out [height, N], in token order.

    rows int64 [count]: destinations, sorted; order int64: the token of each, ascending within one destination. The
    first entry of a destination does all of its additions, so nothing is atomic. Grid: entries, blocks of columns.
    """
    e = tl.program_id(0)
    row = tl.load(rows + e)
    before = tl.load(rows + e - 1, mask=e > 0, other=-1)
    if (row >= 0) & (row < height) & (row != before):
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        same = row
        while same == row:
            token = tl.load(order + e)
            total = total + widen(tl.load(dx + token * N + c, mask=c < N, other=0.0))
            e += 1
            same = tl.load(rows + e, mask=e < count, other=-1)
        tl.store(out + row * N + c, total, mask=c < N)
