"""The reduction tree of the virtual machine: ((0+1)+(2+3))+((4+5)+(6+7)), in fp32, whatever holds the leaves."""

from __future__ import annotations

import torch

VIRTUAL = 8  # virtual shards, and virtual slices: numerics, section 1


def tree_sum(leaves: torch.Tensor) -> torch.Tensor:
    """Sums leaves [n, ...] fp32 over the first axis, n a power of two: neighbours first.

    A rank that holds whole subtrees may sum them first and pass one partial on: the association is the same.

    Raises:
        ValueError: n is not a power of two.
    """
    n = leaves.shape[0]
    if n < 1 or n & (n - 1):
        raise ValueError(f"a tree has 1, 2, 4 or 8 leaves, got {n}")
    while leaves.shape[0] > 1:
        leaves = leaves[0::2] + leaves[1::2]
    return leaves[0]
