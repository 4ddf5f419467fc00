"""Causal grouped-query attention, forward: one program for packed rows, paged prefill, chunk and decode.

The tile is the same for all of them, 64 rows (query token, head within the group) by 64 keys on 4 warps: a row then
lies in one warp, so its sum is split among the same four threads whatever its neighbours are. Smaller tiles on several
warps split a row's sum between warps and give other bits.
"""
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

from rlk.kernels.cuda.programs.arithmetic import dot, round_bf16, to_bf16


@triton.jit
def locate(first, sequences, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Sequence and tile of this program, where sequence s has the tiles from first[s] * GROUP // ROWS + s on.

    That is at least one tile more than its rows need, so no table of tiles has to be made on the host.
    """
    tile = tl.program_id(0)
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(first + middle).to(tl.int32) * GROUP // ROWS + middle <= tile:
            low = middle
        else:
            high = middle
    return low, tile - (tl.load(first + low).to(tl.int32) * GROUP // ROWS + low)


@triton.jit
def rows_of(first, sequences, H: tl.constexpr, HK: tl.constexpr, ROWS: tl.constexpr):
    """This program's rows: sequence, its first token and its tokens; of each row the token within the sequence and the
    place in [T, H]; and whether the tile lies beyond the sequence."""
    G: tl.constexpr = H // HK
    s, tile = locate(first, sequences, G, ROWS)
    start = tl.load(first + s).to(tl.int64)
    count = (tl.load(first + s + 1).to(tl.int64) - start).to(tl.int32)
    r = tile * ROWS + tl.arange(0, ROWS)
    token = r // G
    return s, start, count, token, (start + token) * H + tl.program_id(1) * G + r % G, tile * ROWS >= count * G


@triton.jit(do_not_specialize=["sequences", "table_s"])
def attention(q, k, v, out, lse, first, key_first, positions, table, lengths, sequences, table_s, scale,
              H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
              PAGE: tl.constexpr):  # fmt: skip
    """Softmax(q k^T) v for the rows of every sequence, each against keys 0 to its own position.

    PAGE 0: k, v [keys, HK, D], a sequence's from row key_first[s]; positions int64 [T]. Otherwise k is the cache
    [pages, HK, PAGE, 2 D] and v is k + D, table int32 [sequences, table_s] names the pages, and the rows are the last
    ones of lengths[s]. lse (packed only): base-2 log-sum-exp of the scaled scores [T, H].
    """
    s, start, count, token, row, beyond = rows_of(first, sequences, H, HK, ROWS)
    if beyond:
        return
    head = tl.program_id(1)
    live = token < count
    d = tl.arange(0, D)
    n = tl.arange(0, KEYS)
    if PAGE == 0:
        here = tl.load(key_first + s).to(tl.int64)
        total = (tl.load(key_first + s + 1).to(tl.int64) - here).to(tl.int32)
        position = tl.load(positions + start + token, mask=live, other=0).to(tl.int32)
    else:
        total = tl.load(lengths + s).to(tl.int32)
        position = tl.where(live, total - count + token, 0)
    x = tl.load(q + row[:, None] * D + d[None, :], mask=live[:, None], other=0.0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for block in range(0, tl.max(position, 0) + 1, KEYS):
        key = block + n
        held = key < total
        if PAGE == 0:
            at = ((here + key) * HK + head) * D
        else:
            page = tl.load(table + s * table_s + key // PAGE, mask=held, other=0).to(tl.int64)
            at = ((page * HK + head) * PAGE + key % PAGE) * (2 * D)
        keys = tl.load(k + at[None, :] + d[:, None], mask=held[None, :], other=0.0)
        values = tl.load(v + at[:, None] + d[None, :], mask=held[:, None], other=0.0)
        score = dot(x, keys, tl.zeros((ROWS, KEYS), tl.float32)) * scale
        score = tl.where((key[None, :] <= position[:, None]) & held[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        mass = mass * shrink + tl.sum(p, 1)
        acc = dot(to_bf16(p), values, acc * shrink[:, None])
        top = higher
    tl.store(out + row[:, None] * D + d[None, :], round_bf16(tl.div_rn(acc, tl.broadcast_to(mass[:, None], (ROWS, D)))),
             mask=live[:, None])  # fmt: skip
    if PAGE == 0:
        tl.store(lse + row, top + tl.log2(mass.to(tl.float64)).to(tl.float32), mask=live)


@triton.jit
def write_pages(k, v, cache, slots, k_t, k_h, v_t, v_h, HK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
                HEADS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Copies one token's keys and values to its slot; a slot below 0 is padding. HEADS, WIDTH: powers of two."""
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t).to(tl.int64)
    if slot < 0:
        return
    h = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    inside = (h < HK) & (d < D)
    at = cache + ((slot // PAGE * HK + h) * PAGE + slot % PAGE) * (2 * D) + d
    tl.store(at, tl.load(k + t * k_t + h * k_h + d, mask=inside), mask=inside)
    tl.store(at + D, tl.load(v + t * v_t + h * v_h + d, mask=inside), mask=inside)
