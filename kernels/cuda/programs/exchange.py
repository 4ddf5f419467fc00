"""Moving bytes between the arenas of ranks, and summing fp32 partials on the way. See rlk.kernels.collectives.arena.

Peers' arenas are addresses, in a table of int64: a tensor cannot name memory of a process that sees another device.
"""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from rlk.kernels.collectives import arena
from rlk.kernels.cuda.programs.arithmetic import INTERPRETED

TURN = tl.constexpr(arena.TURN)
DONE = tl.constexpr(arena.DONE)
STAGE = tl.constexpr(arena.STAGE)
FAILED = tl.constexpr(arena.FAILED)
FIRST_SLOT = tl.constexpr(arena.FIRST_SLOT)
SLOT_WORDS = tl.constexpr(arena.SLOT_WORDS)


@triton.jit
def put(source, data, header, piece, offset, length, each, half, BLOCK: tl.constexpr):
    """Words offset to offset + length of every piece of `source` to this turn's half, `each` words apart.

    Grid: blocks of words, pieces. Sizes in words of the tensors' type.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < length
    p = tl.program_id(1).to(tl.int64)
    parity = (tl.load(header + TURN) & 1).to(tl.int64)
    words = tl.load(source + p * piece + offset + i, mask=inside, other=0)
    tl.store(data + parity * half + p * each + i, words, mask=inside)


@triton.jit(do_not_specialize=["stage", "rank"])
def signal(header, slots, stage, rank, SIZE: tl.constexpr):
    """What was put is there: adds 1 to this rank's slot in every peer's header. slots int64 [SIZE]: their addresses."""
    tl.store(header + STAGE, stage)
    tl.store(header + TURN, tl.load(header + TURN) + 1)
    p = tl.arange(0, SIZE)
    there = tl.load(slots + p).to(tl.pointer_type(tl.int32))
    tl.atomic_add(there, 1, mask=p != rank, sem="release", scope="sys")


@triton.jit
def begin(header, rank, SIZE: tl.constexpr):
    """Every peer has signalled: takes their signals, once a launch; returns which half holds the turn's data.

    A wait that was given up ends the program here, and with it the process's work on the device: what a missing rank
    left in its arena is never read as an answer.
    """
    failed = tl.load(header + FAILED)
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p trap; mov.s32 $0, $1; }", "=r,r", [failed], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    turn = tl.load(header + TURN)
    if tl.program_id(0) + tl.program_id(1) == 0:
        p = tl.arange(0, SIZE)
        tl.atomic_add(header + FIRST_SLOT + p * SLOT_WORDS, -1, mask=p != rank, sem="relaxed", scope="sys")
        tl.store(header + DONE, turn)
    return ((turn - 1) & 1).to(tl.int64)


@triton.jit(do_not_specialize=["rank"])
def collect(header, arenas, out, rank, piece, offset, length, block, half, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """out[p, offset + i] = word `block` + i of rank p's half. Grid: blocks of words, ranks."""
    parity = begin(header, rank, SIZE)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < length
    p = tl.program_id(1).to(tl.int64)
    source = tl.multiple_of(tl.load(arenas + p).to(out.dtype), 16)
    words = tl.load(source + parity * half + block + i, mask=inside, other=0)
    tl.store(out + p * piece + offset + i, words, mask=inside)


@triton.jit
def one(arenas, p, at, inside):
    """fp32 words of rank p."""
    source = tl.multiple_of(tl.load(arenas + p).to(tl.pointer_type(tl.float32)), 16)
    return tl.load(source + at, mask=inside, other=0.0)


@triton.jit
def two(arenas, p, at, inside):
    """Ranks p and p + 1, and their sum."""
    return one(arenas, p, at, inside) + one(arenas, p + 1, at, inside)


@triton.jit
def four(arenas, p, at, inside):
    """(0+1)+(2+3)."""
    return two(arenas, p, at, inside) + two(arenas, p + 2, at, inside)


@triton.jit(do_not_specialize=["rank"])
def collect_tree(header, arenas, out, rank, offset, length, block, half, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """out[offset + i] = the tree over all ranks' fp32 words `block` + i. Grid: blocks of words, 1."""
    parity = begin(header, rank, SIZE)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < length
    at = parity * half + block + i
    if SIZE == 2:
        total = two(arenas, 0, at, inside)
    else:
        total = four(arenas, 0, at, inside)
        if SIZE == 8:
            total = total + four(arenas, 4, at, inside)
    tl.store(out + offset + i, total, mask=inside)
