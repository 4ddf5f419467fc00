"""CUDA form of the optimizer, norms and fingerprints."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rlk.kernels.cuda import launch
from rlk.kernels.cuda.launch import take
from rlk.kernels.cuda.programs import state as programs
from rlk.kernels.state import MASK, AdamStep, Part

Entries = npt.NDArray[np.int64]
F32, F64, I64 = torch.float32, torch.float64, torch.int64
WORDS = {2: torch.int16, 4: torch.int32}
BLOCK = 1024
LENGTH = 1 << 14
TALL, FINGERPRINT_BLOCK = 8, 8192
"""Rows of a fingerprint's tile where there are as many, and elements of a tile."""
MOST_ROWS = 65_535
"""CUDA's limit on the third axis of a grid."""


def describe() -> str:
    """Which implementation runs."""
    return f"{launch.PLACE}: Triton"


def adamw(master: torch.Tensor, m: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, s: AdamStep) -> None:
    """See rlk.kernels.state."""
    n = master.numel()
    take(master, F32), take(m, F32), take(v, F32), take(grad, F32)
    launch.run(
        programs.adamw, (launch.tiles(n, BLOCK),), master, m, v, grad, s.clip, s.keep, s.beta1, s.rest1, s.beta2,
        s.rest2, s.step, s.correction, s.eps, n, BLOCK=BLOCK,
    )  # fmt: skip


def sums_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """See rlk.kernels.state. Blocks of 16,384, then blocks of those sums: each 128 interleaved chains and a tree."""
    atoms = np.concatenate([_rows(take(x, F32)) for x in tensors])
    sums, blocks = _block_sums(atoms, tensors[0].device, square=True)
    while len(sums) > len(atoms):
        held = np.stack([sums.data_ptr() + sums.element_size() * _firsts(blocks), blocks], 1)
        sums, blocks = _block_sums(held, sums.device, square=False)
    return sums


def _rows(x: torch.Tensor) -> Entries:
    """Address and elements of each row of the last axis."""
    n = x.shape[-1]
    at = x.data_ptr() + np.arange(math.prod(x.shape[:-1])) * n * x.element_size()
    return np.stack([at, np.full_like(at, n)], 1)


def _block_sums(entries: Entries, device: torch.device, *, square: bool) -> tuple[torch.Tensor, Entries]:
    """The sums of all blocks, those of an entry side by side, and how many each has; one of no elements has one, 0."""
    blocks = np.maximum(launch.tiles(entries[:, 1], LENGTH), 1)
    table, owner = _blocks(entries, blocks, device)
    out = torch.empty(len(owner), dtype=F64, device=device)
    launch.run(
        programs.block_sums, (len(owner),), table, owner, out, LENGTH=LENGTH, LANES=128, STEP=8, SQUARE=square,
    )  # fmt: skip
    return out, blocks


def _blocks(entries: Entries, blocks: Entries, device: torch.device) -> list[torch.Tensor]:
    """What one launch over many tensors reads: the entries, each with the first of its blocks, int64; and the entry of
    each block, int32."""
    table = np.concatenate([entries, _firsts(blocks)[:, None]], 1)
    owner = np.repeat(np.arange(len(blocks), dtype=np.int32), blocks)
    return [torch.from_numpy(a).to(device, non_blocking=True) for a in (table, owner)]


def _firsts(counts: Entries) -> Entries:
    first: Entries = np.cumsum(counts) - counts
    return first


def fingerprints(tensors: Sequence[Sequence[Part]]) -> list[tuple[int, int]]:
    """See rlk.kernels.state: the integers of the CPU form. One launch for all parts whose tiles are alike."""
    device = next(part.x.device for parts in tensors for part in parts)
    sums = torch.zeros(len(tensors), 2, dtype=I64, device=device)
    alike: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for place, parts in enumerate(tensors):
        for part in parts:
            if part.x.numel():
                tile = (part.x.element_size(), TALL if part.x.shape[0] >= TALL else 1)
                alike.setdefault(tile, []).append(_entry(part, place))
    for (size, rows), found in alike.items():
        entries, width = np.array(found, np.int64), FINGERPRINT_BLOCK // rows
        blocks = launch.tiles(entries[:, 1], rows) * launch.tiles(entries[:, 2], width)
        table, owner = _blocks(entries, blocks, device)
        launch.run(
            programs.fingerprint, (len(owner),), table, owner, sums, WORD=8 * size, ROWS=rows, BLOCK=width,
        )  # fmt: skip
    return [(first & MASK, second & MASK) for first, second in sums.tolist()]


def _entry(part: Part, place: int) -> tuple[int, ...]:
    """A part as the program reads it, but for its first block."""
    x = part.x
    if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise TypeError(
            f"a fingerprint takes rows of contiguous elements, got shape {tuple(x.shape)} strides {x.stride()}"
        )
    words = take(x.view(WORDS[x.element_size()]), WORDS[x.element_size()], contiguous=False)
    return words.data_ptr(), *x.shape, x.stride(0), part.row0, part.col0, part.width, place


def row_fingerprints(x: torch.Tensor, shards: int, shard0: int) -> torch.Tensor:
    """See rlk.kernels.state: the integers of the CPU form."""
    words = x.view(WORDS[x.element_size()])
    rows, columns = x.shape[0], x.shape[1] // shards
    out = x.new_zeros(rows, shards, dtype=I64)
    for first in range(0, rows, MOST_ROWS):
        some = slice(first, first + MOST_ROWS)
        launch.run(
            programs.row_fingerprints, (launch.tiles(columns, BLOCK), shards, out[some].shape[0]),
            take(words, words.dtype)[some], out[some], columns, shard0, WORD=8 * x.element_size(), BLOCK=BLOCK,
        )  # fmt: skip
    return out
