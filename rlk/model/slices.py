"""Virtual slices of a sequence: slice j is half-slices j and 15 - j, so causal work is balanced for every degree.

Half-slice h of a sequence of length L holds tokens floor(h L / 16) to floor((h + 1) L / 16): a function of the
sequence alone, possibly empty.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlk.kernels.tree import VIRTUAL


def half_slice(h: int, length: int) -> range:
    """Positions of half-slice h, 0 <= h < 16, of a sequence of `length` tokens."""
    halves = 2 * VIRTUAL
    return range(h * length // halves, (h + 1) * length // halves)


def slice_positions(j: int, length: int) -> list[int]:
    """Positions of virtual slice j, ascending."""
    return [*half_slice(j, length), *half_slice(2 * VIRTUAL - 1 - j, length)]


def shard_positions(slices: Iterable[int], length: int) -> list[list[int]]:
    """Positions of each of the given slices: the order in which a context-parallel rank keeps a sequence's tokens."""
    return [slice_positions(j, length) for j in slices]
