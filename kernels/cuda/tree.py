"""CUDA form of the reduction tree over leaves in memory, and of the rounding at its root."""

from __future__ import annotations

import torch

from rlk.kernels.cuda import launch
from rlk.kernels.cuda.programs.tree import tree_sum

BLOCK = 1024


def tree(leaves: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The tree over the first axis of leaves [1, 2, 4 or 8, ...] fp32, contiguous; bf16 is rounded once."""
    if leaves.shape[0] == 1 and dtype == torch.float32:
        return leaves[0]
    out = torch.empty_like(leaves[0], dtype=dtype)
    _sum(leaves, out)
    return out


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """One rounding to nearest even; a zero comes out positive."""
    return tree(x[None], torch.bfloat16)


def _sum(leaves: torch.Tensor, out: torch.Tensor) -> None:
    launch.take(leaves, torch.float32)
    n = out.numel()
    launch.run(
        tree_sum, (launch.tiles(n, BLOCK),), leaves, out, n, LEAVES=leaves.shape[0], BLOCK=BLOCK,
        EVEN=n % BLOCK == 0, ROUND=out.dtype == torch.bfloat16,
    )  # fmt: skip
