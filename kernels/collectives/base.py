"""What a reduction needs of a transport, and the canonical reductions built on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol, runtime_checkable

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


@runtime_checkable
class Settling(Protocol):
    """A transport whose calls return before the bytes have moved."""

    def settle(self) -> None:
        """Waits for what was started; raises CollectiveTimeoutError by rank and stage."""

    def check(self) -> None:
        """Raises CollectiveTimeoutError if a wait was given up."""


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


class SummingCollective(ABC):
    """A transport that can also sum on the way, in the order of the tree: bytes and memory saved, the same bits."""

    @abstractmethod
    def gather_tree(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """tree_sum(all_gather(t)), t fp32."""

    @abstractmethod
    def exchange_tree(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """tree_sum(all_to_all(t)), t fp32 [size, ...]."""


def tree_all_reduce(leaves: torch.Tensor, group: Collective, stage: str) -> torch.Tensor:
    """The tree over all leaves of the group, in fp32, on every rank.

    leaves [n, ...] fp32: this rank's whole subtree, n * size = 8. Its own part is summed first, then the ranks'
    partials: the same association for every size.
    """
    partial = tree_sum(leaves)
    if isinstance(group, SummingCollective):
        return group.gather_tree(partial, stage)
    return tree_sum(group.all_gather(partial, stage))


def tree_reduce_scatter(leaves: torch.Tensor, group: Collective, stage: str) -> torch.Tensor:
    """As tree_all_reduce, but rank i receives only piece i. leaves [n, size, ...] fp32; returns [...]."""
    partial = tree_sum(leaves)
    if isinstance(group, SummingCollective):
        return group.exchange_tree(partial, stage)
    return tree_sum(group.all_to_all(partial, stage))


def integer_sum(t: torch.Tensor, group: Collective, stage: str) -> torch.Tensor:
    """The sum of every rank's t int64, modulo 2^64: exact, so in no particular order.

    Raises:
        TypeError: t is not int64, so its sum would depend on an order, or overflow sooner.
    """
    if t.dtype != torch.int64:
        raise TypeError(f"{stage}: an exact sum is over torch.int64, got {t.dtype}; a sum of fp32 is a tree")
    return group.all_gather(t, stage).sum(0)


def maximum(t: torch.Tensor, group: Collective, stage: str) -> torch.Tensor:
    """The largest of every rank's t, element by element."""
    return group.all_gather(t, stage).amax(0)
