"""The oracle's rules by hand, and the whole oracle against the canonical program on the tiny model.

Logits of four or five tokens, so that every support, mass and log-probability can be checked on paper. The model test
runs one forward pass of 24 tokens: enough for every layer, head and position to matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from rlk.evidence.oracle import LOGIT_ERROR, expect, logit_error, looked_at, tolerance, uniform
from rlk.plan.sampling import Sampling

HALF = [math.log(p) + 1 for p in (0.5, 0.3, 0.15, 0.05)]  # probabilities that are known; a shift must not matter


@pytest.mark.parametrize(
    ("sampling", "token", "logprob"),
    [
        (Sampling(1.0), 0, math.log(0.5)),
        (Sampling(1.0, 0.75), 0, math.log(0.5 / 0.8)),
        (Sampling(1.0, 0.79), 1, math.log(0.3 / 0.8)),
        (Sampling(1.0, 0.81), 1, math.log(0.3 / 0.95)),
        (Sampling(1.0, 1.0, 2), 1, math.log(0.3 / 0.8)),
        (Sampling(1.0, 0.9, 2), 0, math.log(0.5 / 0.8)),
        (Sampling(1.0, 0.6, 2), 0, 0.0),
        (Sampling(0.5), 0, math.log(0.25 / (0.25 + 0.09 + 0.0225 + 0.0025))),
        (Sampling(0.0, 0.5, 1), 1, math.log(0.3)),
    ],
)
def test_rules_give_what_paper_gives(sampling: Sampling, token: int, logprob: float) -> None:
    assert math.isclose(expect(HALF, token, sampling).logprob, logprob, abs_tol=1e-12)


def test_nucleus_is_cut_after_top_k() -> None:
    """Top-k 2 leaves .5 and .3, of which .6 of the mass is the first alone; before top-k, .6 would keep both."""
    assert expect(HALF, 0, Sampling(1.0, 0.6, 2)).logprob == 0.0
    assert expect(HALF, 0, Sampling(1.0, 0.6)).logprob < -0.4


def test_ties_go_to_the_lower_id() -> None:
    flat = [3.0, 1.0, 1.0, 1.0]
    assert not expect(flat, 3, Sampling(1.0, 1.0, 3)).logprob > expect(flat, 1, Sampling(1.0, 1.0, 3)).logprob
    z = math.exp(3) + 2 * math.exp(1)
    assert math.isclose(expect(flat, 2, Sampling(1.0, 1.0, 3)).logprob, 1 - math.log(z), abs_tol=1e-12)


def test_support_is_exact_beyond_the_error() -> None:
    wide = [10.0, 6.0, 2.0, -2.0]  # gaps of 4, the error is 16 * 10 / 256 = .63
    assert logit_error(10.0) == LOGIT_ERROR * 10 / 256 < 1
    top = Sampling(1.0, 1.0, 2)
    assert [expect(wide, token, top).reachable for token in range(4)] == [True, True, False, False]
    assert [expect(wide, token, Sampling(0.0)).reachable for token in range(4)] == [True, False, False, False]
    assert expect(wide, 1, top).least == expect(wide, 1, top).most == expect(wide, 1, top).logprob


def test_boundary_tokens_are_tolerated_within_the_error() -> None:
    close = [10.0, 6.0, 5.9, -2.0]
    top = Sampling(1.0, 1.0, 2)
    third = expect(close, 2, top)
    assert third.reachable
    assert third.least < third.most
    assert not expect(close, 3, top).reachable
    assert expect([10.0, 9.99, 1.0], 1, Sampling(0.0)).reachable


def test_tolerance_shrinks_with_certainty_and_heat() -> None:
    assert tolerance(16.0, -0.1, 1.0) < tolerance(16.0, -1.0, 1.0) < tolerance(16.0, -1.0, 0.5)
    assert tolerance(16.0, -3.0, 0.0) == tolerance(16.0, -3.0, 1.0)
    assert tolerance(16.0, -1e-9, 1.0) > 0


@pytest.mark.parametrize("settings", [1, 2, 3, 4, 5])
def test_every_sampling_is_looked_at(settings: int) -> None:
    responses: list[Sequence[float]] = [[-0.1 * (i + 1), -2.0, -0.3, -0.2] for i in range(16)]
    for step in range(5):
        pairs = looked_at(step, responses, settings)
        rows = {row for row, _ in pairs}
        assert {row % settings for row in rows} == set(range(settings))
        assert len(rows) >= min(4, settings)
        assert all((row, 1) in pairs for row in rows), "the least probable token"


def test_rule_moves_with_the_step() -> None:
    responses = [[-1.0, -0.5, -0.3]] * 16
    assert looked_at(0, responses, 1) != looked_at(1, responses, 1)
    assert len({row // 4 for row, _ in looked_at(0, responses, 1)}) == 4, "one sample of each prompt"


def test_nan_is_looked_at_first() -> None:
    assert (0, 2) in looked_at(0, [[-1.0, -9.0, math.nan]], 1)
    assert looked_at(0, [[], [-1.0]], 1) == [(1, 0)]


def test_uniform_is_philox_of_position_and_sample() -> None:
    """The reference output of Random123 for a counter and key of zeros begins with 0x6627e8d5 0xe169c58d."""
    assert uniform(0, 0, 0) == (0x6627E8D5 * 2**32 + 0xE169C58D) / 2**64
    assert len({uniform(0, 1, 2), uniform(0, 2, 1), uniform(1, 1, 2), uniform(2**32, 1, 2), uniform(0, 2**32, 2)}) == 5


def test_kept_shares_are_in_order_of_ids() -> None:
    said = [expect(HALF[::-1], token, Sampling(1.0, 0.9)) for token in range(4)]
    assert [round(one.below, 6) for one in said] == [0.0, 0.0, round(0.15 / 0.95, 6), round(0.45 / 0.95, 6)]
    assert [round(one.through, 6) for one in said] == [0.0, round(0.15 / 0.95, 6), round(0.45 / 0.95, 6), 1.0]
