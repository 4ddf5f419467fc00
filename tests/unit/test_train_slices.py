"""Virtual slices are a function of the sequence alone, and cover every position once for every degree.

Lengths 1 and 7 leave half-slices empty, 8, 9 and 15 leave some, 16 gives each one token, 17 and 130 leave remainders.
"""

from __future__ import annotations

import pytest

from rlk.model.slices import half_slice, shard_positions, slice_positions
from rlk.plan.topology import DEGREES, VIRTUAL

LENGTHS = (1, 7, 8, 9, 15, 16, 17, 130)


@pytest.mark.parametrize("length", LENGTHS)
def test_half_slices_cover_every_position_in_order(length: int) -> None:
    assert [p for h in range(16) for p in half_slice(h, length)] == list(range(length))


@pytest.mark.parametrize("length", LENGTHS)
def test_slices_cover_every_position_exactly_once(length: int) -> None:
    assert sorted(p for j in range(VIRTUAL) for p in slice_positions(j, length)) == list(range(length))
    assert all(slice_positions(j, length) == sorted(slice_positions(j, length)) for j in range(VIRTUAL))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("cp", DEGREES)
def test_ranks_own_whole_adjacent_slices(cp: int, length: int) -> None:
    n = VIRTUAL // cp
    ranks = [shard_positions(range(r * n, (r + 1) * n), length) for r in range(cp)]
    assert [positions for rank in ranks for positions in rank] == [slice_positions(j, length) for j in range(VIRTUAL)]


def test_a_slice_is_two_mirrored_half_slices() -> None:
    assert slice_positions(0, 130) == [*range(8), *range(121, 130)]
    assert slice_positions(7, 130) == [*range(56, 65), *range(65, 73)]


def test_every_rank_gets_its_share_of_causal_work() -> None:
    work = [sum(p + 1 for p in slice_positions(j, 1024)) for j in range(VIRTUAL)]
    assert max(work) == min(work)
    chunks = [sum(p + 1 for p in range(j * 128, (j + 1) * 128)) for j in range(VIRTUAL)]
    assert max(chunks) > 10 * min(chunks), "adjacent chunks would not"
