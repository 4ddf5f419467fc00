"""What top-k and top-p keep of a row, without a sort.

A bf16 logit is one of 65,536 values, so a row is known by how many of its tokens have each value. The place of a value
in rank order is its `order`: 0 for the largest. Counting tokens by order (integer additions, so in any sequence) and
walking down the counts gives top-k and top-p exactly: all tokens of one order have the same mass. Most tokens are too
far down to matter, and are not even counted: `find_floor` says from where on.
"""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from rlk.kernels.cuda.programs.arithmetic import widen
from rlk.kernels.cuda.programs.masses import mass, row_of, row_top

ORDERS = tl.constexpr(65536)
NO_LIMIT = tl.constexpr(1 << 62)  # above every mass: 151,936 * 2^40 < 2^58
UNSCALE = tl.constexpr(2.0**-40)
MARGIN = tl.constexpr(2.0**-10)


@triton.jit
def order_of(x):
    """Place in rank order of fp32 values that are bf16 and not -0, int32."""
    b = (x.to(tl.uint32, bitcast=True) >> 16).to(tl.int32)
    return tl.where(b >= 0x8000, b, 0x7FFF - b)


@triton.jit
def value_of(order):
    """The logit at a place in rank order, fp32."""
    b = tl.where(order >= 0x8000, order, 0x7FFF - order)
    return widen(b.to(tl.uint16).to(tl.bfloat16, bitcast=True))


@triton.jit
def row_total(masses, row, segments, SEGMENTS: tl.constexpr):
    """The mass of a whole row."""
    s = tl.arange(0, SEGMENTS)
    return tl.sum(tl.load(masses + row * segments + s, mask=s < segments, other=0), 0)


@triton.jit
def find_floor(rows, tops, masses, temperatures, top_ks, top_ps, floors, size, pieces, segments, PIECES: tl.constexpr,
               SEGMENTS: tl.constexpr):  # fmt: skip
    """A logit below which no kept token of a row lies. Grid: n.

    Top-k: the k-th largest of the pieces' largest logits has k tokens at or above it. Top-p alone: tokens of mass below
    e = (Z - limit) // V + 1 weigh at most Z - limit together, so the nucleus ends above them; the margin covers the
    roundings on the way from a mass back to a logit.
    """
    i = tl.program_id(0)
    row = tl.load(rows + i)
    top, _ = row_top(tops, row, pieces, PIECES)
    k = tl.load(top_ks + row)
    p = tl.load(top_ps + row)
    j = tl.arange(0, PIECES)
    place = order_of(tl.load(tops + row * pieces + j, mask=j < pieces, other=0.0) + 0.0)
    nth = tl.zeros((), tl.int32)
    for bit in tl.static_range(16):
        step = 1 << (15 - bit)
        above = tl.sum(tl.where((j < pieces) & (place < nth + step), 1, 0), 0)
        nth = tl.where(above < k, nth + step, nth)
    total = row_total(masses, row, segments, SEGMENTS)
    light = (total - (p * total.to(tl.float64)).to(tl.int64)) // size + 1
    logarithm = tl.log(light.to(tl.float64) * UNSCALE).to(tl.float32)
    floor = top + tl.load(temperatures + row) * (logarithm - MARGIN)
    floor = tl.where(p < 1.0, floor, float("-inf"))
    by_rank = tl.where(k <= pieces, value_of(nth), float("-inf"))
    tl.store(floors + i, tl.where(k < size, by_rank, floor))


@triton.jit
def count_orders(logits, rows, floors, counts, size, stride, BLOCK: tl.constexpr):
    """counts int32 [n, 65536] of the rows `rows`, from their floors up. Grid: n, segments."""
    i = tl.program_id(0)
    row = tl.load(rows + i)
    _, inside, x = row_of(logits, row, tl.program_id(1), size, stride, BLOCK)
    counted = inside & (x >= tl.load(floors + i))
    tl.atomic_add(counts + i.to(tl.int64) * ORDERS + order_of(x), 1, mask=counted, sem="relaxed")


@triton.jit
def find_cut(rows, tops, masses, counts, temperatures, top_ks, top_ps, bounds, rooms, size, pieces, segments,
             PIECES: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The last kept logit of each row, and how many tokens of that value are kept. Grid: n."""
    i = tl.program_id(0)
    row = tl.load(rows + i)
    top, finite = row_top(tops, row, pieces, PIECES)
    t = tl.load(temperatures + row)
    k = tl.load(top_ks + row)
    p = tl.load(top_ps + row)
    base = counts + i.to(tl.int64) * ORDERS
    start = tl.where(finite, order_of(top), ORDERS)  # nothing to walk through in a row that will be refused
    ranked = tl.zeros((), tl.int64)  # tokens ranked before this block
    total = tl.zeros((), tl.int64)  # mass of the first k
    at = start
    while (k < size) & (at < ORDERS) & (ranked < k):
        order = at + tl.arange(0, BLOCK)
        c = tl.load(base + order, mask=order < ORDERS, other=0).to(tl.int64)
        allowed = tl.minimum(tl.maximum(k - (tl.cumsum(c, 0) - c + ranked), 0), c)
        total += tl.sum(allowed * mass(value_of(order), top, t), 0)
        ranked += tl.sum(c, 0)
        at += BLOCK
    total = tl.where(k < size, total, row_total(masses, row, segments, SEGMENTS))
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
        w = mass(value_of(order), top, t)
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
    tl.store(bounds + row, tl.where(finite, value_of(cut), 0.0))
    tl.store(rooms + i, tl.maximum(room, 1))  # p so small that its limit is 0: the first stays


@triton.jit
def find_end(logits, rows, counts, bounds, rooms, ends, size, stride, BLOCK: tl.constexpr):
    """One past the id of the last kept token at `bound`: ties go by ascending id. Grid: n."""
    i = tl.program_id(0)
    row = tl.load(rows + i)
    bound = tl.load(bounds + row)
    room = tl.load(rooms + i)
    end = size
    if room < tl.load(counts + i.to(tl.int64) * ORDERS + order_of(bound)):
        seen = tl.zeros((), tl.int64)
        segment = 0
        while (seen < room) & (segment * BLOCK < size):
            ids, inside, x = row_of(logits, row, segment, size, stride, BLOCK)
            tie = tl.where(inside & (x == bound), 1, 0).to(tl.int64)
            last = (tie > 0) & (tl.cumsum(tie, 0) + seen == room)
            end = tl.where(seen + tl.sum(tie, 0) >= room, tl.max(tl.where(last, ids + 1, 0), 0), end)
            seen += tl.sum(tie, 0)
            segment += 1
    tl.store(ends + row, end)
