"""Degrees and padding: the vocabulary is padded alike for every TP, where 128 * TP would give three answers.

151,936 is Qwen3-8B's vocabulary; 400 is the size of a tiny one.
"""

from __future__ import annotations

import pytest

from rlk.plan.topology import DEGREES, VIRTUAL, Topology, padded_rows


@pytest.mark.parametrize("tp", DEGREES)
@pytest.mark.parametrize("cp", DEGREES)
def test_ranks_are_the_product_of_degrees(tp: int, cp: int) -> None:
    assert Topology(tp, cp).ranks == tp * cp


@pytest.mark.parametrize(("tp", "cp"), [(3, 1), (1, 3), (0, 8), (16, 1), (-1, 8)])
def test_degrees_outside_the_tree_are_refused(tp: int, cp: int) -> None:
    with pytest.raises(ValueError, match="allowed is 1, 2, 4 or 8"):
        Topology(tp, cp)


@pytest.mark.parametrize("degree", DEGREES)
def test_every_degree_is_whole_subtrees(degree: int) -> None:
    shards = VIRTUAL // degree
    assert shards * degree == VIRTUAL
    assert shards & (shards - 1) == 0


def test_padding_is_one_size_for_every_degree() -> None:
    assert padded_rows(151_936) == 152_576
    assert [-(-151_936 // (128 * tp)) * 128 * tp for tp in DEGREES] == [151_936, 152_064, 152_064, 152_576]


@pytest.mark.parametrize(("real", "padded"), [(1, 1024), (400, 1024), (1024, 1024), (1025, 2048)])
def test_padding_is_to_the_next_multiple(real: int, padded: int) -> None:
    assert padded_rows(real) == padded
