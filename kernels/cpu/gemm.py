"""CPU form of the matrix products: one fp32 chain per element, written out in gemm.cpp."""

from __future__ import annotations

import torch

from rlk.kernels.cpu.library import load, pointer

BF16, F32 = torch.bfloat16, torch.float32


def prepare(w: torch.Tensor) -> torch.Tensor:
    """The transpose, stored: lanes run across output columns, so these must be adjacent."""
    return w.t().contiguous()


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
