"""Attention, backward. dQ is a chain over keys; dK and dV are leaves, a chain over the queries of one virtual slice.

The tiles of a stock flash backward cross the edges of slices, so it cannot give these leaves (Dao, 2023, for the
recomputation itself). Scores are recomputed from q, k and the saved log-sum-exp. P and dS are rounded to bf16.
"""
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

from rlk.kernels.cuda.programs.arithmetic import dot, round_bf16, to_bf16, tree, widen
from rlk.kernels.cuda.programs.attention import rows_of


@triton.jit(do_not_specialize=["rows"])
def row_dots(a, b, out, rows, D: tl.constexpr, ROWS: tl.constexpr):
    """out[r] = sum over d of a[r, d] * b[r, d]: 16 interleaved chains and a tree, D a multiple of 16."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = r < rows
    sums = tl.zeros((ROWS, 16), tl.float32)
    for start in range(0, D, 16):
        at = r.to(tl.int64)[:, None] * D + start + tl.arange(0, 16)[None, :]
        left = widen(tl.load(a + at, mask=live[:, None], other=0.0))
        sums = sums + left * widen(tl.load(b + at, mask=live[:, None], other=0.0))
    tl.store(out + r, tree(sums, ROWS, 16), mask=live)


@triton.jit(do_not_specialize=["sequences"])
def query_gradient(dout, q, k, v, lse, delta, first, key_first, positions, dq, sequences, scale_log2, scale,
                   H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
                   KEYS: tl.constexpr):  # fmt: skip
    """dq of the rows of every sequence; arguments as in the forward program, packed."""
    s, start, count, token, row, beyond = rows_of(first, sequences, H, HK, ROWS)
    if beyond:
        return
    head = tl.program_id(1)
    live = token < count
    d = tl.arange(0, D)
    here = tl.load(key_first + s).to(tl.int64)
    total = (tl.load(key_first + s + 1).to(tl.int64) - here).to(tl.int32)
    position = tl.load(positions + start + token, mask=live, other=0).to(tl.int32)
    x = tl.load(q + row[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
    e = tl.load(dout + row[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
    norm = tl.load(lse + row, mask=live, other=0.0)[:, None]
    mean = tl.load(delta + row, mask=live, other=0.0)[:, None]
    zero = tl.zeros((ROWS, KEYS), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for block in range(0, tl.max(position, 0) + 1, KEYS):
        key = block + tl.arange(0, KEYS)
        held = key < total
        at = ((here + key) * HK + head) * D
        keys = tl.load(k + at[:, None] + d[None, :], mask=held[:, None], other=0.0)
        values = tl.load(v + at[:, None] + d[None, :], mask=held[:, None], other=0.0)
        seen = (key[None, :] <= position[:, None]) & held[None, :]
        p = tl.where(seen, tl.exp2(dot(x, tl.trans(keys), zero) * scale_log2 - norm), 0.0)
        ds = to_bf16(p * (dot(e, tl.trans(values), zero) - mean))
        acc = dot(ds, keys, acc)
    tl.store(dq + row[:, None] * D + d[None, :], round_bf16(acc * scale), mask=live[:, None])


@triton.jit
def place(leaves, item, leaf_s, key, key_s, head, D: tl.constexpr):
    """Addresses of one leaf's rows for these keys and this head."""
    return leaves + item * leaf_s + key.to(tl.int64)[:, None] * key_s + head * D + tl.arange(0, D)[None, :]


@triton.jit(do_not_specialize=["keys"])
def key_gradients(dout, q, k, v, lse, delta, positions, edges, dk, dv, keys, leaf_s, key_s, scale_log2,
                  H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
                  CONTINUE: tl.constexpr):  # fmt: skip
    """Leaves of dk and dv for one sequence: slice i goes to dk + i * leaf_s, [keys, HK, D] with keys key_s apart.

    edges int64 [slices, 2]: ranges of query rows, positions ascending within each. The chain runs over query head
    within the group, then query row, in steps of 16 rows counted from the slice's first. CONTINUE starts from what dk
    and dv hold. Grid: blocks of keys, key heads, slices.
    """
    G: tl.constexpr = H // HK
    block = tl.program_id(0) * KEYS
    head = tl.program_id(1)
    item = tl.program_id(2).to(tl.int64)
    low = tl.load(edges + 2 * item).to(tl.int32)
    high = tl.load(edges + 2 * item + 1).to(tl.int32)
    begin = low
    end = high
    while begin < end:  # the first row that sees a key of this block: rows before it add nothing
        middle = (begin + end) // 2
        if tl.load(positions + middle) < block:
            begin = middle + 1
        else:
            end = middle
    begin = low + (begin - low) // ROWS * ROWS
    key = block + tl.arange(0, KEYS)
    held = (key < keys)[:, None]
    d = tl.arange(0, D)[None, :]
    at = (key.to(tl.int64)[:, None] * HK + head) * D + d
    kt = tl.load(k + at, mask=held, other=0.0)
    vt = tl.load(v + at, mask=held, other=0.0)
    zero = tl.zeros((KEYS, ROWS), tl.float32)
    acc_k = tl.zeros((KEYS, D), tl.float32)
    acc_v = tl.zeros((KEYS, D), tl.float32)
    if CONTINUE:
        acc_k = tl.load(place(dk, item, leaf_s, key, key_s, head, D), mask=held, other=0.0)
        acc_v = tl.load(place(dv, item, leaf_s, key, key_s, head, D), mask=held, other=0.0)
    for g in range(G):
        for start in range(begin, high, ROWS):
            t = start + tl.arange(0, ROWS)
            live = t < high
            row = t * H + head * G + g
            x = tl.load(q + row[:, None] * D + d, mask=live[:, None], other=0.0)
            e = tl.load(dout + row[:, None] * D + d, mask=live[:, None], other=0.0)
            norm = tl.load(lse + row, mask=live, other=0.0)[None, :]
            mean = tl.load(delta + row, mask=live, other=0.0)[None, :]
            position = tl.load(positions + t, mask=live, other=-1).to(tl.int32)
            seen = (key[:, None] <= position[None, :]) & held
            p = tl.where(seen, tl.exp2(dot(kt, tl.trans(x), zero) * scale_log2 - norm), 0.0)
            acc_v = dot(to_bf16(p), e, acc_v)
            ds = to_bf16(p * (dot(vt, tl.trans(e), zero) - mean))
            acc_k = dot(ds, x, acc_k)
    tl.store(place(dk, item, leaf_s, key, key_s, head, D), acc_k, mask=held)
    tl.store(place(dv, item, leaf_s, key, key_s, head, D), acc_v, mask=held)
