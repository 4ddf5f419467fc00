"""Exact integer masses of one row of logits, and the support that top-k and top-p leave of it, without a sort.

A bf16 logit is one of 65,536 values, so a row is known by how many of its tokens have each value. The place of a value
in rank order is its `order`: 0 for the largest, and -0 shares the place of 0. Counting tokens by order (integer
additions, so in any sequence) and walking down the counts gives top-k and top-p exactly: all tokens of one order have
the same mass. What is kept is every token of an order below `cut`, and those of order `cut` with an id below `end`.
"""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from rlk.kernels.cuda.programs.arithmetic import widen

ORDERS = tl.constexpr(65536)
NOT_FINITE = tl.constexpr(-1)
NO_LIMIT = tl.constexpr(1 << 62)  # above every mass: 151,936 * 2^40 < 2^58
SCALE = tl.constexpr(1099511627776.0)  # 2^40


@triton.jit
def orders(x, inside):
    """Place in rank order of bf16 logits, int32; -1 for a NaN or an infinity, 65,535 outside."""
    b = x.to(tl.uint16, bitcast=True).to(tl.int32)
    b = tl.where(b == 0x8000, 0, b)
    place = tl.where(b >= 0x8000, b, 0x7FFF - b)
    place = tl.where((b & 0x7F80) == 0x7F80, NOT_FINITE, place)
    return tl.where(inside, place, ORDERS - 1)


@triton.jit
def value(order):
    """The logit at a place in rank order, fp32."""
    b = tl.where(order >= 0x8000, order, 0x7FFF - order)
    return widen(b.to(tl.uint16).to(tl.bfloat16, bitcast=True))


@triton.jit
def distance(order, top, temperature):
    """d = (x - max x) / T of an int32 block, fp32, the division correctly rounded."""
    gap = value(order) - value(top)
    return tl.div_rn(gap, tl.zeros_like(gap) + temperature)


@triton.jit
def mass(order, top, temperature):
    """w = int64(exp(d) * 2^40): one exp, one exact scaling, one truncation."""
    return (tl.exp(distance(order, top, temperature)) * SCALE).to(tl.int64)


@triton.jit
def row_of(logits, row, segment, size, stride, BLOCK: tl.constexpr):
    """Ids of one segment of a row, whether each is real, and their orders."""
    ids = segment * BLOCK + tl.arange(0, BLOCK)
    inside = ids < size
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=inside, other=0.0)
    return ids, inside, orders(x, inside)


@triton.jit
def kept_mass(ids, inside, order, top, cut, end, temperature):
    """Masses of the kept tokens, 0 for the others."""
    kept = inside & ((order < cut) | ((order == cut) & (ids < end)))
    return tl.where(kept, mass(order, top, temperature), 0)


@triton.jit
def row_top(tops, row, segments, SEGMENTS: tl.constexpr):
    """Order of a row's largest logit, -1 if one is not finite."""
    s = tl.arange(0, SEGMENTS)
    return tl.min(tl.load(tops + row * segments + s, mask=s < segments, other=ORDERS - 1), 0)


@triton.jit
def segment_tops(logits, tops, size, stride, segments, BLOCK: tl.constexpr):
    """tops int32 [rows, segments]. Grid: rows, segments."""
    row = tl.program_id(0)
    segment = tl.program_id(1)
    _, _, order = row_of(logits, row, segment, size, stride, BLOCK)
    tl.store(tops + row * segments + segment, tl.min(order, 0))


@triton.jit
def count_orders(logits, rows, counts, size, stride, BLOCK: tl.constexpr):
    """counts int32 [n, 65536] of the rows `rows`. Grid: n, segments. A value that is not finite is not counted."""
    i = tl.program_id(0)
    row = tl.load(rows + i)
    _, inside, order = row_of(logits, row, tl.program_id(1), size, stride, BLOCK)
    tl.atomic_add(counts + i.to(tl.int64) * ORDERS + order, 1, mask=inside & (order >= 0), sem="relaxed")


@triton.jit
def find_cut(rows, tops, counts, temperatures, top_ks, top_ps, cuts, rooms, segments, SEGMENTS: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """The last kept order of each row, and how many of its tokens are kept. Grid: n. Walks down from the largest."""
    i = tl.program_id(0)
    row = tl.load(rows + i)
    top = row_top(tops, row, segments, SEGMENTS)
    t = tl.load(temperatures + row)
    k = tl.load(top_ks + row)
    p = tl.load(top_ps + row)
    base = counts + i.to(tl.int64) * ORDERS
    start = tl.where(top < 0, ORDERS, top)  # nothing to walk through in a row that will be refused
    ranked = tl.zeros((), tl.int64)  # tokens ranked before this block, then the mass of the first k
    total = tl.zeros((), tl.int64)
    at = start
    while (at < ORDERS) & (ranked < k):
        order = at + tl.arange(0, BLOCK)
        c = tl.load(base + order, mask=order < ORDERS, other=0).to(tl.int64)
        allowed = tl.minimum(tl.maximum(k - (tl.cumsum(c, 0) - c + ranked), 0), c)
        total += tl.sum(allowed * mass(order, start, t), 0)
        ranked += tl.sum(c, 0)
        at += BLOCK
    limit = tl.where(p < 1.0, (p * total.to(tl.float64)).to(tl.int64), NO_LIMIT)
    ranked = tl.zeros((), tl.int64)
    before = tl.zeros((), tl.int64)  # mass ranked before this block
    cut = start
    room = tl.zeros((), tl.int64)
    at = start
    while (at < ORDERS) & (ranked < k) & (before < limit):
        order = at + tl.arange(0, BLOCK)
        c = tl.load(base + order, mask=order < ORDERS, other=0).to(tl.int64)
        allowed = tl.minimum(tl.maximum(k - (tl.cumsum(c, 0) - c + ranked), 0), c)
        w = mass(order, start, t)
        preceding = tl.cumsum(allowed * w, 0) - allowed * w + before
        # The j-th token of an order stays while preceding + j * w < limit; the first of all always stays.
        stays = tl.where(w > 0, (limit - preceding + w - 1) // tl.maximum(w, 1), c)
        stays = tl.where(preceding < limit, stays, 0)
        kept = tl.minimum(tl.where(order == start, tl.maximum(stays, 1), stays), allowed)
        last = tl.max(tl.where(kept > 0, order, -1), 0)
        room = tl.where(last >= 0, tl.sum(tl.where(order == last, kept, 0), 0), room)
        cut = tl.where(last >= 0, last, cut)
        ranked += tl.sum(c, 0)
        before += tl.sum(allowed * w, 0)
        at += BLOCK
    tl.store(cuts + row, cut)
    tl.store(rooms + i, tl.maximum(room, 1))  # p so small that its limit is 0: the first stays


@triton.jit
def find_end(logits, rows, counts, cuts, rooms, ends, size, stride, BLOCK: tl.constexpr):
    """One past the id of the last kept token of order `cut`: ties go by ascending id. Grid: n."""
    i = tl.program_id(0)
    row = tl.load(rows + i)
    cut = tl.load(cuts + row)
    room = tl.load(rooms + i)
    end = size
    if room < tl.load(counts + i.to(tl.int64) * ORDERS + cut, mask=cut < ORDERS, other=0):
        seen = tl.zeros((), tl.int64)
        segment = 0
        while (seen < room) & (segment * BLOCK < size):
            ids, inside, order = row_of(logits, row, segment, size, stride, BLOCK)
            tie = tl.where(inside & (order == cut), 1, 0).to(tl.int64)
            last = (tie > 0) & (tl.cumsum(tie, 0) + seen == room)
            end = tl.where(seen + tl.sum(tie, 0) >= room, tl.max(tl.where(last, ids + 1, 0), 0), end)
            seen += tl.sum(tie, 0)
            segment += 1
    tl.store(ends + row, end)


@triton.jit
def segment_masses(logits, tops, temperatures, cuts, ends, masses, size, stride, segments, SEGMENTS: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    """masses int64 [rows, segments]: the kept mass of each segment. Grid: rows, segments."""
    row = tl.program_id(0)
    segment = tl.program_id(1)
    top = tl.maximum(row_top(tops, row, segments, SEGMENTS), 0)
    ids, inside, order = row_of(logits, row, segment, size, stride, BLOCK)
    w = kept_mass(ids, inside, order, top, tl.load(cuts + row), tl.load(ends + row), tl.load(temperatures + row))
    tl.store(masses + row * segments + segment, tl.sum(w, 0))
