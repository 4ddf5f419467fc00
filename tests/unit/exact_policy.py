"""The sampling rules written a second time, in Python integers: what the kernels are compared with, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

WORD = 0xFFFFFFFF
Row = npt.NDArray[np.float32]


def rounded_once(d: Row) -> Row:
    """exp in float64, rounded to fp32: the exp of the CPU form. That of a GPU is another."""
    return np.exp(d.astype(np.float64)).astype(np.float32)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., SC 2011)."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (q >> 32) ^ b ^ k, q & WORD, (p >> 32) ^ d ^ m, p & WORD
        k, m = (k + 0x9E3779B9) & WORD, (m + 0xBB67AE85) & WORD
    return a, b, c, d


@dataclass(frozen=True)
class Exact:
    """One row of logits under one setting: scaled distances from the maximum, masses, kept ids ascending."""

    d: list[float]
    mass: list[int]
    kept: list[int]

    @property
    def total(self) -> int:
        return sum(self.mass[i] for i in self.kept)

    def logprob(self, token: int) -> float:
        """float64, before its one rounding."""
        return self.d[token] - math.log(self.total / 2**40) + 0.0

    def draw(self, seed: int, sample_id: int, position: int) -> int:
        """Inverse-CDF over the kept integers, ids ascending."""
        counter = (position & WORD, sample_id & WORD, sample_id >> 32 & WORD, 0)
        high, low, *_ = philox(counter, (seed & WORD, seed >> 32 & WORD))
        u, prefix = ((high << 32 | low) * self.total) >> 64, 0
        for i in self.kept:
            prefix += self.mass[i]
            if prefix > u:
                return i
        raise AssertionError("the last prefix exceeds every u")


def exact(
    row: torch.Tensor, temperature: float, top_p: float = 1.0, top_k: int = -1, exp: Callable[[Row], Row] = rounded_once
) -> Exact:
    """Numerics of one row of bf16 logits [V]; temperature 0 is scored untempered over the whole vocabulary."""
    if temperature == 0:
        temperature, top_p, top_k = 1.0, 1.0, -1
    x = row.float().numpy() + np.float32(0)
    with np.errstate(over="ignore"):
        d = (x - x.max()) / np.float32(temperature)
    mass = [int(float(v) * 2**40) for v in exp(d)]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))[: top_k if top_k > 0 else None]
    threshold = int(top_p * float(sum(mass[i] for i in order)))
    kept, before = [], 0
    for rank, i in enumerate(order):
        if rank == 0 or top_p == 1 or before < threshold:
            kept.append(i)
        before += mass[i]
    return Exact([float(v) for v in d], mass, sorted(kept))
