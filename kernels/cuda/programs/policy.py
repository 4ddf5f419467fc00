"""Sampling, scoring and the gradient of a log-probability, from the integer masses of a row. One row a program."""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from rlk.kernels.cuda.programs.arithmetic import round_bf16, widen
from rlk.kernels.cuda.programs.masses import distance, kept_mass, row_of, row_top

UNSCALE = tl.constexpr(2.0**-40)


@triton.jit
def philox(seed, c0, c1, c2, c3):
    """Philox4x32-10 (Salmon et al., SC 2011): the first two words of one counter's output, as one uint64.

    seed uint64; the words of the counter are uint64 below 2^32.
    """
    low: tl.constexpr = 0xFFFFFFFF
    k0 = seed & low
    k1 = seed >> 32
    for _ in tl.static_range(10):
        p0 = c0 * 0xD2511F53
        p1 = c2 * 0xCD9E8D57
        c0 = (p1 >> 32) ^ c1 ^ k0
        c2 = (p0 >> 32) ^ c3 ^ k1
        c1 = p1 & low
        c3 = p0 & low
        k0 = (k0 + 0x9E3779B9) & low
        k1 = (k1 + 0xBB67AE85) & low
    return (c0 << 32) | c1


@triton.jit
def row_masses(masses, row, segments, SEGMENTS: tl.constexpr):
    """Segments of a row and their kept masses."""
    s = tl.arange(0, SEGMENTS)
    return s, tl.load(masses + row * segments + s, mask=s < segments, other=0)


@triton.jit
def log_probability(d, z):
    """fp32(d - log(Z * 2^-40)), never positive; +0 when one token is kept. The scaling comes first, being exact."""
    return ((d.to(tl.float64) - tl.log(z.to(tl.float64) * UNSCALE)) + 0.0).to(tl.float32)


@triton.jit
def logit_of(logits, row, token, stride):
    """One token, int64, and its logit, each as a block of one."""
    at = token + tl.zeros((1,), tl.int64)
    return at, widen(tl.load(logits + row.to(tl.int64) * stride + at)) + 0.0


@triton.jit
def draw(logits, tops, masses, temperatures, greedy, bounds, ends, seeds, samples, positions, tokens, logprobs, size,
         stride, pieces, segments, PIECES: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr,
         EACH: tl.constexpr):  # fmt: skip
    """The first id whose prefix mass exceeds mulhi64(r, Z), or the lowest id among the maxima of a greedy row."""
    row = tl.program_id(0)
    top, _ = row_top(tops, row, pieces, PIECES)
    t = tl.load(temperatures + row)
    s, w = row_masses(masses, row, segments, SEGMENTS)
    z = tl.sum(w, 0)
    sample = tl.load(samples + row).to(tl.uint64)
    word = tl.load(positions + row).to(tl.uint64) & 0xFFFFFFFF
    bits = philox(tl.load(seeds + row).to(tl.uint64), word, sample & 0xFFFFFFFF, sample >> 32, word & 0)
    u = tl.umulhi(bits, z.to(tl.uint64)).to(tl.int64)
    drawn = tl.sum(tl.where(tl.cumsum(w, 0) <= u, 1, 0), 0)
    is_greedy = tl.load(greedy + row) != 0
    i = tl.arange(0, PIECES)
    piece = tl.load(tops + row * pieces + i, mask=i < pieces, other=float("-inf"))
    first = tl.min(tl.where(piece + 0.0 == top, i, PIECES - 1), 0) // EACH
    # A row that is not finite is reported, whatever is drawn: only the address must be one of its own.
    segment = tl.minimum(tl.where(is_greedy, first, drawn), segments - 1)
    ids, inside, x = row_of(logits, row, segment, size, stride, BLOCK)
    before = tl.sum(tl.where(s < segment, w, 0), 0)
    prefix = tl.cumsum(kept_mass(ids, x, top, t, tl.load(bounds + row), tl.load(ends + row)), 0)
    drawn = segment * BLOCK + tl.sum(tl.where(prefix + before <= u, 1, 0), 0)
    lowest = tl.min(tl.where(inside & (x == top), ids, size - 1), 0)
    token = tl.minimum(tl.where(is_greedy, lowest, drawn), size - 1).to(tl.int64)
    tl.store(tokens + row, token)
    _, x = logit_of(logits, row, token, stride)
    tl.store(logprobs + row + tl.arange(0, 1), log_probability(distance(x, top, t), z))


@triton.jit
def score(logits, tops, masses, temperatures, bounds, ends, tokens, logprobs, inside, totals, stride, pieces, segments,
          PIECES: tl.constexpr, SEGMENTS: tl.constexpr):  # fmt: skip
    """Log-probability of a given token, whether it is kept, and the row's kept mass."""
    row = tl.program_id(0)
    top, _ = row_top(tops, row, pieces, PIECES)
    _, w = row_masses(masses, row, segments, SEGMENTS)
    z = tl.sum(w, 0)
    at, x = logit_of(logits, row, tl.load(tokens + row), stride)
    bound = tl.load(bounds + row)
    kept = (x > bound) | ((x == bound) & (at < tl.load(ends + row)))
    one = tl.arange(0, 1)
    tl.store(logprobs + row + one, log_probability(distance(x, top, tl.load(temperatures + row)), z))
    tl.store(inside + row + one, kept.to(tl.uint8))
    tl.store(totals + row, z)


@triton.jit
def score_gradient(logits, tops, masses, temperatures, bounds, ends, tokens, coefficients, grad, size, stride, pieces,
                   segments, PIECES: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """c * ([i = token] - w_i / Z) / T over the support, 0 outside; one rounding to bf16. Grid: rows, segments.

    w_i / Z is a product with the row's reciprocal in float64, rounded to fp32: a float64 division a logit would take
    ten times as long as everything else.
    """
    row = tl.program_id(0)
    top, _ = row_top(tops, row, pieces, PIECES)
    _, w = row_masses(masses, row, segments, SEGMENTS)
    reciprocal = 1.0 / tl.sum(w, 0).to(tl.float64)
    t = tl.load(temperatures + row)
    ids, inside, x = row_of(logits, row, tl.program_id(1), size, stride, BLOCK)
    kept = kept_mass(ids, x, top, t, tl.load(bounds + row), tl.load(ends + row))
    share = (kept.to(tl.float64) * reciprocal).to(tl.float32)
    g = tl.where(ids == tl.load(tokens + row), 1.0 - share, 0.0 - share)
    g = tl.div_rn(tl.load(coefficients + row) * g, tl.zeros_like(g) + t)
    tl.store(grad + row.to(tl.int64) * size + ids, round_bf16(g), mask=inside)
