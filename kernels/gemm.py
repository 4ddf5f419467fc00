"""Matrix products of the canonical program: bf16 in, one fp32 chain per element in ascending index order.

A weight is stored [N, K] as checkpoints do. `prepare` gives the form a device multiplies with; it is a copy on a
CPU, so it
must be made anew whenever the weight is written: the model does so in the one place where weights change.
"""

from __future__ import annotations

from typing import cast

import torch

from rlk.kernels.forms import form


def prepare(w: torch.Tensor) -> torch.Tensor:
    """What `linear` multiplies with, from a weight [N, K] bf16."""
    return cast(torch.Tensor, form("gemm", w).prepare(w))


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16, to nearest even, -0 to +0: the one rounding at the root of a sum."""
    return cast(torch.Tensor, form("gemm", x).round_bf16(x.contiguous()))


def linear(x: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
    """x [M, K] bf16 times a prepared weight: one chain over all of K, one rounding. Returns [M, N] bf16."""
    return round_bf16(leaf(x, prepared))


def leaf(x: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
    """The same chain without the rounding, [M, N] fp32: one leaf of a row-parallel product."""
    return cast(torch.Tensor, form("gemm", x).chain(x, prepared, None))


def input_gradient(dy: torch.Tensor, w: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """dy [M, N] bf16 times a weight [N, K] bf16 as stored: a chain over N. Returns [M, K] fp32.

    `into` continues a chain that other rows of the same virtual shard began.
    """
    return cast(torch.Tensor, form("gemm", dy).chain(dy, w, into))


def weight_gradient(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dy [T, N] and x [T, K], both bf16: a chain over tokens in order. Returns [N, K] fp32, one leaf of a weight's
    gradient."""
    return cast(torch.Tensor, form("gemm", dy).chain(dy.t(), x, None))
