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
FAILED = tl.constexpr(arena.FAILED)
SIGNALLED = tl.constexpr(arena.SIGNALLED)
READ = tl.constexpr(arena.READ)
STAGE = tl.constexpr(arena.STAGE)
FIRST_SLOT = tl.constexpr(arena.FIRST_SLOT)
SLOT_WORDS = tl.constexpr(arena.SLOT_WORDS)
LANES = tl.constexpr(max(arena.RANKS))


@triton.jit
def known(x, WIDE: tl.constexpr):
    """A size in words, int64, said in words or, WIDE, in sixteens of words: then accesses can be wide.

    Triton's own specialization of integers would compile a program for every kind of size, in the middle of a run."""
    y = x.to(tl.int64)
    return y * 16 if WIDE else y


@triton.jit(do_not_specialize=["piece", "offset", "length", "each", "half"])
def put(source, data, header, piece, offset, length, each, half, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Words offset to offset + length of every piece of `source` to this turn's half, `each` words apart.

    Grid: blocks of words, pieces. Sizes in words of the tensors' type, or see `known`.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < known(length, WIDE)
    p = tl.program_id(1).to(tl.int64)
    parity = (tl.load(header + TURN) & 1).to(tl.int64)
    words = tl.load(source + p * known(piece, WIDE) + known(offset, WIDE) + i, mask=inside, other=0)
    tl.store(data + parity * known(half, WIDE) + p * known(each, WIDE) + i, words, mask=inside)


@triton.jit(do_not_specialize=["progress", "stage", "rank", "size"])
def signal(header, slots, progress, stage, rank, size):
    """What was put is there: adds 1 to this rank's slot in every peer's header.

    slots int64 [size]: their addresses. progress: the address of this rank's progress, in the host's memory.
    """
    turn = tl.load(header + TURN) + 1
    tl.store(header + TURN, turn)
    host = progress.to(tl.pointer_type(tl.int32))
    tl.store(host + STAGE, stage)
    tl.store(host + SIGNALLED, turn)
    p = tl.arange(0, LANES)
    there = tl.load(slots + p, mask=p < size, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_add(there, 1, mask=(p < size) & (p != rank), sem="release", scope="sys")


@triton.jit
def begin(header, progress, rank, size):
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
        p = tl.arange(0, LANES)
        others = (p < size) & (p != rank)
        tl.atomic_add(header + FIRST_SLOT + p * SLOT_WORDS, -1, mask=others, sem="relaxed", scope="sys")
        tl.store(progress.to(tl.pointer_type(tl.int32)) + READ, turn)
    return ((turn - 1) & 1).to(tl.int64)


@triton.jit(do_not_specialize=["progress", "rank", "size", "piece", "offset", "length", "block", "half"])
def collect(header, progress, arenas, out, rank, size, piece, offset, length, block, half, WIDE: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """out[p, offset + i] = word `block` + i of rank p's half. Grid: blocks of words, ranks."""
    parity = begin(header, progress, rank, size)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < known(length, WIDE)
    p = tl.program_id(1).to(tl.int64)
    source = tl.multiple_of(tl.load(arenas + p).to(out.dtype), 16)
    words = tl.load(source + parity * known(half, WIDE) + known(block, WIDE) + i, mask=inside, other=0)
    tl.store(out + p * known(piece, WIDE) + known(offset, WIDE) + i, words, mask=inside)


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


@triton.jit(do_not_specialize=["progress", "rank", "offset", "length", "block", "half"])
def collect_tree(header, progress, arenas, out, rank, offset, length, block, half, SIZE: tl.constexpr,
                 WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """out[offset + i] = the tree over all ranks' fp32 words `block` + i. Grid: blocks of words, 1."""
    parity = begin(header, progress, rank, SIZE)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < known(length, WIDE)
    at = parity * known(half, WIDE) + known(block, WIDE) + i
    if SIZE == 2:
        total = two(arenas, 0, at, inside)
    else:
        total = four(arenas, 0, at, inside)
        if SIZE == 8:
            total = total + four(arenas, 4, at, inside)
    tl.store(out + known(offset, WIDE) + i, total, mask=inside)
