"""CUDA form of norms, rotary embedding, SwiGLU, additions and the embedding's gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlk.kernels.cuda import launch
from rlk.kernels.cuda.launch import take
from rlk.kernels.cuda.programs import elementwise, norm

BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64
BLOCK = 1024
WIDE = 512
"""From here a row gets a program of its own (hidden states); below, eight share one (heads)."""
FEW = 512
"""Rows of hidden states up to which a device is not filled by one warp each."""


def describe() -> str:
    """Which implementation runs."""
    return f"{launch.PLACE}: Triton"


def _norm_shape(rows: int, n: int, step: int) -> tuple[tuple[int, ...], dict[str, int]]:
    """Grid and tile of a norm: free, since the order of a row's sum is written out.

    A wide row is one warp's where there are many, and four warps' where there are few and latency is all.
    """
    per = 1 if n >= WIDE else 8
    warps = 1 if per == 1 and rows > FEW else 4
    constants = {"N": n, "ROWS": per, "STEP": min(step, launch.tiles(n, 16)), "warps": warps}
    return (launch.tiles(rows, per),), {**constants, "BLOCK": min(BLOCK * warps, launch.power(n))}


def rmsnorm(x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See rlk.kernels.pointwise."""
    rows, n = x.numel() // x.shape[-1], x.shape[-1]
    y, rstd = torch.empty_like(take(x, BF16)), x.new_empty(rows, dtype=F32)
    grid, constants = _norm_shape(rows, n, 32)
    launch.run(norm.rmsnorm, grid, x, take(w, BF16), y, rstd, eps, rows, **constants)
    return y, rstd


def rmsnorm_backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    """See rlk.kernels.pointwise."""
    dx = torch.empty_like(take(x, BF16))
    joined = take(dy, BF16) if residual is None else take(residual, BF16)  # an address that is not read
    grid, constants = _norm_shape(rstd.numel(), x.shape[-1], 16)
    launch.run(
        norm.rmsnorm_backward, grid, dy, x, take(w, BF16), take(rstd, F32), joined, dx, rstd.numel(), **constants,
        JOIN=residual is not None,
    )  # fmt: skip
    return dx


def rmsnorm_gain(dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """See rlk.kernels.pointwise."""
    n, rows = x.shape[-1], rstd.numel()
    return rmsnorm_gains(dy.view(rows, 1, 1, n), x.view(rows, 1, 1, n), rstd, [(0, rows)])[0, 0]


def rmsnorm_gains(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, ranges: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """See rlk.kernels.pointwise: one launch for all ranges and groups."""
    _, groups, heads, n = x.shape
    edges = launch.ranges(ranges, x.device)
    out = x.new_empty(len(ranges), groups, n, dtype=F32)
    block = min(128, launch.power(n))
    launch.run(
        norm.gains, (launch.tiles(n, block), groups, len(ranges)), take(dy, BF16), take(x, BF16), take(rstd, F32),
        edges, out, N=n, GROUPS=groups, HEADS=heads, STEP=8, BLOCK=block, warps=1,
    )  # fmt: skip
    return out


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """See rlk.kernels.pointwise."""
    out, n = torch.empty_like(take(a, BF16)), a.numel()
    launch.run(elementwise.add, (launch.tiles(n, BLOCK),), a, take(b, BF16), out, n, BLOCK=BLOCK, EVEN=n % BLOCK == 0)
    return out


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, sign: float) -> torch.Tensor:
    """See rlk.kernels.pointwise."""
    t, h, d = x.shape
    y = torch.empty_like(take(x, BF16))
    launch.run(
        elementwise.rope, (t,), x, take(cos, F32), take(sin, F32), take(positions, I64), y, sign, H=h, D=d,
        HEADS=launch.power(h), HALF=launch.power(d // 2),
    )  # fmt: skip
    return y


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See rlk.kernels.pointwise."""
    t, s, f2 = gate_up.shape
    y = gate_up.new_empty(t, s, f2 // 2)
    grid, constants = _column_blocks(t * s, f2 // 2)
    launch.run(elementwise.swiglu, grid, take(gate_up, BF16), y, **constants)
    return y


def swiglu_backward(dy: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """See rlk.kernels.pointwise."""
    t, s, f = dy.shape
    d = torch.empty_like(take(gate_up, BF16))
    grid, constants = _column_blocks(t * s, f)
    launch.run(elementwise.swiglu_backward, grid, take(dy, BF16), gate_up, d, **constants)
    return d


def _column_blocks(rows: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """A grid of rows and blocks of columns that divide the width where they can."""
    block = next((b for b in (1024, 512, 256, 128) if width % b == 0), BLOCK)
    return (rows, launch.tiles(width, block)), {"F": width, "BLOCK": block, "warps": max(1, block // 256)}


def embedding_leaf(dx: torch.Tensor, rows: torch.Tensor, height: int) -> torch.Tensor:
    """See rlk.kernels.pointwise. Sorted by destination first, stably: integers, so no order of sums is touched."""
    t, n = take(dx, BF16).shape
    out = dx.new_zeros(height, n, dtype=F32)
    ordered, order = take(rows, I64, contiguous=False).sort(stable=True)
    block = min(512, launch.power(n))
    grid = (t, launch.tiles(n, block))
    launch.run(elementwise.embedding_leaf, grid, dx, order, ordered, out, t, height, N=n, BLOCK=block)
    return out
