"""Exact integer masses of a row of logits, in segments that many programs share.

w_i = int64(exp((x_i - max) / T) * 2^40). Sums of w are integers, so no segment, tile or order can change them. What
top-k and top-p keep of a row is every token whose logit is above `bound`, and those at `bound` with an id below `end`.
"""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from rlk.kernels.cuda.programs.arithmetic import widen

SCALE = tl.constexpr(1099511627776.0)  # 2^40
NOT_FINITE = tl.constexpr(float("inf"))  # the largest logit of a segment that holds a NaN or an infinity


@triton.jit
def distance(x, top, temperature):
    """d = (x - max x) / T of an fp32 block, the division correctly rounded."""
    gap = x - top
    return tl.div_rn(gap, tl.zeros_like(gap) + temperature)


@triton.jit
def mass(x, top, temperature):
    """w = int64(exp(d) * 2^40): one exp, one exact scaling, one truncation."""
    return (tl.exp(distance(x, top, temperature)) * SCALE).to(tl.int64)


@triton.jit
def row_of(logits, row, segment, size, stride, BLOCK: tl.constexpr):
    """Ids of one segment of a row, whether each is real, and the logits, fp32, -0 as +0, -inf outside."""
    ids = segment * BLOCK + tl.arange(0, BLOCK)
    inside = ids < size
    x = widen(tl.load(logits + row.to(tl.int64) * stride + ids, mask=inside, other=0.0))
    return ids, inside, tl.where(inside, x + 0.0, float("-inf"))


@triton.jit
def row_top(tops, row, pieces, PIECES: tl.constexpr):
    """A row's largest logit; 0 and false if one of its logits is not finite."""
    i = tl.arange(0, PIECES)
    top = tl.max(tl.load(tops + row * pieces + i, mask=i < pieces, other=float("-inf")), 0)
    finite = top < NOT_FINITE
    return tl.where(finite, top, 0.0), finite


@triton.jit
def kept_mass(ids, x, top, temperature, bound, end):
    """Masses of the kept tokens, 0 for the others."""
    kept = (x > bound) | ((x == bound) & (ids < end))
    return tl.where(kept, mass(x, top, temperature), 0)


@triton.jit
def segment_tops(logits, tops, size, stride, pieces, BLOCK: tl.constexpr, EACH: tl.constexpr):
    """tops fp32 [rows, pieces]: the largest logit of each of a segment's EACH pieces. Grid: rows, segments."""
    row = tl.program_id(0)
    segment = tl.program_id(1)
    _, inside, x = row_of(logits, row, segment, size, stride, BLOCK)
    exponent = x.to(tl.uint32, bitcast=True) & 0x7F800000
    x = tl.where(inside & (exponent == 0x7F800000), NOT_FINITE, x)
    largest = tl.max(tl.reshape(x, (EACH, BLOCK // EACH)), 1)
    tl.store(tops + row * pieces + segment * EACH + tl.arange(0, EACH), largest)


@triton.jit
def segment_masses(logits, rows, tops, temperatures, bounds, ends, masses, size, stride, pieces, segments,
                   PIECES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """masses int64 [rows, segments]: the kept mass of each segment of the rows `rows`. Grid: rows, segments."""
    row = tl.load(rows + tl.program_id(0))
    segment = tl.program_id(1)
    top, _ = row_top(tops, row, pieces, PIECES)
    ids, _, x = row_of(logits, row, segment, size, stride, BLOCK)
    w = kept_mass(ids, x, top, tl.load(temperatures + row), tl.load(bounds + row), tl.load(ends + row))
    tl.store(masses + row * segments + segment, tl.sum(w, 0))
