"""What a reduction needs of a transport, and the canonical reductions built on it."""

from __future__ import annotations

from typing import Protocol

import torch

from rlk.kernels.tree import tree_sum


class CollectiveTimeoutError(RuntimeError):
    """A rank did not come in time; the message names the stage, the group and, where the transport knows, the rank."""


class Collective(Protocol):
    """Exact movement of bytes within one group of ranks."""

    @property
    def rank(self) -> int:
        """This process's place in the group."""

    @property
    def size(self) -> int:
        """Ranks in the group: 1, 2, 4 or 8."""

    def all_gather(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """[size, *t.shape], in rank order. All ranks pass the same shape and dtype."""

    def all_to_all(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """t [size, ...]: piece i goes to rank i; returns the pieces received, in rank order."""

    def all_reduce(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """The transport's ordinary sum, in whatever order it likes: for the native operators only."""


class Alone:
    """A group of one."""

    rank = 0
    size = 1

    def all_gather(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """The tensor itself."""
        return t[None]

    def all_to_all(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """The tensor itself."""
        return t

    def all_reduce(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """The tensor itself."""
        return t


def tree_all_reduce(leaves: torch.Tensor, group: Collective, stage: str) -> torch.Tensor:
    """The tree over all leaves of the group, in fp32, on every rank.

    leaves [n, ...] fp32: this rank's whole subtree, n * size = 8. Its own part is summed first, then the ranks'
    partials: the same association for every size.
    """
    return tree_sum(group.all_gather(tree_sum(leaves), stage))


def tree_reduce_scatter(leaves: torch.Tensor, group: Collective, stage: str) -> torch.Tensor:
    """As tree_all_reduce, but rank i receives only piece i. leaves [n, size, ...] fp32; returns [...]."""
    return tree_sum(group.all_to_all(tree_sum(leaves), stage))
