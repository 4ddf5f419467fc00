"""The oracle's rules by hand, and the whole oracle against the canonical program on the tiny model.

Logits of four or five tokens, so that every support, mass and log-probability can be checked on paper. The model test
runs one forward pass of 24 tokens: enough for every layer, head and position to matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from random import Random

import numpy as np
import pytest

from rlk.evidence.oracle import (
    LOGIT_ERROR,
    SHORT,
    expect,
    logit_error,
    looked_at,
    share_tolerance,
    tolerance,
    uniform,
)
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


def test_one_long_response_a_step_is_looked_at_beyond_its_beginning() -> None:
    responses = [[-1.0] * SHORT + [-2.0] * 8 for _ in range(8)]
    for step in range(3):
        rows = dict(looked_at(step, responses, 1))
        beyond = [(row, index) for row, index in looked_at(step, responses, 1) if index >= SHORT]
        assert beyond == [(step, SHORT)]
        assert len(rows) == 4


def test_beginning_of_a_long_response_is_1024_tokens() -> None:
    responses = [[-1.0] * 1023 + [-2.0, -3.0] for _ in range(8)]
    far = {row: index for row, index in looked_at(0, responses, 1) if index > 8}
    assert far == {0: 1024, 2: 1023, 4: 1023, 6: 1023}


def test_nan_is_looked_at_first() -> None:
    assert (0, 2) in looked_at(0, [[-1.0, -9.0, math.nan]], 1)
    assert looked_at(0, [[], [-1.0]], 1) == [(1, 0)]


def test_uniform_is_philox_of_position_and_sample() -> None:
    """The reference output of Random123 for a counter and key of zeros begins with 0x6627e8d5 0xe169c58d."""
    assert uniform(0, 0, 0) == (0x6627E8D5 * 2**32 + 0xE169C58D) / 2**64
    assert len({uniform(0, 1, 2), uniform(0, 2, 1), uniform(1, 1, 2), uniform(2**32, 1, 2), uniform(0, 2**32, 2)}) == 5


def test_uniform_draws_what_the_kernel_draws() -> None:
    """Every word of seed, sample id and position is in play; both values were compared with the kernel's tokens."""
    assert uniform(0x0123456789ABCDEF, (3 << 32) + 5, 77).hex() == "0x1.e43094919b67bp-6"
    assert uniform(2**64 - 1, 2**64 - 1, 2**32 - 1).hex() == "0x1.dd807049c983cp-1"


def _kept(logits: Sequence[float], sampling: Sampling) -> set[int]:
    """The support of one row, in a few lines: the rule without any error."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: sampling.top_k if sampling.top_k > 0 else None]
    masses = [math.exp(logits[i] / sampling.temperature) for i in order]
    fronts = [sum(masses[:place]) for place in range(len(order))]
    cut = sampling.top_p * sum(masses) if sampling.top_p < 1 else math.inf
    return {i for i, front in zip(order, fronts, strict=True) if front < cut or i == order[0]}


def _over(logits: Sequence[float], token: int, support: set[int], heat: float) -> float:
    return logits[token] / heat - math.log(sum(math.exp(logits[i] / heat) for i in support | {token}))


RULES = (Sampling(1.0, 0.7), Sampling(0.7, 0.9, 3), Sampling(1.3, 1.0, 2), Sampling(2.0, 0.5))


def test_supports_are_those_of_every_error_that_is_allowed() -> None:
    """60 rows of four logits, each logit moved by the error either way or not at all, in all 81 ways. What some way
    keeps is reachable, and bounds the log-probability; 232 of 240 tokens have exactly these bounds, the others wider
    ones, because what top-k keeps and what it weighs are bounded apart."""
    exact = 0
    for seed in range(60):
        random = Random(seed)
        logits, sampling = [random.uniform(0, 2) for _ in range(4)], random.choice(RULES)
        error, heat = logit_error(max(logits)), sampling.temperature
        ways = [_kept([x + e for x, e in zip(logits, way, strict=True)], sampling)
                for way in product((-error, 0.0, error), repeat=4)]  # fmt: skip
        maybe, surely = set.union(*ways), set.intersection(*ways)
        for token in range(4):
            said = expect(logits, token, sampling)
            bounds = _over(logits, token, maybe, heat), _over(logits, token, surely, heat)
            assert said.reachable or token not in maybe
            assert said.least <= bounds[0] + 1e-12
            assert said.most >= bounds[1] - 1e-12
            assert math.isclose(said.logprob, _over(logits, token, _kept(logits, sampling), heat), abs_tol=1e-12)
            exact += said.reachable == (token in maybe) and all(
                math.isclose(a, b, abs_tol=1e-12) for a, b in zip((said.least, said.most), bounds, strict=True)
            )
    assert exact == 232


def test_tolerances_are_the_stated_errors() -> None:
    """12 units of 2^-8 of the largest logit, times (1 - p) / T or share (1 - share) / T, of which the floor is .01."""
    unit = 12 * 32 / 256
    assert logit_error(32.0) == 16 * 32 / 256
    assert math.isclose(tolerance(32.0, math.log(0.25), 2.0), unit * 0.75 / 2)
    assert math.isclose(tolerance(32.0, math.log(0.999), 2.0), unit * 0.01 / 2)
    assert math.isclose(share_tolerance(32.0, -1.0, -1.0, 0.25, 2.0), unit * 0.1875 / 2)
    assert math.isclose(share_tolerance(32.0, -1.0, -1.0, 1.0, 0.0), unit * 0.01)
    assert math.isclose(share_tolerance(32.0, -1.5, -1.0, 0.0, 1.0), unit * 0.01 + math.expm1(0.5))
    assert math.isclose(share_tolerance(32.0, -9.0, -1.0, 0.0, 1.0), unit * 0.01 + math.expm1(1.0))


MIXED = [[-0.5, -2.0, -0.3], [-1.0, -0.1], [-3.0], [-0.2, -0.2, -0.7, -0.6]] * 4


@pytest.mark.parametrize(
    ("step", "settings", "pairs"),
    [
        (0, 1, [(0, 0), (0, 1), (4, 1), (8, 1), (8, 2), (12, 0), (12, 1)]),
        (1, 2, [(2, 0), (5, 0), (10, 0), (13, 0)]),
        (2, 3, [(6, 0), (10, 0), (12, 1), (12, 2), (14, 0)]),
        (7, 4, [(1, 0), (6, 0), (11, 2), (12, 1)]),
        (0, 5, [(0, 0), (0, 1), (3, 2), (3, 3), (6, 0), (9, 0), (9, 1), (12, 0), (12, 1)]),
    ],
)
def test_looked_at_is_the_rule_that_recorded_runs_follow(
    step: int, settings: int, pairs: list[tuple[int, int]]
) -> None:
    """A change of the rule makes the oracle's files of earlier runs red: it is deliberate or it is a mistake."""
    assert looked_at(step, MIXED, settings) == pairs


@pytest.mark.parametrize(
    ("step", "samples", "settings", "pairs"),
    [
        (0, 2, 3, [(0, 0), (0, 1), (1, 0), (1, 1)]),  # fewer samples than settings
        (1, 5, 3, [(0, 1), (1, 0), (2, 0)]),  # one round of all settings and a rest
        (0, 3, 3, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]),
    ],
)
def test_samples_that_make_no_two_rounds_are_looked_at_too(
    step: int, samples: int, settings: int, pairs: list[tuple[int, int]]
) -> None:
    assert looked_at(step, MIXED[:samples], settings) == pairs


def test_greedy_is_judged_by_twice_the_error() -> None:
    """Two logits may each be wrong by the error: a token as far below the largest as both together is reachable."""
    error = logit_error(16.0)
    assert error == 1.0
    assert [expect([16.0, 16.0 - gap], 1, Sampling(0.0)).reachable for gap in (1.5, 2.0, 2.01)] == [True, True, False]
    assert logit_error(32.0) == 2.0
    assert [expect([32.0, 32.0 - gap], 1, Sampling(0.0)).reachable for gap in (3.5, 4.0, 4.01)] == [True, True, False]
    said = expect([16.0, 14.0], 0, Sampling(0.0))
    assert (said.least, said.most, said.below, said.through) == (said.logprob, said.logprob, 0.0, 1.0)
    assert said.scale == 16.0
    assert expect([-32.0, 2.0], 1, Sampling(1.0)).scale == 32.0


def test_kept_shares_are_in_order_of_ids() -> None:
    said = [expect(HALF[::-1], token, Sampling(1.0, 0.9)) for token in range(4)]
    assert [round(one.below, 6) for one in said] == [0.0, 0.0, round(0.15 / 0.95, 6), round(0.45 / 0.95, 6)]
    assert [round(one.through, 6) for one in said] == [0.0, round(0.15 / 0.95, 6), round(0.45 / 0.95, 6), 1.0]
    hot = [expect([2 * x for x in HALF[::-1]], token, Sampling(2.0)) for token in range(4)]
    assert [round(one.below, 6) for one in hot] == [0.0, 0.05, 0.2, 0.5]
    assert [round(one.through, 6) for one in hot] == [0.05, 0.2, 0.5, 1.0]


def test_nucleus_ends_before_a_token_whose_front_is_its_share_exactly() -> None:
    """Masses 1, .5, .5: the first alone has the half that is asked for."""
    row = [0.0, -math.log(2), -math.log(2)]
    assert math.exp(row[1]) == 0.5
    assert expect(row, 0, Sampling(1.0, 0.5)).logprob == 0.0
    assert expect(row, 0, Sampling(1.0, math.nextafter(0.5, 1))).logprob < -0.4


def test_one_token_may_be_all_that_is_kept() -> None:
    said = [expect([10.0, 2.0, 1.0], token, Sampling(0.7, 1.0, 1)) for token in range(2)]
    assert [one.reachable for one in said] == [True, False]
    assert said[0].logprob == said[0].least == said[0].most == 0.0


def test_whole_support_keeps_a_token_whose_mass_is_below_a_rounding() -> None:
    said = expect([0.0, -60.0], 1, Sampling(1.0))
    assert said.reachable
    assert said.logprob == said.least == said.most == -60.0


def test_logits_beyond_the_range_of_exp_are_no_matter() -> None:
    for sampling in (Sampling(1.0), Sampling(1.0, 0.9), Sampling(0.005, 0.9, 2)):
        with np.errstate(over="raise", invalid="raise"):
            said = [expect([1000.0, 0.0, -1000.0], token, sampling) for token in range(2)]
        assert said[0].logprob == 0.0
        assert said[1].logprob == -1000 / sampling.temperature
    said = [expect([1000.0, 1000 - math.log(2), -1000.0], token, Sampling(1.0, 0.9)) for token in range(2)]
    assert all(
        math.isclose(one.logprob, math.log(p), abs_tol=1e-9) for one, p in zip(said, (2 / 3, 1 / 3), strict=True)
    )


def test_rank_is_uncertain_up_to_twice_the_error() -> None:
    """Two logits 2 apart, each of which may be wrong by 1: either may be the first, and neither surely is."""
    top = Sampling(1.0, 1.0, 1)
    for error in (0.5, 1.0, 2.0):
        assert logit_error(16 * error) == error
        gaps = (1.5 * error, 2 * error, 2.01 * error)
        under, near, far = (expect([16 * error, 16 * error - gap], 1, top) for gap in gaps)
        assert [one.reachable for one in (under, near, far)] == [True, True, False]
        assert under.most == near.most == 0.0
        assert near.least < -2 * error
        assert far.most == far.logprob < -2 * error


def test_token_that_may_be_the_first_is_in_every_nucleus() -> None:
    """Of two logits that differ by less than the error either may rank first, and the first is always kept."""
    said = [expect([10.0, 9.99, -20.0], token, Sampling(1.0, 0.1)) for token in range(3)]
    assert [one.reachable for one in said] == [True, True, False]
