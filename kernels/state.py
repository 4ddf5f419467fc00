"""What is done to whole tensors: AdamW, the gradient norm's sums of squares, and fingerprints that need no
gathering."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from rlk.kernels.forms import form

MASK = (1 << 64) - 1


@dataclass(frozen=True)
class AdamStep:
    """Scalars of one AdamW step. Formed in float64 on the host; each is rounded to fp32 once, where the kernel takes
    it."""

    clip: float
    keep: float
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    step: float
    correction: float
    eps: float

    @classmethod
    def at(cls, t: int, *, lr: float, betas: tuple[float, float], eps: float, decay: float, clip: float) -> AdamStep:
        """Step t >= 1: bias corrections of Kingma and Ba (2015), decoupled decay of Loshchilov and Hutter (2019)."""
        b1, b2 = betas
        return cls(
            clip,
            1.0 - lr * decay,
            b1,
            1.0 - b1,
            b2,
            1.0 - b2,
            lr / (1.0 - b1**t),
            math.sqrt(1.0 - b2**t),
            eps,
        )


def adamw(master: torch.Tensor, m: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, step: AdamStep) -> None:
    """Updates master, m and v in place; all fp32 of one shape, contiguous. Decay first, then the step."""
    form("state", master).adamw(master, m, v, grad, step)


def sum_squares(x: torch.Tensor) -> float:
    """float64 sum of squares of one atom, fp32, in index order."""
    return float(sums_of_squares([x.flatten()]))


def sums_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`sum_squares` of each row of the last axis, tensors in order, float64 [rows], where they are: a device is not
    waited for."""
    return cast(torch.Tensor, form("state", tensors[0]).sums_of_squares(tensors))


def fingerprint(x: torch.Tensor, *, row0: int = 0, col0: int = 0, width: int | None = None) -> tuple[int, int]:
    """Two 64-bit sums, modulo 2^64, of a mix of (global element index, element bits).

    x: [rows, cols] of 2- or 4-byte elements, the part of a tensor of `width` columns whose first element is at
    (row0, col0). Parts of one tensor add up, whatever the sharding: see `combine`.
    """
    return fingerprints([[Part(x, row0, col0, x.shape[1] if width is None else width)]])[0]


@dataclass(frozen=True)
class Part:
    """What `fingerprint` takes: x [rows, cols], a part of a tensor of `width` columns, from (row0, col0) on."""

    x: torch.Tensor
    row0: int
    col0: int
    width: int


def fingerprints(tensors: Sequence[Sequence[Part]]) -> list[tuple[int, int]]:
    """Of each tensor what its parts add up to, (0, 0) where there are none.

    A device is read once for all: of processes that share a GPU each waits its turn for every read.
    """
    first = next((part.x for parts in tensors for part in parts), None)
    if first is None:
        return [(0, 0) for _ in tensors]
    return cast(list[tuple[int, int]], form("state", first).fingerprints(tensors))


def row_fingerprints(x: torch.Tensor, shards: int = 1, shard0: int = 0) -> torch.Tensor:
    """One 64-bit sum a row and virtual shard, int64 words [rows, shards]: the first mix of `fingerprint`, over columns.

    x: [rows, shards * cols] of 2- or 4-byte elements, contiguous: adjacent virtual shards from `shard0` on. Neither the
    row's place nor the other shards held here enter; sums over all shards are those of the whole row.
    """
    return cast(torch.Tensor, form("state", x).row_fingerprints(x, shards, shard0))


def combine(parts: list[tuple[int, int]]) -> tuple[int, int]:
    """Fingerprint of the whole from those of its disjoint parts."""
    return sum(a for a, _ in parts) & MASK, sum(b for _, b in parts) & MASK


def as_hex(pair: tuple[int, int]) -> str:
    """16 hex digits, a colon, 16 hex digits."""
    return f"{pair[0]:016x}:{pair[1]:016x}"
