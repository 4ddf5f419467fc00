"""Sampling and scoring as Triton programs, interpreted: supports without a sort are those of a sort, to the last token.

The exponential is the interpreter's (NumPy's fp32), so a reference with the same one must give every integer. 300
logits are one segment and 9,000 are three; ties cross the edges of top-k, of the nucleus and of segments.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlk.kernels.policy import NonFiniteLogitError, RowParams
from tests.unit.exact_policy import Exact, Row, exact
from tests.unit.interpreted import interpreted
from tests.unit.probes import assert_moved, assert_same, spread

Setting = tuple[float, float, int]
SETTINGS: list[Setting] = [
    (1.0, 1.0, -1), (0.7, 0.95, -1), (1.3, 0.99, 20), (0.0, 0.5, 3), (2.0, 1.0, 7), (0.5, 0.3, -1), (1.0, 1e-9, -1),
    (1.0, 1e-300, -1), (0.8, 0.9999, 299), (3e38, 0.5, -1), (1e-30, 0.5, -1), (1.0, 0.5 - 2**-40, 40),
]  # fmt: skip


def fp32(d: Row) -> Row:
    with np.errstate(over="ignore", under="ignore"):
        return np.exp(d)


def rows_of(vocab: int) -> torch.Tensor:
    """Rows with long ties, zeros of both signs, and a largest logit that occurs twice."""
    rows = spread(len(SETTINGS), vocab, seed=4, factor=1.0) * 2
    rows[:, 10:40] = rows[:, 10:11]
    rows[:, vocab - 30 :] = rows[:, 10:11]
    rows[:, 200], rows[:, 201] = -0.0, 0.0
    rows[3, 5] = rows[3].float().max()
    return rows


def references(rows: torch.Tensor) -> list[Exact]:
    return [exact(row, *setting, exp=fp32) for row, setting in zip(rows, SETTINGS, strict=True)]


@pytest.mark.parametrize("vocab", [300, 9000])
@interpreted
def test_supports_and_masses_are_those_of_a_sort(vocab: int) -> None:
    from rlk.kernels.cuda import policy

    rows = rows_of(vocab)
    expected, params = references(rows), RowParams.build(SETTINGS, vocab)
    edges = [
        (sorted(r.kept, key=lambda i, x=row: (-float(x[i]), i))[-1]) for r, row in zip(expected, rows, strict=True)
    ]
    for tokens in (edges, [39] * len(edges), [vocab - 30] * len(edges)):
        logprob, inside, mass = policy.score(rows, params, torch.tensor(tokens))
        assert mass.tolist() == [r.total for r in expected]
        assert inside.tolist() == [t in set(r.kept) for t, r in zip(tokens, expected, strict=True)]
        exactly = torch.tensor([r.logprob(t) for t, r in zip(tokens, expected, strict=True)], dtype=torch.float64)
        assert_same(logprob, exactly.float())
    unsorted = [sum(r.mass) for r in expected]
    assert sum(a != b for a, b in zip(unsorted, mass.tolist(), strict=True)) > 3, "truncation changes masses"


@pytest.mark.parametrize("vocab", [300, 9000])
@interpreted
def test_draws_are_those_of_the_reference(vocab: int) -> None:
    from rlk.kernels.cuda import policy

    rows, n = rows_of(vocab), len(SETTINGS)
    seed, ids, positions = torch.arange(n) * 7 + (1 << 40) - 3, torch.arange(n) + (1 << 33), torch.arange(n) + 9
    tokens, logprob = policy.sample(rows, RowParams.build(SETTINGS, vocab), seed, ids, positions)
    keys = list(zip(seed.tolist(), ids.tolist(), positions.tolist(), strict=True))
    expected = references(rows)
    drawn = [r.draw(*key) for r, key in zip(expected, keys, strict=True)]
    drawn[3] = min(5, int(rows[3].float().argmax()))  # greedy: the lowest id among the maxima
    assert tokens.tolist() == drawn
    again, inside, _ = policy.score(rows, RowParams.build(SETTINGS, vocab), tokens)
    assert_same(again, logprob)
    assert inside.all()
    assert drawn != [r.draw(key[0] + 1, *key[1:]) for r, key in zip(expected, keys, strict=True)], "another seed"


@interpreted
def test_a_row_is_the_same_in_any_batch() -> None:
    from rlk.kernels.cuda import policy

    rows, tokens = rows_of(300), torch.arange(len(SETTINGS)) * 11
    whole = policy.score(rows, RowParams.build(SETTINGS, 300), tokens)
    order = torch.tensor([4, 2, 1])
    some = policy.score(rows[order], RowParams.build([SETTINGS[i] for i in order], 300), tokens[order])
    for found, expected in zip(some, whole, strict=True):
        assert_same(found, expected[order])
    wide = torch.cat([rows, rows], 1)[:, :300]  # rows of a padded matrix, read in place
    assert_same(policy.score(wide, RowParams.build(SETTINGS, 300), tokens)[2], whole[2])
    assert_moved(policy.score(rows.flip(0), RowParams.build(SETTINGS, 300), tokens)[2], whole[2], "another row")


@interpreted
def test_gradients_agree_with_the_cpu_form() -> None:
    from rlk.kernels.cpu import policy as cpu
    from rlk.kernels.cuda import policy

    rows, params = rows_of(300), RowParams.build(SETTINGS, 300)
    tokens, coefficients = rows.float().argmax(1), torch.linspace(-1, 1, len(SETTINGS))
    found = policy.score_backward(rows, params, tokens, coefficients)
    expected = cpu.score_backward(rows, params, tokens, coefficients).double()
    assert ((found.double() - expected).abs() <= expected.abs() * 2**-7).all(), "one bf16 rounding"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@interpreted
def test_a_non_finite_logit_names_its_row(bad: float) -> None:
    from rlk.kernels.cuda import policy

    rows = rows_of(300)[:6]
    rows[4, 299] = bad
    params, zero = RowParams.build(SETTINGS[:6], 300), torch.zeros(6, dtype=torch.int64)
    for call in (
        lambda: policy.score(rows, params, zero),
        lambda: policy.sample(rows, params, zero, zero, zero),
        lambda: policy.score_backward(rows, params, zero, torch.ones(6)),
    ):
        with pytest.raises(NonFiniteLogitError, match="row 4 holds a NaN or infinite logit"):
            call()
