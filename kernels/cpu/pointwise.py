"""CPU form of norms, rotary embedding, SwiGLU, additions and the embedding's gradient: pointwise.cpp."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlk.kernels.cpu.library import load, pointer, token_ranges

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64


def describe() -> str:
    """Which implementation runs."""
    return "cpu: fixed loop order in C++"


def rmsnorm(x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See rlk.kernels.pointwise."""
    n = x.shape[-1]
    rows = x.numel() // n
    y, rstd = torch.empty_like(x), torch.empty(rows, dtype=F32)
    load().rlk_rmsnorm(pointer(x, BF16), pointer(w, BF16), pointer(y, BF16), pointer(rstd, F32), eps, rows, n)
    return y, rstd


def rmsnorm_backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    """See rlk.kernels.pointwise."""
    dx, n = torch.empty_like(x), x.shape[-1]
    joined = None if residual is None else pointer(residual, BF16)
    load().rlk_rmsnorm_backward(
        pointer(dy, BF16),
        pointer(x, BF16),
        pointer(w, BF16),
        pointer(rstd, F32),
        joined,
        pointer(dx, BF16),
        rstd.numel(),
        n,
    )
    return dx


def rmsnorm_gain(dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """See rlk.kernels.pointwise."""
    n = x.shape[-1]
    out = torch.empty(n, dtype=F32)
    load().rlk_rmsnorm_gain(pointer(dy, BF16), pointer(x, BF16), pointer(rstd, F32), pointer(out, F32), rstd.numel(), n)
    return out


def rmsnorm_gains(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, ranges: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """See rlk.kernels.pointwise."""
    tokens, groups, n = x.shape[0], x.shape[1], x.shape[-1]
    places = token_ranges(ranges, tokens)
    out = torch.empty(len(places), groups, n, dtype=F32)
    heads = x[0, 0].numel() // n if tokens else 0
    load().rlk_rmsnorm_gains(
        pointer(dy, BF16), pointer(x, BF16), pointer(rstd, F32), pointer(out, F32), pointer(places, torch.int64),
        len(places), groups, heads, n,
    )  # fmt: skip
    return out


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """See rlk.kernels.pointwise."""
    out = torch.empty_like(a)
    load().rlk_add(pointer(a, BF16), pointer(b, BF16), pointer(out, BF16), a.numel())
    return out


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, sign: float) -> torch.Tensor:
    """See rlk.kernels.pointwise."""
    t, h, d = x.shape
    y = torch.empty_like(x)
    load().rlk_rope(
        pointer(x, BF16),
        pointer(cos, F32),
        pointer(sin, F32),
        pointer(positions, I64),
        pointer(y, BF16),
        sign,
        t,
        h,
        d,
    )
    return y


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See rlk.kernels.pointwise."""
    t, s, f2 = gate_up.shape
    y = torch.empty(t, s, f2 // 2, dtype=BF16)
    load().rlk_swiglu(pointer(gate_up, BF16), pointer(y, BF16), t * s, f2 // 2)
    return y


def swiglu_backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """See rlk.kernels.pointwise."""
    t, s, f2 = gate_up.shape
    d = torch.empty_like(gate_up)
    load().rlk_swiglu_backward(pointer(dy, BF16), pointer(gate_up, BF16), pointer(d, BF16), t * s, f2 // 2)
    return d


def embedding_leaf(dx: torch.Tensor, rows: torch.Tensor, height: int) -> torch.Tensor:
    """See rlk.kernels.pointwise."""
    t, n = dx.shape
    out = torch.zeros(height, n, dtype=F32)
    load().rlk_embedding_leaf(pointer(dx, BF16), pointer(rows, I64), pointer(out, F32), t, n, height)
    return out
