"""CUDA form of the optimizer, norms and fingerprints."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlk.kernels.cuda import launch
from rlk.kernels.cuda.launch import take
from rlk.kernels.cuda.programs import state as programs
from rlk.kernels.state import MASK, AdamStep, Part

F32, F64, I64 = torch.float32, torch.float64, torch.int64
WORDS = {2: torch.int16, 4: torch.int32}
BLOCK = 1024
LENGTH = 1 << 14
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


def sums_of_squares(atoms: Sequence[torch.Tensor]) -> torch.Tensor:
    """See rlk.kernels.state. Blocks of 16,384, then blocks of those sums: each 128 interleaved chains and a tree."""
    return torch.cat([_sum_squares(take(x, F32)) for x in atoms])


def _sum_squares(x: torch.Tensor) -> torch.Tensor:
    if x.numel() == 0:
        return x.new_zeros(1, dtype=F64)
    total = _block_sums(x, square=True)
    while total.numel() > 1:
        total = _block_sums(total, square=False)
    return total


def _block_sums(x: torch.Tensor, *, square: bool) -> torch.Tensor:
    n = x.numel()
    out = x.new_empty(launch.tiles(n, LENGTH), dtype=F64)
    launch.run(
        programs.block_sums, (out.numel(),), x, out, n, LENGTH=LENGTH, LANES=128, STEP=8, SQUARE=square,
    )  # fmt: skip
    return out


def fingerprints(tensors: Sequence[Sequence[Part]]) -> list[tuple[int, int]]:
    """See rlk.kernels.state: the integers of the CPU form."""
    device = next(part.x.device for parts in tensors for part in parts)
    sums = torch.zeros(len(tensors), 2, dtype=I64, device=device)
    for own, parts in zip(sums, tensors, strict=True):
        for part in parts:
            _add_fingerprint(own, part.x, part.row0, part.col0, part.width)
    return [(first & MASK, second & MASK) for first, second in sums.tolist()]


def _add_fingerprint(out: torch.Tensor, x: torch.Tensor, row0: int, col0: int, width: int) -> None:
    if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise TypeError(
            f"a fingerprint takes rows of contiguous elements, got shape {tuple(x.shape)} strides {x.stride()}"
        )
    words = x.view(WORDS[x.element_size()])
    rows, columns = x.shape
    tall = 8 if rows >= 8 else 1
    grid = (launch.tiles(columns, BLOCK), launch.tiles(rows, tall))
    launch.run(
        programs.fingerprint, grid, take(words, words.dtype, contiguous=False), out, rows, columns, x.stride(0), row0,
        col0, width, WORD=8 * x.element_size(), ROWS=tall, BLOCK=BLOCK,
    )  # fmt: skip


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
