"""A cause is named only where every usable mismatch fits it, and never where it could be chance.

Eight tokens are the least; each test says numbers of its own, so that the direction of every fit is in play.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rlk.evidence.checks.causes import likely_cause

TRAINER = (-0.25, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -0.01)
TEMPERATURE = "the ratio is the temperature everywhere: one side scaled log-probs instead of logits"
ROLLOUT_KEPT = "the rollout's are larger everywhere: only that side normalised over the kept tokens"
TRAINER_KEPT = "the trainer's are larger everywhere: only that side normalised over the kept tokens"


def _cause(
    rollout: Sequence[float], trainer: Sequence[float], heat: Sequence[float] | float, truncated: object = False
) -> str | None:
    """Nothing may be divided by zero on the way: a verdict comes without warnings."""
    left, right = np.array(rollout, np.float32), np.array(trainer, np.float32)
    with np.errstate(divide="raise", invalid="raise"):
        return likely_cause(left, right, np.broadcast_to(heat, left.shape), np.broadcast_to(truncated, left.shape))


def _scaled(heat: Sequence[float] | float, trainer: Sequence[float] = TRAINER) -> list[float]:
    """The rollout's values where it scaled log-probabilities."""
    return [float(x) for x in np.array(trainer) * heat]


@pytest.mark.parametrize("heat", [0.7, 1.3, (0.7, 1.3) * 4])
def test_ratio_that_is_the_temperature_is_named_whichever_side_scaled(heat: Sequence[float] | float) -> None:
    assert _cause(_scaled(heat), TRAINER, heat) == TEMPERATURE
    assert _cause(TRAINER, _scaled(heat), heat) == TEMPERATURE


@pytest.mark.parametrize("tokens", [7, 8])
def test_fewer_than_eight_mismatches_may_be_chance(tokens: int) -> None:
    rollout = [*_scaled(0.7)[:tokens], -9.0, -9.5]
    said = _cause(rollout, [*TRAINER[:tokens], -9.0, -9.5], 0.7)
    assert said == (TEMPERATURE if tokens == 8 else None)


@pytest.mark.parametrize(
    "odd",
    [(0.0, -1.0), (-1.0, 0.0), (0.5, -1.0), (-1.0, 0.5), (0.5, 0.25), (-np.inf, -1.0), (-1.0, -np.inf), (np.nan, -1.0),
     (-1.0, np.nan), (np.inf, -1.0), (-1.0, np.inf), (0.0, 0.0), (-3.0, -3.0)],
)  # fmt: skip
def test_token_that_has_no_ratio_or_is_equal_decides_nothing(odd: tuple[float, float]) -> None:
    """Zero, above zero, not finite, or no mismatch: other checks are red for it."""
    for heat in (0.7, 1.3):
        assert _cause([odd[0], *_scaled(heat)], [odd[1], *TRAINER], heat) == TEMPERATURE
    assert _cause([odd[0], *_scaled(0.5)], [odd[1], *TRAINER], 1.0, truncated=True) == ROLLOUT_KEPT


def test_one_token_that_does_not_fit_the_temperature_refutes_it() -> None:
    for at in range(8):
        rollout = _scaled(0.7)
        rollout[at] *= 1.01
        assert _cause(rollout, TRAINER, 0.7) is None
    assert _cause([x * 1.0005 for x in _scaled(0.7)], TRAINER, 0.7) == TEMPERATURE


@pytest.mark.parametrize("heat", [1.0, 0.0, (0.7,) * 7 + (1.0,), (0.7,) * 7 + (0.0,)])
def test_temperature_explains_no_token_that_it_does_not_scale(heat: Sequence[float] | float) -> None:
    """At 1 nothing is scaled, and a greedy token's log-probability is the untempered one."""
    factors = np.where(np.array(heat) == 0.0, 1.0005, np.array(heat) * 1.0005)
    assert _cause(_scaled([*np.broadcast_to(factors, 8)]), TRAINER, heat) is None


def test_side_that_is_larger_everywhere_is_named() -> None:
    smaller = [2 * x for x in TRAINER]
    assert _cause(TRAINER, smaller, 1.0, truncated=True) == ROLLOUT_KEPT
    assert _cause(smaller, TRAINER, 1.0, truncated=True) == TRAINER_KEPT


def test_difference_is_relative() -> None:
    tiny = [1e-3 * x for x in TRAINER]
    assert _cause(tiny, [2 * x for x in tiny], 1.0, truncated=True) == ROLLOUT_KEPT
    huge = [100.0 * x - 100 for x in TRAINER]
    assert _cause(huge, [x - 0.05 for x in huge], 1.0, truncated=True) is None


def test_one_token_the_other_way_or_of_a_whole_support_refutes_it() -> None:
    smaller = [2 * x for x in TRAINER]
    for at in range(8):
        mixed = [small if i == at else x for i, (x, small) in enumerate(zip(TRAINER, smaller, strict=True))]
        other = [x if i == at else small for i, (x, small) in enumerate(zip(TRAINER, smaller, strict=True))]
        assert _cause(mixed, other, 1.0, truncated=True) is None
        assert _cause(TRAINER, smaller, 1.0, truncated=[i != at for i in range(8)]) is None
        assert _cause(smaller, TRAINER, 1.0, truncated=[i != at for i in range(8)]) is None
