"""Matrix products of the canonical program: bf16 in, one fp32 chain per element in ascending index order.

A weight is stored [N, K] as checkpoints do, S virtual shards of it as [S, N, K]. `prepare` gives the form a device
multiplies with; it is a copy on a CPU, so it must be made anew whenever the weight is written: the model does so in the
one place where weights change. What a chain is made of differs: single multiply-adds on a CPU, tensor-core steps of 16
on a GPU, where an inner axis that is no multiple of 16 is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from rlk.kernels.forms import form


def prepare(w: torch.Tensor) -> torch.Tensor:
    """What products multiply with, from a weight [..., N, K] bf16: [..., K, N]."""
    return cast(torch.Tensor, form("gemm", w).prepare(w))


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16, to nearest even, -0 to +0: the one rounding at the root of a sum."""
    return cast(torch.Tensor, form("gemm", x).round_bf16(x.contiguous()))


def linear(x: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
    """x [M, K] bf16 times a prepared weight: one chain over all of K, one rounding. Returns [M, N] bf16."""
    return cast(torch.Tensor, form("gemm", x).linear(x, prepared))


def leaf(x: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
    """The same chain without the rounding, [M, N] fp32: one leaf of a row-parallel product."""
    return cast(torch.Tensor, form("gemm", x).chain(x, prepared, None))


def row_leaves(x: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
    """x [M, S, K] bf16 times S prepared shards: a leaf a shard, and the subtree over them. Returns [M, N] fp32."""
    return cast(torch.Tensor, form("gemm", x).leaves_sum(x, prepared))


def row_linear(x: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
    """`row_leaves` of all eight shards, and its one rounding: a row-parallel product where one rank holds all of it.
    Returns [M, N] bf16."""
    return cast(torch.Tensor, form("gemm", x).row_linear(x, prepared))


def input_gradient(dy: torch.Tensor, w: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """dy [M, N] bf16 times a weight [N, K] bf16 as stored: a chain over N. Returns [M, K] fp32.

    `into` continues a chain that other rows of the same virtual shard began, a multiple of 16 of them.
    """
    return cast(torch.Tensor, form("gemm", dy).chain(dy, w, into))


def column_input_leaves(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """dy [M, S, N] bf16 times S shards [S, N, K] as stored: a leaf a shard (a chain over its rows), and the subtree
    over them. Returns [M, K] fp32."""
    return cast(torch.Tensor, form("gemm", dy).leaves_sum(dy, w))


def row_inputs(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """dy [M, N] bf16 times each of S shards [S, N, K] as stored: one chain, one rounding. Returns [M, S, K] bf16."""
    return cast(torch.Tensor, form("gemm", dy).row_inputs(dy, w))


def weight_gradient(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dy [T, N] and x [T, K], both bf16: a chain over tokens in order. Returns [N, K] fp32, one leaf of a weight's
    gradient."""
    return weight_gradients(dy, x, [[(0, dy.shape[0])]])[0]


def weight_gradients(dy: torch.Tensor, x: torch.Tensor, slices: Sequence[Sequence[tuple[int, int]]]) -> torch.Tensor:
    """The gradients of all samples of a micro-batch at once, [samples, N, K] fp32.

    dy [T, N] and x [T, K], bf16, rows contiguous. slices[i]: token ranges of sample i, 1, 2, 4 or 8 of them and the
    same number for every sample; each is one leaf, and sample i's gradient is the tree over its leaves.
    """
    return cast(torch.Tensor, form("gemm", dy).weight_gradients(dy, x, slices))


def row_weight_gradients(
    dy: torch.Tensor, x: torch.Tensor, slices: Sequence[Sequence[tuple[int, int]]]
) -> torch.Tensor:
    """`weight_gradients` of each of S shards, x [T, S, K] bf16: [samples, S, N, K] fp32."""
    return cast(torch.Tensor, form("gemm", dy).row_weight_gradients(dy, x, slices))
