"""Matrix products: chains in ascending order along the inner axis, and trees over such chains kept in registers.

A chain is a sequence of tensor-core steps of 16 along the inner axis, from zero or from what another chain left. Tiles,
warps, operand order and the depth of the software pipeline change the speed and no bit: the start-up proof holds them
to `plain_chain`. Inner axes are padded with zeros, which a chain adds without effect.
"""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from rlk.kernels.cuda.programs.arithmetic import dot, hold, real, round_bf16


@triton.jit
def place(m, n, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """This program's tile of an [m, n] result; neighbours share rows of the right operand while they are in the L2."""
    pid = tl.program_id(0)
    wide = GROUP * tl.cdiv(n, BN)
    first = pid // wide * GROUP
    rows = tl.minimum(tl.cdiv(m, BM) - first, GROUP)
    return first + pid % wide % rows, pid % wide // rows


@triton.jit
def within(i, size, EVEN: tl.constexpr):
    """Indices that may be read: those past the end wrap around. EVEN: there are none, so wide loads are possible."""
    return i if EVEN else i % size


@triton.jit
def one(a, b, left, right, k, a_k, b_k, acc, BK: tl.constexpr, EVEN: tl.constexpr):
    """A chain. a, b: addresses of a tile's first element; left, right: places of the others, int32.

    One address and small offsets: a pointer for each element of each leaf's tile would not fit in the registers.
    """
    i = tl.arange(0, BK)
    for start in range(0, k, BK):
        if EVEN:
            x = tl.load(a + left)
            y = tl.load(b + right)
        else:
            x = tl.load(a + left, mask=(start + i < k)[None, :], other=0.0)
            y = tl.load(b + right, mask=(start + i < k)[:, None], other=0.0)
        acc = dot(x, y, acc)
        a += BK * a_k
        b += BK * b_k
    return acc


@triton.jit
def two(a, b, left, right, k, a_k, b_k, a_s, b_s, zero, BK: tl.constexpr, EVEN: tl.constexpr):
    """Leaves 0 and 1 and their sum; leaves lie a_s and b_s elements apart."""
    first = one(a, b, left, right, k, a_k, b_k, zero, BK, EVEN)
    return hold(first + one(a + a_s, b + b_s, left, right, k, a_k, b_k, zero, BK, EVEN))


@triton.jit
def four(a, b, left, right, k, a_k, b_k, a_s, b_s, zero, BK: tl.constexpr, EVEN: tl.constexpr):
    """(0+1)+(2+3)."""
    half = two(a, b, left, right, k, a_k, b_k, a_s, b_s, zero, BK, EVEN)
    return hold(half + two(a + 2 * a_s, b + 2 * b_s, left, right, k, a_k, b_k, a_s, b_s, zero, BK, EVEN))


@triton.jit(do_not_specialize=["m", "n", "k"])
def product(a, b, c, m, n, k, a_s, a_m, a_k, b_s, b_k, b_n, c_s, c_m, c_n, LEAVES: tl.constexpr, BM: tl.constexpr,
            BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
            EVEN: tl.constexpr, CONTINUE: tl.constexpr, ROUND: tl.constexpr):  # fmt: skip
    """c[p] = the tree over leaves LEAVES * p ... of a[leaf] @ b[leaf]; p is the second grid axis.

    EVEN, EVEN_M, EVEN_N: tiles divide k, m, n; said of a weight's axes only, never of a number of tokens. With one leaf
    it may continue the chain that c holds. ROUND stores bf16, rounded once.
    """
    im, inn = place(m, n, BM, BN, GROUP)
    p = tl.program_id(1).to(tl.int64)
    rm = im * BM + tl.arange(0, BM)
    rn = inn * BN + tl.arange(0, BN)
    i = tl.arange(0, BK)
    left = (within(rm, m, EVEN_M) - im * BM)[:, None] * a_m + i[None, :] * a_k
    right = i[:, None] * b_k + (within(rn, n, EVEN_N) - inn * BN)[None, :] * b_n
    a += p * LEAVES * a_s + im.to(tl.int64) * BM * a_m
    b += p * LEAVES * b_s + inn.to(tl.int64) * BN * b_n
    cp = c + p * c_s + rm[:, None].to(tl.int64) * c_m + rn[None, :].to(tl.int64) * c_n
    inside = real(rm, m, EVEN_M)[:, None] & real(rn, n, EVEN_N)[None, :]
    zero = tl.zeros((BM, BN), tl.float32)
    if LEAVES == 1:
        if CONTINUE:
            zero = tl.load(cp, mask=inside, other=0.0)
        total = one(a, b, left, right, k, a_k, b_k, zero, BK, EVEN)
    elif LEAVES == 2:
        total = two(a, b, left, right, k, a_k, b_k, a_s, b_s, zero, BK, EVEN)
    else:
        total = four(a, b, left, right, k, a_k, b_k, a_s, b_s, zero, BK, EVEN)
        if LEAVES == 8:
            total = total + four(a + 4 * a_s, b + 4 * b_s, left, right, k, a_k, b_k, a_s, b_s, zero, BK, EVEN)
    if ROUND:
        tl.store(cp, round_bf16(total), mask=inside)
    else:
        tl.store(cp, total, mask=inside)


@triton.jit(do_not_specialize=["m", "n", "k"])
def plain_chain(a, b, c, m, n, k, a_m, b_n, B: tl.constexpr):
    """c [m, n] of a [m, k] and b [n, k], rows contiguous: the definition. One step of 16 an iteration, nothing else."""
    rm = tl.program_id(0) * B + tl.arange(0, B)
    rn = tl.program_id(1) * B + tl.arange(0, B)
    i = tl.arange(0, 16)
    acc = tl.zeros((B, B), tl.float32)
    for start in range(0, k, 16):
        live = start + i < k
        x = tl.load(
            a + rm[:, None].to(tl.int64) * a_m + (start + i)[None, :], mask=(rm < m)[:, None] & live[None, :], other=0.0
        )
        y = tl.load(
            b + rn[None, :].to(tl.int64) * b_n + (start + i)[:, None], mask=live[:, None] & (rn < n)[None, :], other=0.0
        )
        acc = dot(x, y, acc)
    tl.store(c + rm[:, None].to(tl.int64) * n + rn[None, :], acc, mask=(rm < m)[:, None] & (rn < n)[None, :])
