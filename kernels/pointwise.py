"""Norms, rotary embedding, SwiGLU, residual additions: fp32 arithmetic in a declared order, one rounding to bf16 an op.

Shapes: T tokens, H heads, D head dimension, S virtual shards held here, F columns of one shard's gate (or up).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from rlk.kernels.forms import form


def rmsnorm(x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(x * rstd) * w over the last axis of x bf16 (Zhang and Sennrich, 2019).

    Returns the result, bf16, and rstd, fp32, one a row. A row is reduced in 16 interleaved chains and a tree over them.
    """
    return cast(tuple[torch.Tensor, torch.Tensor], form("pointwise", x).rmsnorm(x, w, eps))


def rmsnorm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    rstd: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Input gradient of `rmsnorm`, bf16; the residual branch's gradient joins in fp32 before the one rounding."""
    return cast(torch.Tensor, form("pointwise", x).rmsnorm_backward(dy, x, w, rstd, residual))


def rmsnorm_gain(dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """One leaf of the gain's gradient, fp32 [N]: a chain over the rows in order."""
    return cast(torch.Tensor, form("pointwise", x).rmsnorm_gain(dy, x, rstd))


def rmsnorm_gains(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, ranges: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Leaves of gains, one for each range of tokens and each group of heads: a chain over token, then head.

    dy, x: [T, groups, heads of a group, N] bf16; rstd fp32, one a row of x. Returns [ranges, groups, N] fp32.
    """
    return cast(torch.Tensor, form("pointwise", x).rmsnorm_gains(dy, x, rstd, ranges))


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """fp32 sum of two bf16 tensors, one rounding."""
    return cast(torch.Tensor, form("pointwise", a).add(a, b))


def rope_tables(theta: float, head_dim: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [length, head_dim / 2], fp32 from float64 angles (Su et al., 2021). Never cast: bf16 cannot tell
    256 from 257. Always computed on the CPU: move them to where they are used."""
    here = torch.device("cpu")  # named, since vLLM makes its own device torch's default while it builds a model
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=here) / head_dim)
    angles = torch.arange(length, dtype=torch.float64, device=here)[:, None] * inverse
    return angles.cos().float(), angles.sin().float()


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, *, backward: bool = False
) -> torch.Tensor:
    """Rotates x [T, H, D] bf16 by its positions int64 [T]; backward rotates the other way. One rounding."""
    return cast(torch.Tensor, form("pointwise", x).rope(x, cos, sin, positions, -1.0 if backward else 1.0))


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (Shazeer, 2020) of [T, S, 2F] bf16, a row being [gate | up] of one virtual shard. Returns [T,
    S, F] bf16."""
    return cast(torch.Tensor, form("pointwise", gate_up).swiglu(gate_up))


def swiglu_backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Gradient [T, S, 2F] bf16 of `swiglu` for dy [T, S, F] bf16."""
    return cast(torch.Tensor, form("pointwise", gate_up).swiglu_backward(dy, gate_up))


def embedding_leaf(dx: torch.Tensor, rows: torch.Tensor, height: int) -> torch.Tensor:
    """One leaf of an embedding's gradient, fp32 [height, N]: rows of dx [T, N] bf16 join the row of their token, in
    token order.

    rows int64 [T]; a row outside 0..height-1 belongs to another rank and is left out.
    """
    return cast(torch.Tensor, form("pointwise", dx).embedding_leaf(dx, rows, height))
