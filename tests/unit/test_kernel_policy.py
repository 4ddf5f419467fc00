"""Log-probabilities and supports are exact integers: no tiling, batch or topology can move them, and every rule holds.

Numbers come from public bug reports of the field. Logits are bf16, so a published value that needs other logits is met
to the 4e-3 that its rounded logits allow, far from the classic wrong answers, and the exact reference to its last bit.
"""

from __future__ import annotations

import math

import pytest
import torch

from rlk.kernels.policy import NonFiniteLogitError, RowParams, sample_rows, score_backward, score_rows
from tests.unit.exact_policy import exact
from tests.unit.probes import Record, assert_as_accurate, assert_moved, assert_same, bits, left_to_right, normal, spread

Setting = tuple[float, float, int]
V = 300
SETTINGS: list[Setting] = [
    (1.0, 1.0, -1), (0.7, 0.95, -1), (1.3, 0.99, 20), (0.0, 0.5, 3), (2.0, 1.0, 7), (0.5, 0.3, -1), (1.0, 1e-9, -1),
]  # fmt: skip


def row_of(*logits: float) -> torch.Tensor:
    return torch.tensor(logits, dtype=torch.bfloat16)


def all_scores(row: torch.Tensor, setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and membership of every token of one row."""
    v = row.numel()
    params = RowParams.build([setting] * v, v)
    logprob, inside, _ = score_rows(row.expand(v, v).contiguous(), params, torch.arange(v))
    return logprob, inside


def support(row: torch.Tensor, temperature: float, top_p: float = 1.0, top_k: int = -1) -> list[int]:
    return all_scores(row, (temperature, top_p, top_k))[1].nonzero().flatten().tolist()


def logprob_of(row: torch.Tensor, token: int, temperature: float, top_p: float = 1.0, top_k: int = -1) -> float:
    return float(all_scores(row, (temperature, top_p, top_k))[0][token])


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_scores_equal_the_integer_reference(setting: Setting) -> None:
    for seed in range(3):
        row = spread(V, seed=seed, factor=1.0) * 2
        reference = exact(row, *setting)
        logprob, inside = all_scores(row, setting)
        expected = torch.tensor([reference.logprob(t) for t in range(V)], dtype=torch.float64).float()
        assert_same(logprob, expected)
        assert inside.nonzero().flatten().tolist() == reference.kept


def test_a_nearly_certain_token_keeps_its_digits() -> None:
    """-4e-9 is the difference of two numbers near 28 where the logarithm is not taken of Z scaled by 2^-40."""
    row = row_of(20, 0, 0)
    expected = torch.tensor(-math.log1p(exact(row, 1.0).total / 2**40 - 1))
    assert_same(all_scores(row, (1.0, 1.0, -1))[0][0], expected)


def test_a_row_is_the_same_in_any_batch() -> None:
    rows, settings = spread(len(SETTINGS), V, seed=4, factor=1.0), SETTINGS
    order = torch.tensor([4, 2, 6, 0, 5, 1, 3])
    tokens = torch.arange(len(SETTINGS)) * 11
    whole = score_rows(rows, RowParams.build(settings, V), tokens)
    params = RowParams.build([settings[i] for i in order.tolist()], V)
    for found, expected in zip(score_rows(rows[order], params, tokens[order]), whole, strict=True):
        assert_same(found, expected[order])
    for i in range(len(settings)):
        one = slice(i, i + 1)
        assert_same(score_rows(rows[one], RowParams.build(settings[one], V), tokens[one])[0], whole[0][one], f"row {i}")


def test_masses_are_exact_where_floats_are_not() -> None:
    row = spread(V, seed=5, factor=1.0)
    shares = torch.softmax(row.float(), 0)
    masses = score_rows(row[None], RowParams.build([(1.0, 1.0, -1)], V), torch.zeros(1, dtype=torch.int64))[2]
    backwards = score_rows(row.flip(0)[None], RowParams.build([(1.0, 1.0, -1)], V), torch.tensor([V - 1]))[2]
    assert_same(masses, backwards)
    assert_moved(left_to_right(shares.flip(0)), left_to_right(shares), "another order of an fp32 sum")


@pytest.mark.parametrize(("temperature", "value"), [(0.5, -2.1429317), (0.7, -1.6886898), (1.3, -1.2868814)])
def test_logits_are_divided_by_temperature(temperature: float, value: float) -> None:
    found = logprob_of(row_of(2, 1, 0), 1, temperature)
    assert found == pytest.approx(value, abs=2e-7)
    assert abs(found - -1.4076060) > 0.1, "the untempered value"
    assert abs(found - -1.4076060 / temperature) > 0.1, "the log-probability divided"


def test_temperature_belongs_to_its_row() -> None:
    rows, tokens = row_of(2, 1, 0).expand(4, 3).contiguous(), torch.tensor([1, 1, 1, 0])
    params = RowParams.build([(0.5, 1.0, -1), (0.7, 1.0, -1), (1.3, 1.0, -1), (0.0, 1.0, -1)], 3)
    expected = [-2.1429317, -1.6886898, -1.2868814, -0.4076060]
    assert score_rows(rows, params, tokens)[0].tolist() == pytest.approx(expected, abs=2e-7)


def test_a_kept_set_is_renormalised() -> None:
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().to(torch.bfloat16)
    assert support(row, 1.0, 0.75) == [0, 1]
    found = logprob_of(row, 0, 1.0, 0.75)
    assert found == pytest.approx(-0.4700036, abs=4e-3)
    assert found == pytest.approx(-math.log1p(math.exp(float(row[1]) - float(row[0]))), abs=1e-7)
    assert abs(found - -0.6931472) > 0.2, "normalised over the full vocabulary"


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.25, 1), (0.25 + 2**-40, 2), (0.5 - 2**-40, 2), (0.5, 2), (0.5 + 2**-40, 3), (0.75, 3), (1.0, 4)],
)
def test_a_token_stays_while_the_mass_before_is_below(top_p: float, kept: int) -> None:
    """Four equal masses of 2^40: the threshold int64(p * Z) falls on a boundary, and one unit off it."""
    assert support(row_of(1, 1, 1, 1), 1.0, top_p) == list(range(kept))


def test_the_nucleus_is_taken_after_top_k() -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().to(torch.bfloat16)
    assert support(row, 1.0, 0.55, 2) == [0]  # .4 of the .7 that top-k kept is .57
    assert support(row, 1.0, 0.55) == [0, 1]


def test_greedy_is_scored_untempered_and_unrestricted() -> None:
    row = row_of(2, 1, 0)
    assert logprob_of(row, 0, 0.0) == pytest.approx(-0.4076060, abs=2e-7)
    assert_same(all_scores(row, (0.0, 0.1, 1))[0], all_scores(row, (1.0, 1.0, -1))[0])
    assert support(row, 0.0, 0.1, 1) == [0, 1, 2]


def test_padding_slots_would_join_the_softmax() -> None:
    """What leaving them out by index prevents; the published logits are rounded to bf16, hence the 2e-4."""
    real = (0.5, -1, 2, 0.3, 1, 0.1)
    assert logprob_of(row_of(*real), 2, 1.0) == pytest.approx(-0.67958, abs=2e-4)
    assert logprob_of(row_of(*real, 0, 0), 2, 1.0) == pytest.approx(-0.8081349, abs=2e-4)


def test_ties_at_top_k_keep_lowest_ids() -> None:
    row = row_of(1, 3, 2, 2, 2, 0)
    assert [support(row, 1.0, 1.0, k) for k in (1, 2, 3, 4)] == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]


def test_ties_at_the_nucleus_edge_keep_lowest_ids() -> None:
    row = row_of(0, 1, 1, 1, -9)
    share = math.exp(1) / (3 * math.exp(1) + 1 + math.exp(-9))
    assert support(row, 1.0, 1.5 * share) == [1, 2]


def test_top_k_of_the_vocabulary_is_off() -> None:
    row = spread(V, seed=6, factor=1.0)
    assert_same(all_scores(row, (0.8, 1.0, V))[0], all_scores(row, (0.8, 1.0, -1))[0])
    assert len(support(row, 0.8, 1.0, V)) == V


@pytest.mark.parametrize("setting", [(1.0, 1e-300, -1), (1.0, 5e-324, 50), (0.7, 1.0, 1)], ids=str)
def test_one_kept_token_has_log_probability_zero(setting: Setting) -> None:
    row = spread(V, seed=7, factor=1.0)
    logprob, inside = all_scores(row, setting)
    assert inside.nonzero().flatten().tolist() == [int(row.float().argmax())]
    assert bits(logprob[inside]).tolist() == [0], "+0.0, not -0.0"


@pytest.mark.parametrize("temperature", [0.005, 1e-30, 1e-45, 3e38])
def test_extreme_temperatures_are_applied_as_given(temperature: float) -> None:
    row = row_of(2, 1, 0, 2, -3e38)
    drawn, logprob = sample_rows(
        row.expand(64, 5).contiguous(), RowParams.build([(temperature, 1.0, -1)] * 64, 5), *keys(64)
    )
    assert logprob.isfinite().all()
    assert (logprob <= 0).all()
    if temperature < 1:
        assert set(drawn.tolist()) == {0, 3}, "equal maxima share the mass"
        assert logprob.unique().tolist() == [pytest.approx(-math.log(2), abs=1e-7)]


def keys(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seed, sample id and position of n rows."""
    return torch.zeros(n, dtype=torch.int64), torch.arange(n), torch.full((n,), 9)


def test_negative_zero_ties_with_zero() -> None:
    row = row_of(-1, -0.0, 0.0)
    assert support(row, 1.0, 1.0, 1) == [1]
    drawn, _ = sample_rows(row[None], RowParams.build([(0.0, 1.0, -1)], 3), *keys(1))
    assert drawn.tolist() == [1]
    assert_same(all_scores(row, (1.0, 1.0, -1))[0], all_scores(row_of(-1, 0.0, -0.0), (1.0, 1.0, -1))[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_logit_names_its_row(bad: float) -> None:
    rows = spread(3, V, seed=8)
    rows[1, V - 1] = bad
    params, tokens = RowParams.build([(1.0, 1.0, -1)] * 3, V), torch.zeros(3, dtype=torch.int64)
    for call in (
        lambda: sample_rows(rows, params, *keys(3)),
        lambda: score_rows(rows, params, tokens),
        lambda: score_backward(rows, params, tokens, torch.ones(3)),
    ):
        with pytest.raises(NonFiniteLogitError, match="row 1 holds a NaN or infinite logit"):
            call()


def test_a_token_outside_is_reported_not_repaired() -> None:
    logprob, inside = all_scores(row_of(2, 1, 0), (1.0, 1.0, 2))
    assert inside.tolist() == [True, True, False]
    assert float(logprob[2]) == pytest.approx(-2 - math.log1p(math.exp(-1)), abs=2e-7)


def test_the_reference_keeps_temperature_not_support() -> None:
    params = RowParams.build([(0.7, 0.5, 3), (0.0, 1.0, -1)], V).full_support()
    rows, tokens = spread(2, V, seed=9, factor=1.0), torch.tensor([5, 6])
    found, inside, _ = score_rows(rows, params, tokens)
    assert_same(found, score_rows(rows, RowParams.build([(0.7, 1.0, -1), (1.0, 1.0, -1)], V), tokens)[0])
    assert inside.all()


def test_a_log_probability_is_as_accurate_as_torch(record_property: Record) -> None:
    rows, tokens = normal(64, 4096, seed=10, scale=4), torch.arange(64) * 60
    found = score_rows(rows, RowParams.build([(0.7, 1.0, -1)] * 64, 4096), tokens)[0]

    def ordinary(x: torch.Tensor) -> torch.Tensor:
        return (x / torch.tensor(0.7).to(x.dtype)).log_softmax(1).gather(1, tokens[:, None])[:, 0]

    assert_as_accurate(found, ordinary(rows.float()), ordinary(rows.double()), record_property)


def gradient(rows: torch.Tensor, setting: Setting, tokens: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Autograd's, in the type of `rows`, with the support that the kernels chose."""
    x = rows.detach().requires_grad_()
    kept = torch.stack([all_scores(row, setting)[1] for row in rows.to(torch.bfloat16)])
    wide = x if x.dtype == torch.float64 else x.float()
    scaled = (wide / torch.tensor(setting[0]).to(wide.dtype)).masked_fill(~kept, float("-inf"))
    logprob = scaled.gather(1, tokens[:, None])[:, 0] - scaled.logsumexp(1)
    (grad,) = torch.autograd.grad((logprob * c.to(wide.dtype)).sum(), x)
    return grad


@pytest.mark.parametrize("setting", [(1.0, 1.0, -1), (0.7, 0.9, -1), (1.3, 0.99, 20)], ids=str)
def test_a_gradient_is_as_accurate_as_autograd(setting: Setting, record_property: Record) -> None:
    rows, c = normal(16, V, seed=11, scale=2), torch.linspace(-1, 1, 16)
    tokens = rows.float().argmax(1)
    found = score_backward(rows, RowParams.build([setting] * 16, V), tokens, c)
    true = gradient(rows.double(), setting, tokens, c)
    assert ((found.double() - true).abs() <= true.abs() * 2**-8 + 1e-30).all(), "one bf16 rounding"
    assert_as_accurate(found, gradient(rows, setting, tokens, c), true, record_property)


def test_a_gradient_is_zero_outside_the_support() -> None:
    rows, tokens = normal(4, V, seed=12, scale=2), torch.zeros(4, dtype=torch.int64)
    params = RowParams.build([(1.0, 1.0, 1), (1.0, 1.0, 5), (0.7, 0.2, -1), (1.0, 1.0, 3)], V)
    tokens = rows.float().argmax(1)
    grad = score_backward(rows, params, tokens, torch.ones(4))
    for r, k in ((0, 1), (1, 5), (3, 3)):
        outside = torch.ones(V, dtype=torch.bool).scatter_(0, rows[r].float().topk(k).indices, False)
        assert bits(grad[r][outside]).unique().tolist() == [0]
    assert not grad[0].any(), "one kept token: nothing to learn"
