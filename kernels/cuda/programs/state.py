"""Optimizer, gradient norm and fingerprints: what is done to whole tensors, one element at a time."""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from rlk.kernels.cuda.programs.arithmetic import tree


@triton.jit(do_not_specialize=["n"])
def adamw(master, m, v, grad, clip, keep, beta1, rest1, beta2, rest2, step, correction, eps, n, BLOCK: tl.constexpr):
    """AdamW (Loshchilov and Hutter, 2019) in place, fp32; the scalars come from float64, rounded once."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    g = tl.load(grad + i, mask=inside, other=0.0) * clip
    w = tl.load(master + i, mask=inside, other=0.0) * keep
    first = beta1 * tl.load(m + i, mask=inside, other=0.0) + rest1 * g
    second = beta2 * tl.load(v + i, mask=inside, other=0.0) + rest2 * (g * g)
    deviation = tl.div_rn(tl.sqrt_rn(second), tl.zeros_like(second) + correction) + eps
    tl.store(m + i, first, mask=inside)
    tl.store(v + i, second, mask=inside)
    tl.store(master + i, w - step * tl.div_rn(first, deviation), mask=inside)


@triton.jit(do_not_specialize=["n"])
def block_sums(x, out, n, LENGTH: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr, SQUARE: tl.constexpr):
    """out[b], float64: the sum of block b of x (of its squares), LANES interleaved chains and the tree over them."""
    start = tl.program_id(0).to(tl.int64) * LENGTH
    lane = tl.arange(0, LANES)[None, :]
    sums = tl.zeros((1, LANES), tl.float64)
    for link in range(0, LENGTH, LANES * STEP):
        for j in tl.static_range(STEP):
            i = start + link + j * LANES + lane
            v = tl.load(x + i, mask=i < n, other=0.0).to(tl.float64)
            if SQUARE:
                v = v * v
            sums = sums + v
    tl.store(out + tl.program_id(0) + tl.arange(0, 1), tree(sums, 1, LANES))


@triton.jit
def mix(z):
    """splitmix64's finalizer (Steele et al., OOPSLA 2014)."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit(do_not_specialize=["rows", "columns", "row0", "col0"])
def fingerprint(x, out, rows, columns, stride, row0, col0, width, WORD: tl.constexpr, ROWS: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """Adds to out uint64 [2] the two mixes of (element index, element bits), summed modulo 2^64.

    x: words of WORD bits. Grid: blocks of columns, blocks of rows. Integer sums, so the atomics' order is of no matter.
    """
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (r < rows) & (c < columns)
    bits = tl.load(x + r.to(tl.int64) * stride + c, mask=inside, other=0).to(tl.int64) & ((1 << WORD) - 1)
    index = ((row0 + r.to(tl.int64)) * width + col0 + c).to(tl.uint64)
    word = bits.to(tl.uint64)
    a = mix(mix(index * 0x9E3779B97F4A7C15 + 1) ^ word)
    b = mix(mix(index * 0xD1B54A32D192ED03 + 2) + word * 0x8CB92BA72F3D8DD7)
    zero = tl.zeros_like(a)
    tl.atomic_add(out, tl.sum(tl.sum(tl.where(inside, a, zero), 1), 0).to(tl.int64), sem="relaxed")
    tl.atomic_add(out + 1, tl.sum(tl.sum(tl.where(inside, b, zero), 1), 0).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["columns", "shard0"])
def row_fingerprints(x, out, columns, shard0, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """out int64 [rows, shards]: the first mix of x words [rows, shards, columns]; an index counts columns of the whole
    row, in which `shard0` shards come before. Grid: blocks of columns, shards, rows.
    """
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    shard = tl.program_id(1).to(tl.int64)
    place = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + shard
    inside = c < columns
    bits = tl.load(x + place * columns + c, mask=inside, other=0).to(tl.int64) & ((1 << WORD) - 1)
    index = ((shard0 + shard) * columns + c).to(tl.uint64)
    a = mix(mix(index * 0x9E3779B97F4A7C15 + 1) ^ bits.to(tl.uint64))
    total = tl.sum(tl.where(inside, a, tl.zeros_like(a)), 0)
    tl.atomic_add(out + place, total.to(tl.int64), sem="relaxed")
