"""CPU form of the matrix products: one fp32 chain per element, written out in gemm.cpp."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlk.kernels.cpu.library import load, pointer, token_ranges
from rlk.kernels.tree import tree_sum

BF16, F32 = torch.bfloat16, torch.float32


def describe() -> str:
    """Which implementation runs."""
    return "cpu: fixed loop order in C++"


def prepare(w: torch.Tensor) -> torch.Tensor:
    """The transpose, stored: lanes run across output columns, so these must be adjacent."""
    return w.transpose(-1, -2).contiguous()


def chain(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """a [M, K] (any strides) times b [K, N] (rows contiguous), fp32, continuing the chain of `into` where given."""
    (m, k), n = a.shape, b.shape[1]
    if b.stride(1) != 1 and n > 1:
        raise TypeError(f"the right operand's rows must be contiguous, got strides {b.stride()}")
    c = torch.empty(m, n, dtype=F32) if into is None else into
    load().rlk_gemm(
        pointer(a, BF16, contiguous=False), a.stride(0), a.stride(1),
        pointer(b, BF16, contiguous=False), b.stride(0),
        pointer(c, F32, contiguous=False), c.stride(0), m, n, k, int(into is not None),
    )  # fmt: skip
    return c


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """One rounding to nearest even; a zero comes out positive."""
    out = torch.empty(x.shape, dtype=BF16)
    load().rlk_round_bf16(pointer(x, F32), pointer(out, BF16), x.numel())
    return out


def linear(x: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
    """One chain, one rounding."""
    return round_bf16(chain(x, prepared, None))


def leaves_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, S, K] times b [S, K, N]: a leaf a shard, the tree over the S leaves; fp32 [M, N]."""
    return tree_sum(torch.stack([chain(a[:, s], shard, None) for s, shard in enumerate(b)]))


def row_linear(x: torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
    """See rlk.kernels.gemm."""
    return round_bf16(leaves_sum(x, prepared))


def row_inputs(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """See rlk.kernels.gemm."""
    return torch.stack([linear(dy, shard) for shard in w], 1)


def weight_gradients(dy: torch.Tensor, x: torch.Tensor, slices: Sequence[Sequence[tuple[int, int]]]) -> torch.Tensor:
    """See rlk.kernels.gemm."""
    m, n, ranges = dy.shape[1], x.shape[1], token_ranges(slices, dy.shape[0])
    leaves = torch.empty(*ranges.shape[:2], m, n, dtype=F32)
    if x.stride(1) != 1 and n > 1:
        raise TypeError(f"the right operand's rows must be contiguous, got strides {x.stride()}")
    load().rlk_gemm_ranges(
        pointer(dy, BF16, contiguous=False), dy.stride(1), dy.stride(0),
        pointer(x, BF16, contiguous=False), x.stride(0),
        pointer(leaves, F32), pointer(ranges, torch.int64), ranges[..., 0].numel(), m, n,
    )  # fmt: skip
    return tree_sum(leaves.transpose(0, 1))


def row_weight_gradients(
    dy: torch.Tensor, x: torch.Tensor, slices: Sequence[Sequence[tuple[int, int]]]
) -> torch.Tensor:
    """See rlk.kernels.gemm."""
    return torch.stack([weight_gradients(dy, x[:, s], slices) for s in range(x.shape[1])], 1)


def plain_chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """[M, N] fp32 of x [M, K] and w [N, K]: one accumulator an element, k ascending, in single torch operations."""
    total = torch.zeros(x.shape[0], w.shape[0])
    for k in range(x.shape[1]):
        total = total + x[:, k, None].float() * w[None, :, k].float()
    return total
