"""The Triton programs, interpreted on CPU tensors, compute what the CPU forms compute, in the same declared order.

Where only additions, products, divisions and roots occur, CPU and CUDA forms share every bit; where a GPU has its
own exp or its own chain, they agree to the rounding of the result. Sizes leave remainders in every tile: rows 1 and
13, and 70 on the far side of the 64 rows up to which operands are swapped; columns 83; inner lengths that are no
multiple of 16. They are small because an interpreted program takes milliseconds a tile.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.unit.interpreted import interpreted
from tests.unit.probes import assert_moved, assert_same, left_to_right, spread


def near(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """The largest difference is within `bound` of the largest value."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    error = float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
    assert error <= bound, f"largest difference {error:.3g} of the largest value, allowed is {bound:.3g}"


@interpreted
def test_programs_are_interpreted_in_this_process() -> None:
    from rlk.kernels.cuda import launch
    from rlk.kernels.forms import form

    assert launch.INTERPRETED
    assert form("gemm", torch.empty(0)).__name__ == "rlk.kernels.cuda.gemm"


@pytest.mark.parametrize(("m", "n", "k"), [(1, 32, 16), (13, 83, 96), (70, 48, 33)])
@interpreted
def test_a_product_is_the_plain_chain(m: int, n: int, k: int) -> None:
    from rlk.kernels.cpu import gemm as cpu
    from rlk.kernels.cuda import gemm

    x, w = spread(m, k, seed=1), spread(n, k, seed=2)
    expected = gemm.plain_chain(x, w)
    assert_same(gemm.chain(x, gemm.prepare(w), None), expected)
    assert_same(gemm.linear(x, gemm.prepare(w)), gemm.round_bf16(expected))
    near(expected, cpu.chain(x, cpu.prepare(w), None), 1e-6)
    if k > 16:
        assert_moved(gemm.plain_chain(x.flip(1), w.flip(1)), expected, "a descending chain")


@interpreted
def test_a_row_is_the_same_in_every_batch() -> None:
    from rlk.kernels.cuda import gemm

    x, prepared = spread(70, 96, seed=1), gemm.prepare(spread(83, 96, seed=2))
    whole = gemm.linear(x, prepared)
    for start, stop in ((0, 1), (3, 16), (5, 69)):
        assert_same(gemm.linear(x[start:stop], prepared), whole[start:stop], f"rows {start} to {stop}")


@interpreted
def test_a_continued_chain_is_the_whole_one() -> None:
    from rlk.kernels.cuda import gemm

    dy, w = spread(13, 80, seed=3), spread(80, 48, seed=4)
    whole = gemm.chain(dy, w, None)
    begun = gemm.chain(dy[:, :48], w[:48], None)
    assert_same(gemm.chain(dy[:, 48:], w[48:], begun.clone()), whole)
    assert_moved(begun + gemm.chain(dy[:, 48:], w[48:], None), whole, "two chains added")


@pytest.mark.parametrize("held", [1, 2, 4, 8])
@interpreted
def test_leaves_are_summed_as_a_tree(held: int) -> None:
    from rlk.kernels.cuda import gemm
    from rlk.kernels.tree import tree_sum

    x, w = spread(70, 8, 32, seed=5), spread(8, 48, 32, seed=6)
    leaves = torch.stack([gemm.plain_chain(x[:, s].contiguous(), w[s]) for s in range(held)])
    expected = tree_sum(leaves)
    for m in (1, 70):
        assert_same(gemm.leaves_sum(x[:m, :held], gemm.prepare(w[:held])), expected[:m], f"M {m}")
    if held > 2:
        assert_moved(left_to_right(leaves), expected, "a loop over leaves")


@interpreted
def test_an_input_gradient_is_a_chain_a_shard() -> None:
    from rlk.kernels.cuda import gemm

    dy, w = spread(13, 48, seed=7), spread(2, 48, 32, seed=8)
    expected = torch.stack([gemm.plain_chain(dy, shard.t()) for shard in w], 1)
    assert_same(gemm.row_inputs(dy, w), gemm.round_bf16(expected))


@interpreted
def test_shards_of_a_row_parallel_weight_get_the_gradients_that_each_gets_alone() -> None:
    from rlk.kernels.cuda import gemm

    dy, x = spread(30, 40, seed=9), spread(30, 3, 36, seed=10)
    slices = [[(0, 5), (5, 17)], [(17, 17), (17, 30)]]
    found = gemm.row_weight_gradients(dy, x, slices)
    for shard in range(3):
        assert_same(found[:, shard], gemm.weight_gradients(dy, x[:, shard], slices), f"shard {shard}")
    assert_moved(found[:, 1], found[:, 0], "another shard")


@pytest.mark.parametrize("held", [2, 4, 8])
@interpreted
def test_a_weight_gradient_is_a_tree_over_slices(held: int) -> None:
    from rlk.kernels.cpu import gemm as cpu
    from rlk.kernels.cuda import gemm
    from rlk.kernels.tree import tree_sum

    dy, x = spread(90, 40, seed=9), spread(90, 3, 36, seed=10)[:, 1]
    edges = [0, 5, 5, 20, 37, 41, 50, 51, 57, 58, 58, 70, 75, 78, 82, 89, 90]
    ranges = list(pairwise(edges))
    slices = [ranges[:held], ranges[8 : 8 + held]]
    found = gemm.weight_gradients(dy, x, slices)
    for sample, ranges in zip(found, slices, strict=True):
        leaves = [gemm.plain_chain(dy[a:z].t(), x[a:z].t()) for a, z in ranges]
        assert_same(sample, tree_sum(torch.stack(leaves)))
    if held > 2:
        assert_moved(gemm.weight_gradients(dy, x, [r[1:] + r[:1] for r in slices]), found, "other neighbours")
    near(found, cpu.weight_gradients(dy, x, slices), 1e-6)


@interpreted
def test_the_root_rounds_as_on_a_cpu() -> None:
    from rlk.kernels.cpu import gemm as cpu
    from rlk.kernels.cuda import gemm

    words = torch.arange(0, 1 << 32, 0x40001, dtype=torch.int64)
    x = (words - (words >= 1 << 31) * (1 << 32)).to(torch.int32).view(torch.float32)
    x = torch.cat([x[~x.isnan()], torch.tensor([-0.0, -1e-45])])
    assert_same(gemm.round_bf16(x), cpu.round_bf16(x))
    assert_moved(x.to(torch.bfloat16), gemm.round_bf16(x), "a zero that keeps its sign")


@pytest.mark.parametrize("n", [16, 144, 512])
@interpreted
def test_norms_share_every_bit(n: int) -> None:
    from rlk.kernels.cpu import pointwise as cpu
    from rlk.kernels.cuda import pointwise

    x, dy, residual = (spread(9, n, seed=seed, factor=0.5) for seed in (1, 2, 3))
    w = spread(n, seed=4)
    y, rstd = pointwise.rmsnorm(x, w, 1e-6)
    for found, expected in zip((y, rstd), cpu.rmsnorm(x, w, 1e-6), strict=True):
        assert_same(found, expected)
    for joined in (None, residual):
        expected = cpu.rmsnorm_backward(dy, x, w, rstd, joined)
        assert_same(pointwise.rmsnorm_backward(dy, x, w, rstd, joined), expected)
    assert_same(pointwise.rmsnorm(x[4:5], w, 1e-6)[0], y[4:5], "a row alone")
    gain = pointwise.rmsnorm_gain(dy, x, rstd)
    assert_same(gain, cpu.rmsnorm_gain(dy, x, rstd))
    assert_moved(pointwise.rmsnorm_gain(dy.flip(0), x.flip(0), rstd.flip(0)), gain, "rows in reverse")


@interpreted
def test_gains_share_every_bit_by_range_and_group() -> None:
    from rlk.kernels.cpu import pointwise as cpu
    from rlk.kernels.cuda import pointwise

    dy, x = spread(20, 2, 3, 16, seed=5), spread(20, 2, 3, 16, seed=6)
    rstd, ranges = torch.rand(120, generator=torch.Generator().manual_seed(7)), [(0, 7), (7, 7), (7, 20)]
    found = pointwise.rmsnorm_gains(dy, x, rstd, ranges)
    assert_same(found, cpu.rmsnorm_gains(dy, x, rstd, ranges))
    assert_moved(pointwise.rmsnorm_gains(dy.flip(0), x.flip(0), rstd.flip(0), ranges), found, "tokens in reverse")


@interpreted
def test_elementwise_ops_share_every_bit() -> None:
    from rlk.kernels.cpu import pointwise as cpu
    from rlk.kernels.cuda import pointwise
    from rlk.kernels.pointwise import rope_tables

    a, b = spread(5, 300, seed=8), spread(5, 300, seed=9)
    assert_same(pointwise.add(a, b), cpu.add(a, b))
    assert_moved(a + b, cpu.add(a, b.flip(0)), "another summand")
    cos, sin = rope_tables(1e6, 48, 100)
    x, positions = spread(7, 3, 48, seed=10), torch.tensor([0, 99, 5, 5, 64, 63, 1])
    for sign in (1.0, -1.0):
        found = pointwise.rope(x, cos, sin, positions, sign)
        assert_same(found, cpu.rope(x, cos, sin, positions, sign))
        assert_moved(pointwise.rope(x, cos, sin, positions, -sign), found, "the other direction")


@interpreted
def test_swiglu_differs_by_its_exponential_alone() -> None:
    from rlk.kernels.cpu import pointwise as cpu
    from rlk.kernels.cuda import pointwise

    gate_up, dy = spread(7, 2, 66, seed=11), spread(7, 2, 33, seed=12)
    near(pointwise.swiglu(gate_up), cpu.swiglu(gate_up), 2**-8)
    near(pointwise.swiglu_backward(dy, gate_up), cpu.swiglu_backward(dy, gate_up), 2**-8)


@interpreted
def test_an_embedding_leaf_adds_in_token_order() -> None:
    from rlk.kernels.cpu import pointwise as cpu
    from rlk.kernels.cuda import pointwise

    dx, rows = spread(40, 20, seed=13, factor=6.0), torch.arange(40) * 7 % 9 - 1  # -1 and 7 belong to other ranks
    found = pointwise.embedding_leaf(dx, rows, 7)
    assert_same(found, cpu.embedding_leaf(dx, rows, 7))
    assert_moved(pointwise.embedding_leaf(dx.flip(0), rows.flip(0), 7), found, "tokens in reverse")


@interpreted
def test_an_optimizer_step_shares_every_bit() -> None:
    from rlk.kernels.cpu import state as cpu
    from rlk.kernels.cuda import state
    from rlk.kernels.state import AdamStep

    g = torch.Generator().manual_seed(14)
    start = [torch.randn(1500, generator=g), torch.randn(1500, generator=g), torch.rand(1500, generator=g)]
    grad = torch.randn(1500, generator=g)
    step = AdamStep.at(3, lr=1e-3, betas=(0.9, 0.98), eps=1e-8, decay=0.1, clip=0.7)
    found, expected = ([t.clone() for t in start] for _ in range(2))
    state.adamw(found[0], found[1], found[2], grad, step)
    cpu.adamw(expected[0], expected[1], expected[2], grad, step)
    for name, a, b, before in zip(("master", "m", "v"), found, expected, start, strict=True):
        assert_same(a, b, name)
        assert_moved(before, a, f"{name} before the step")


@interpreted
def test_fingerprints_are_the_same_integers() -> None:
    from rlk.kernels.cpu import state as cpu
    from rlk.kernels.cuda import state
    from rlk.kernels.state import Part

    whole = (spread(11, 1500, seed=15)[:, :1100], spread(5, 33, seed=16).float(), spread(1, 40, seed=17))
    tensors = [[Part(x, 3, 5, 2000)] for x in whole] + [[], [Part(x, 3 * i, 5, 2000) for i, x in enumerate(whole)]]
    found = state.fingerprints(tensors)
    assert found == cpu.fingerprints(tensors)
    assert found[3] == (0, 0)
    for x, before in zip(whole, found, strict=False):
        y = x.clone()
        y[-1, -1] += 1
        changed, moved = state.fingerprints([[Part(y, 3, 5, 2000)], [Part(x, 3, 6, 2000)]])
        assert before not in (changed, moved)


@interpreted
def test_row_fingerprints_are_the_same_integers() -> None:
    from rlk.kernels.cpu import state as cpu
    from rlk.kernels.cuda import state

    for x in (spread(3, 4 * 1100, seed=15), spread(5, 4 * 7, seed=16).float()):
        found = state.row_fingerprints(x, 4, 2)
        assert_same(found, cpu.row_fingerprints(x, 4, 2))
        assert_moved(state.row_fingerprints(x, 4, 3), found, "another place in the row")


@interpreted
def test_a_sum_of_squares_keeps_fifteen_digits() -> None:
    from rlk.kernels.cuda import state

    x = torch.randn(20_000, generator=torch.Generator().manual_seed(18))
    exact = float(x.double().square().sum())
    found = state.sums_of_squares([x, x[3:19_000], x[3:19_000].clone(), x[:0]]).tolist()
    assert found[0] == pytest.approx(exact, rel=1e-14)
    assert found[1] == found[2], "an atom, wherever it lies"
    assert found[3] == 0.0


@interpreted
@pytest.mark.parametrize("size", [5, 20_000], ids=["a block", "blocks"])
def test_atoms_are_summed_alone_whatever_comes_with_them(size: int) -> None:
    from rlk.kernels.cpu import state as cpu
    from rlk.kernels.cuda import state

    x = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(19))
    found = state.sums_of_squares([x, x[:, :, :0], x.flatten()[None, :17]])
    alone = [state.sums_of_squares([atom.clone()]).item() for atom in x.flatten(0, 1)]
    assert found.tolist() == [*alone, *[0.0] * 6, state.sums_of_squares([x.flatten()[:17]]).item()]
    assert found.tolist() == pytest.approx(cpu.sums_of_squares([x, x[:, :, :0], x.flatten()[None, :17]]).tolist())
    assert len(set(alone)) == 6


@interpreted
def test_the_start_up_proof_holds_for_the_programs() -> None:
    from rlk.kernels.proof import Product, prove

    products = [Product("qkv", 2, 48, 96, False, 3, True), Product("o", 2, 48, 32, True, 3, True)]
    proofs = prove(torch.device("cpu"), products)
    assert [p.name for p in proofs] == ["gemm", "tree", "rmsnorm", "attention", "policy"]
    assert all(p.form.startswith("cuda, interpreted: Triton") for p in proofs)
