"""A gradient is one fp32 chain over samples of a tree over slices, whatever the degrees, micro-batches or packing.

Five samples and eight slices of values that span many powers of two; 7 x 9 elements a shard leave the eighth piece of
a shard partly padding.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlk.kernels.tree import tree_sum
from rlk.model.parallel import ParallelContext
from rlk.plan.topology import DEGREES
from rlk.train.gradients import TIED_HEAD, Accumulators, from_pieces, owned_pieces, piece_size, to_pieces
from tests.unit import checkpoints, training
from tests.unit.probes import assert_moved, assert_same, bits, left_to_right, spread
from tests.unit.ranks import on_ranks

WEIGHTS = {"head": torch.zeros(8, 7, 9, dtype=torch.bfloat16)}
LEAVES = spread(5, 8, 8, 7, 9, seed=1, factor=4.0).float()  # [samples, slices, shards, rows, cols]


def accumulate(context: ParallelContext, cuts: tuple[int, ...] = ()) -> torch.Tensor:
    """This rank's pieces after all five samples, in micro-batches that begin at `cuts`."""
    sums = Accumulators(WEIGHTS, context)
    for part in LEAVES.tensor_split(list(cuts)):
        own = part[:, list(context.slices)]
        sums.add("head", torch.stack([tree_sum(sample) for sample in own]))
    return sums.gradients()["head"]


def declared() -> torch.Tensor:
    return to_pieces(left_to_right(torch.stack([tree_sum(sample) for sample in LEAVES])))


@pytest.mark.parametrize("cp", DEGREES)
def test_ranks_hold_pieces_of_one_gradient(cp: int) -> None:
    assert_same(torch.cat(on_ranks(1, cp, accumulate), 1), declared())


@pytest.mark.parametrize("cuts", [(), (1,), (2, 4), (1, 2, 3, 4)])
def test_micro_batches_do_not_enter(cuts: tuple[int, ...]) -> None:
    assert_same(torch.cat(on_ranks(1, 4, lambda c: accumulate(c, cuts)), 1), declared())


def test_another_order_would_show() -> None:
    trees = torch.stack([tree_sum(sample) for sample in LEAVES])
    assert_moved(to_pieces(left_to_right(trees.flip(0))), declared(), "samples in reverse")
    slices_first = left_to_right(LEAVES.flatten(0, 1))
    assert_moved(to_pieces(slices_first), declared(), "one chain over samples and slices")
    of_batches = left_to_right(trees[:2]) + left_to_right(trees[2:])
    assert_moved(to_pieces(of_batches), declared(), "micro-batches summed apart")


def test_zero_forgets_the_last_step() -> None:
    sums = Accumulators(WEIGHTS, ParallelContext())
    sums.add("head", torch.ones(1, 8, 7, 9))
    sums.zero()
    assert not sums.gradients()["head"].any()


@pytest.mark.parametrize("elements", [1, 7, 8, 9, 63, 64])
def test_eight_pieces_cover_a_shard_once(elements: int) -> None:
    shard = torch.arange(1.0, elements + 1).view(1, 1, elements)
    pieces = to_pieces(shard)
    assert pieces.shape == (1, 8, piece_size(elements))
    flat = pieces.flatten().tolist()
    assert flat[:elements] == shard.flatten().tolist()
    assert not any(flat[elements:])


@pytest.mark.parametrize("cp", DEGREES)
@pytest.mark.parametrize("shape", [(8, 7, 9), (10,)], ids=["shards", "vector"])
def test_pieces_are_put_together_again(shape: tuple[int, ...], cp: int) -> None:
    stored = spread(*shape, seed=2)
    for found in on_ranks(1, cp, lambda c: from_pieces(owned_pieces(stored, c), stored, c, "test")):
        assert_same(found, stored)


def test_a_tied_gradient_is_two_sums_added(tied_checkpoint: Path, tmp_path: Path) -> None:
    """The same weights untied give the two sums: as head and as embedding."""
    path = checkpoints.write(tmp_path / "untied")
    tensors = load_file(tied_checkpoint / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path / "model.safetensors")
    (tied,), (untied,) = (
        training.run(training.make_plan(p), 2, 4, training.make_samples(), steps=1) for p in (tied_checkpoint, path)
    )
    assert tied.logprobs == untied.logprobs
    head, embed = untied.gradients["head"], untied.gradients["embed"]
    assert_same(tied.gradients["embed"], head + embed)
    assert_moved(tied.gradients["embed"], head, "the head alone")
    assert_moved(tied.gradients["embed"], embed, "the embedding alone")


def test_a_tied_model_has_two_accumulators() -> None:
    tied = Accumulators({"embed": WEIGHTS["head"]}, ParallelContext())
    assert sorted(tied.pieces) == ["embed", TIED_HEAD]
    tied.add("embed", torch.ones(1, 8, 7, 9))
    tied.add(TIED_HEAD, torch.full((1, 8, 7, 9), 2.0))
    assert tied.gradients()["embed"].flatten(1)[:, :63].unique().tolist() == [3.0]
    assert sorted(tied.gradients()) == ["embed"]
    assert bits(tied.gradients()["embed"].flatten(1)[:, 63:]).unique().tolist() == [0], "padding"
