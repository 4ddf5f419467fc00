"""Every element of a matrix product is one fp32 chain in ascending index order, whatever surrounds it.

N 83 = 64 + 16 + 3 and M 13 = 2 * 6 + 1 reach each tile of the CPU form: four vectors, one vector, single columns; six
rows, one row. K 96 is enough partials for most elements to move with the order. Errors are RMS over all elements.
"""

from __future__ import annotations

import pytest
import torch

from rlk.kernels import gemm
from rlk.kernels.forms import NoKernelFormError
from rlk.kernels.tree import tree_sum
from tests.unit.probes import Record, assert_as_accurate, assert_moved, assert_same, bits, chain, normal, spread

M, N, K = 13, 83, 96
X, W = spread(M, K, seed=1), spread(N, K, seed=2)


def test_an_element_is_one_chain_over_k() -> None:
    found, expected = gemm.leaf(X, gemm.prepare(W)), chain(X, W)
    assert_same(found, expected)
    assert_moved(chain(X.flip(1), W.flip(1)), expected, "a descending chain")
    assert_moved(tree_sum(torch.stack([chain(X[:, k::8], W[:, k::8]) for k in range(8)])), expected, "eight lanes")


@pytest.mark.parametrize(
    ("partials", "word"),
    [((1.0, 2**-24, 2**-24, 2**-24), 0x3F800000), ((2**-24, 2**-24, 2**-24, 1.0), 0x3F800002)],
    ids=["ascending", "reversed"],
)
def test_four_partials_join_in_the_order_of_k(partials: tuple[float, ...], word: int) -> None:
    x = torch.tensor([partials], dtype=torch.bfloat16)
    found = gemm.leaf(x, gemm.prepare(torch.ones(N, 4, dtype=torch.bfloat16)))
    assert bits(found).unique().tolist() == [word]


@pytest.mark.parametrize("m", [1, 2, 5, 6, 7, 12])
def test_a_row_is_the_same_in_every_batch(m: int) -> None:
    prepared = gemm.prepare(W)
    whole = gemm.linear(X, prepared)
    for start in range(M - m + 1):
        assert_same(gemm.linear(X[start : start + m], prepared), whole[start : start + m], f"rows from {start}")


@pytest.mark.parametrize("n", [1, 3, 15, 16, 17, 63, 64, 65, 80])
def test_a_column_is_the_same_in_every_tile(n: int) -> None:
    whole = gemm.linear(X, gemm.prepare(W))
    for start in (0, 1, N - n):
        assert_same(gemm.linear(X, gemm.prepare(W[start : start + n])), whole[:, start : start + n], f"from {start}")


def test_column_shards_are_columns_of_the_whole() -> None:
    w = spread(88, K, seed=3)
    shards = [gemm.linear(X, gemm.prepare(shard)) for shard in w.chunk(8)]
    assert_same(torch.cat(shards, 1), gemm.linear(X, gemm.prepare(w)))


def test_a_strided_left_operand_is_read_in_place() -> None:
    wide = spread(M, 3, K, seed=4)
    assert_same(gemm.leaf(wide[:, 1], gemm.prepare(W)), gemm.leaf(wide[:, 1].contiguous(), gemm.prepare(W)))


def test_an_input_gradient_is_one_chain_over_outputs() -> None:
    dy, w = spread(M, K, seed=5), W.t().contiguous()  # 83 columns: continued in every tile too
    expected = chain(dy, W)
    assert_same(gemm.input_gradient(dy, w), expected)
    continued = gemm.input_gradient(dy[:, 40:], w[40:], gemm.input_gradient(dy[:, :40], w[:40]))
    assert_same(continued, expected, "continued")
    halves = gemm.input_gradient(dy[:, :40], w[:40]) + gemm.input_gradient(dy[:, 40:], w[40:])
    assert_moved(halves, expected, "two chains added")


def test_a_weight_gradient_is_one_chain_over_tokens() -> None:
    dy, x = spread(30, N, seed=6), spread(30, K, seed=7)
    expected = chain(dy.t(), x.t())
    assert_same(gemm.weight_gradient(dy, x), expected)
    assert_moved(gemm.weight_gradient(dy.flip(0), x.flip(0)), expected, "tokens in reverse")


def test_zero_rows_after_a_slice_change_nothing() -> None:
    dy, x = spread(9, N, seed=6), spread(9, K, seed=7)
    padded = [torch.cat([t, t.new_zeros(7, t.shape[1])]) for t in (dy, x)]
    assert_same(gemm.weight_gradient(*padded), gemm.weight_gradient(dy, x))


def test_an_empty_slice_is_a_leaf_of_zeros() -> None:
    assert_same(gemm.weight_gradient(X[:0, :N], X[:0]), torch.zeros(N, K))


def test_the_root_rounds_once_to_nearest_even() -> None:
    words = torch.arange(0, 1 << 32, 0x4001, dtype=torch.int64)  # both halves of the word take many values
    x = (words - (words >= 1 << 31) * (1 << 32)).to(torch.int32).view(torch.float32)
    finite = x[~x.isnan()]
    assert_same(gemm.round_bf16(finite), finite.to(torch.bfloat16) + 0.0)
    assert gemm.round_bf16(x[x.isnan()]).isnan().all()
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001], dtype=torch.int32).view(torch.float32)
    assert bits(gemm.round_bf16(ties)).tolist() == [0x3F80, 0x3F82, 0x3F81]


def test_no_zero_keeps_a_sign() -> None:
    assert bits(gemm.round_bf16(torch.tensor([-0.0, 0.0, -1e-45]))).tolist() == [0, 0, 0]


def test_a_float32_operand_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes torch\.bfloat16 on cpu, got torch\.float32"):
        gemm.leaf(X.float(), gemm.prepare(W))


def test_a_device_without_a_form_is_refused() -> None:
    with pytest.raises(NoKernelFormError, match="gemm has no form for device 'meta'"):
        gemm.prepare(torch.empty(2, 2, dtype=torch.bfloat16, device="meta"))


def test_a_product_is_as_accurate_as_torch(record_property: Record) -> None:
    x, w = normal(64, 1024, seed=8), normal(96, 1024, seed=9, scale=1 / 32)
    exact = x.double() @ w.double().t()
    assert_as_accurate(gemm.linear(x, gemm.prepare(w)), x @ w.t(), exact, record_property)


def test_an_input_gradient_is_as_accurate_as_torch(record_property: Record) -> None:
    dy, w = normal(64, 512, seed=10, scale=0.1), normal(512, 96, seed=11, scale=1 / 32)
    found = gemm.round_bf16(gemm.input_gradient(dy, w))
    assert_as_accurate(found, dy @ w, dy.double() @ w.double(), record_property)


def test_a_weight_gradient_is_as_accurate_as_torch(record_property: Record) -> None:
    """The ordinary op's result is bf16; this leaf stays fp32 until the update."""
    dy, x = normal(512, 64, seed=12, scale=0.1), normal(512, 96, seed=13)
    assert_as_accurate(gemm.weight_gradient(dy, x), dy.t() @ x, dy.double().t() @ x.double(), record_property)
