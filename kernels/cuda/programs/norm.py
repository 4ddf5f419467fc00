"""RMSNorm, forward and backward. A row is reduced in 16 interleaved chains and a tree over them, as on a CPU."""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from rlk.kernels.cuda.programs.arithmetic import round_bf16, tree, widen


@triton.jit
def tile(base, rows, columns, live, N: tl.constexpr):
    """[rows, columns] of a bf16 matrix N wide, widened; zero outside."""
    address = base + rows.to(tl.int64)[:, None] * N + columns[None, :]
    return widen(tl.load(address, mask=live[:, None] & (columns < N)[None, :], other=0.0))


@triton.jit(do_not_specialize=["count"])
def rmsnorm(x, w, y, rstd, eps, count, N: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """y = (x * rstd) * w; rstd = 1 / sqrt(mean(x^2) + eps), fp32, one a row."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = r < count
    sums = tl.zeros((ROWS, 16), tl.float32)
    for start in range(0, N, 16 * STEP):
        for j in tl.static_range(STEP):  # unrolled: the loads of STEP links of the chain are in flight together
            v = tile(x, r, start + 16 * j + tl.arange(0, 16), live, N)
            sums = sums + v * v
    mean = tl.div_rn(tree(sums, ROWS, 16), tl.full((ROWS,), N, tl.float32))
    inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    tl.store(rstd + r, inverse, mask=live)
    for start in range(0, N, BLOCK):
        c = start + tl.arange(0, BLOCK)
        gain = widen(tl.load(w + c, mask=c < N, other=0.0))
        out = round_bf16((tile(x, r, c, live, N) * inverse[:, None]) * gain[None, :])
        tl.store(y + r.to(tl.int64)[:, None] * N + c[None, :], out, mask=live[:, None] & (c < N)[None, :])


@triton.jit(do_not_specialize=["count"])
def rmsnorm_backward(dy, x, w, rstd, residual, dx, count, N: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
                     BLOCK: tl.constexpr, JOIN: tl.constexpr):  # fmt: skip
    """dx = rstd * (g - xhat * mean(g * xhat)), g = dy * w, xhat = x * rstd; JOIN adds `residual` before rounding."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = r < count
    inverse = tl.load(rstd + r, mask=live, other=0.0)[:, None]
    sums = tl.zeros((ROWS, 16), tl.float32)
    for start in range(0, N, 16 * STEP):
        for j in tl.static_range(STEP):
            c = start + 16 * j + tl.arange(0, 16)
            g = tile(dy, r, c, live, N) * widen(tl.load(w + c, mask=c < N, other=0.0))[None, :]
            sums = sums + g * (tile(x, r, c, live, N) * inverse)
    mean = tl.div_rn(tree(sums, ROWS, 16), tl.full((ROWS,), N, tl.float32))[:, None]
    for start in range(0, N, BLOCK):
        c = start + tl.arange(0, BLOCK)
        g = tile(dy, r, c, live, N) * widen(tl.load(w + c, mask=c < N, other=0.0))[None, :]
        d = inverse * (g - (tile(x, r, c, live, N) * inverse) * mean)
        if JOIN:
            d = tile(residual, r, c, live, N) + d
        tl.store(dx + r.to(tl.int64)[:, None] * N + c[None, :], round_bf16(d), mask=live[:, None] & (c < N)[None, :])


@triton.jit
def gains(dy, x, rstd, edges, out, N: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr, STEP: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """out [ranges, GROUPS, N]: chains of dy * (x * rstd) over the tokens of a range, then the HEADS of a group.

    dy, x [T, GROUPS, HEADS, N] bf16, rstd [T, GROUPS, HEADS] fp32, edges int64 [ranges, 2]. Grid: blocks of columns,
    groups, ranges.
    """
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    item = tl.program_id(2)
    low = tl.load(edges + 2 * item)
    links = (tl.load(edges + 2 * item + 1) - low) * HEADS
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, links, STEP):
        for j in tl.static_range(STEP):
            link = start + j
            row = ((low + link // HEADS) * GROUPS + group) * HEADS + link % HEADS
            inside = (c < N) & (link < links)
            a = widen(tl.load(dy + row * N + c, mask=inside, other=0.0))
            b = widen(tl.load(x + row * N + c, mask=inside, other=0.0))
            total = total + a * (b * tl.load(rstd + row, mask=link < links, other=0.0))
    tl.store(out + (item * GROUPS + group) * N + c, total, mask=c < N)
