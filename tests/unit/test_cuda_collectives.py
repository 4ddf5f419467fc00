"""Arenas and their programs, interpreted, give every rank the tree over all partials, and move bytes unchanged.

Two, four and eight ranks; tensors that fill no block, that need several turns of a 2 MiB arena, and of odd byte counts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.interpreted import interpreted
from tests.unit.probes import assert_moved, assert_same, left_to_right, spread

LEAVES = spread(8, 512, seed=1).float() * spread(8, 512, seed=2).float()


@pytest.mark.parametrize("size", [2, 4, 8])
@interpreted
def test_every_rank_has_the_tree(size: int) -> None:
    from rlk.kernels.collectives.base import tree_all_reduce, tree_reduce_scatter
    from rlk.kernels.tree import tree_sum
    from tests.unit.arenas import on_arenas

    mine, whole = LEAVES.view(size, 8 // size, 512), tree_sum(LEAVES)
    assert_moved(left_to_right(LEAVES), whole, "left to right")
    for found in on_arenas(size, lambda c: tree_all_reduce(mine[c.rank], c, "sum")):
        assert_same(found, whole)
    pieces = mine.view(size, 8 // size, size, -1)
    assert_same(torch.cat(on_arenas(size, lambda c: tree_reduce_scatter(pieces[c.rank], c, "scatter"))), whole)


@interpreted
def test_large_sums_go_in_two_steps_and_several_turns() -> None:
    from rlk.kernels.collectives.base import tree_all_reduce
    from rlk.kernels.collectives.turns import TWO_STEPS
    from rlk.kernels.tree import tree_sum
    from tests.unit.arenas import on_arenas

    for n in (TWO_STEPS // 4, TWO_STEPS // 4 + 1):
        partials = torch.stack([LEAVES[i].repeat(n // 512 + 1)[:n] for i in range(4)])
        for found in on_arenas(4, lambda c, p=partials: tree_all_reduce(p[c.rank][None], c, "sum")):
            assert_same(found, tree_sum(partials))


@interpreted
def test_bytes_are_moved_in_rank_order_whatever_their_type() -> None:
    from tests.unit.arenas import on_arenas

    tensors = [spread(4, 3, 5, seed=3), spread(4, 3, 5, seed=4).float(), torch.arange(60).view(4, 3, 5),
               torch.arange(60, dtype=torch.uint8).view(4, 15)[:, 1:], LEAVES[:4] > 0]  # fmt: skip

    def both(c: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(c.all_gather(t[c.rank], "gather"), c.all_to_all(t + c.rank, "exchange")) for t in tensors]

    for rank, found in enumerate(on_arenas(4, both)):
        for t, (gathered, exchanged) in zip(tensors, found, strict=True):
            assert_same(gathered, t)
            assert_same(exchanged, torch.stack([(t + p)[rank] for p in range(4)]))


@interpreted
def test_exact_sums_and_maxima_are_over_all_ranks() -> None:
    from rlk.kernels.collectives.base import integer_sum, maximum
    from tests.unit.arenas import on_arenas

    large = torch.tensor([[2**62, -3], [2**62, 5]])
    for total, top in on_arenas(2, lambda c: (integer_sum(large[c.rank], c, "m"), maximum(large[c.rank], c, "x"))):
        assert total.tolist() == [-(2**63), 2]
        assert top.tolist() == [2**62, 5]
    with pytest.raises(TypeError, match=r"over torch.int64, got torch.float32"):
        on_arenas(2, lambda c: integer_sum(LEAVES[c.rank], c, "m"))


@interpreted
def test_the_host_sees_how_far_a_rank_has_come_and_where() -> None:
    from rlk.kernels.collectives.arena import READ, SIGNALLED, STAGE
    from tests.unit.arenas import on_arenas

    def two(c: Any) -> tuple[list[int], str]:
        c.all_gather(LEAVES[c.rank], "layers.0.kv")
        c.gather_tree(LEAVES[c.rank], "layers.0.o")
        words = c.progress.tolist()
        return [words[SIGNALLED], words[READ]], c.stage(words[STAGE])

    assert on_arenas(2, two) == [([2, 2], "layers.0.o")] * 2


@interpreted
def test_sums_of_other_types_are_refused() -> None:
    from tests.unit.arenas import on_arenas

    with pytest.raises(TypeError, match=r"layers.0.o sums torch.bfloat16"):
        on_arenas(2, lambda c: c.gather_tree(spread(8, seed=1), "layers.0.o"))
