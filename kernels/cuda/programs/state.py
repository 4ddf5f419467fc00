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


@triton.jit
def block_sums(tensors, owner, out, LENGTH: tl.constexpr, LANES: tl.constexpr, STEP: tl.constexpr,
               SQUARE: tl.constexpr):  # fmt: skip
    """out[b], float64: the sum of a block of LENGTH elements (of its squares), LANES interleaved chains and the tree.

    tensors int64 [tensors, 3]: address, elements, and the first block of each; owner int32: the tensor of block b.
    Squares are of fp32, sums of float64.
    """
    block = tl.program_id(0)
    entry = tensors + 3 * tl.load(owner + block).to(tl.int64)
    x = tl.load(entry).to(tl.pointer_type(tl.float32 if SQUARE else tl.float64))
    n = tl.load(entry + 1)
    start = (block - tl.load(entry + 2)) * LENGTH
    lane = tl.arange(0, LANES)[None, :]
    sums = tl.zeros((1, LANES), tl.float64)
    for link in range(0, tl.minimum(n - start, LENGTH), LANES * STEP):  # beyond the end there are zeros, which add none
        for j in tl.static_range(STEP):
            i = start + link + j * LANES + lane
            v = tl.load(x + i, mask=i < n, other=0.0).to(tl.float64)
            if SQUARE:
                v = v * v
            sums = sums + v
    tl.store(out + block + tl.arange(0, 1), tree(sums, 1, LANES))


@triton.jit
def mix(z):
    """splitmix64's finalizer (Steele et al., OOPSLA 2014)."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def fingerprint(parts, owner, out, WORD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds to out int64 [tensors, 2] the two mixes of (element index, element bits), summed modulo 2^64.

    parts int64 [parts, 9]: address of words of WORD bits, rows, columns, stride, row0, col0, width, place in `out`, and
    the first block of each; owner int32: the part of a block. Integer sums, so the atomics' order is of no matter.
    """
    entry = parts + 9 * tl.load(owner + tl.program_id(0)).to(tl.int64)
    x = tl.load(entry).to(tl.pointer_type(tl.int16 if WORD == 16 else tl.int32))
    rows = tl.load(entry + 1)
    columns = tl.load(entry + 2)
    block = tl.program_id(0) - tl.load(entry + 8)
    across = tl.cdiv(columns, BLOCK)
    r = block // across * ROWS + tl.arange(0, ROWS)[:, None]
    c = block % across * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (r < rows) & (c < columns)
    bits = tl.load(x + r * tl.load(entry + 3) + c, mask=inside, other=0).to(tl.int64) & ((1 << WORD) - 1)
    index = ((tl.load(entry + 4) + r) * tl.load(entry + 6) + tl.load(entry + 5) + c).to(tl.uint64)
    word = bits.to(tl.uint64)
    a = mix(mix(index * 0x9E3779B97F4A7C15 + 1) ^ word)
    b = mix(mix(index * 0xD1B54A32D192ED03 + 2) + word * 0x8CB92BA72F3D8DD7)
    zero = tl.zeros_like(a)
    own = out + 2 * tl.load(entry + 7)
    tl.atomic_add(own, tl.sum(tl.sum(tl.where(inside, a, zero), 1), 0).to(tl.int64), sem="relaxed")
    tl.atomic_add(own + 1, tl.sum(tl.sum(tl.where(inside, b, zero), 1), 0).to(tl.int64), sem="relaxed")


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
