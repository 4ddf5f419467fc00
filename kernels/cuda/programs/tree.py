"""The tree over leaves that another kernel left in memory, and the rounding at its root."""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from rlk.kernels.cuda.programs.arithmetic import real, round_bf16


@triton.jit
def two(x, i, n, inside):
    """Leaves 0 and 1, n elements apart, and their sum."""
    return tl.load(x + i, mask=inside, other=0.0) + tl.load(x + n + i, mask=inside, other=0.0)


@triton.jit
def four(x, i, n, inside):
    """(0+1)+(2+3)."""
    return two(x, i, n, inside) + two(x + 2 * n, i, n, inside)


@triton.jit(do_not_specialize=["n"])
def tree_sum(x, out, n, LEAVES: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, ROUND: tl.constexpr):
    """out [n] of leaves x [LEAVES, n] fp32, LEAVES of 1, 2, 4 or 8; EVEN: BLOCK divides n; ROUND stores bf16."""
    size = tl.cast(n, tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = real(i, size, EVEN)
    if LEAVES == 1:
        total = tl.load(x + i, mask=inside, other=0.0)
    elif LEAVES == 2:
        total = two(x, i, size, inside)
    else:
        total = four(x, i, size, inside)
        if LEAVES == 8:
            total = total + four(x + 4 * size, i, size, inside)
    if ROUND:
        tl.store(out + i, round_bf16(total), mask=inside)
    else:
        tl.store(out + i, total, mask=inside)
