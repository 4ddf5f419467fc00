"""Advantages, loss and coefficients come from the whole batch in float64, and no order or grouping enters them.

The derivative is checked against torch's autograd of the same loss in float64; log-probabilities lie within .5 of each
other, so that some ratios are clipped at .2 and some are not.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlk.train.loss import Floats, Loss, TokenLogprobs, advantages, group_advantages, grpo

LENGTHS = (1, 4, 9, 30)
ADVANTAGE = {10: 1.2, 11: -0.7, 12: 0.0, 13: -1.5}
RNG = np.random.default_rng(0)


def floats(n: int, around: float = 0.0) -> Floats:
    return (around + RNG.uniform(-0.5, 0.5, n)).astype(np.float32)


TOKENS = {10 + i: TokenLogprobs(floats(n, -2), floats(n, -2), floats(n, -2)) for i, n in enumerate(LENGTHS)}


def loss_of(tokens: dict[int, TokenLogprobs] = TOKENS, kl_coef: float = 0.1, clip_eps: float = 0.2) -> Loss:
    return grpo(tokens, ADVANTAGE, clip_eps=clip_eps, kl_coef=kl_coef)


def single(old: float, now: float, reference: float, advantage: float, **settings: float) -> tuple[Loss, float]:
    """The loss of one token, and its coefficient."""
    row = TokenLogprobs(*(np.array([x], np.float32) for x in (old, now, reference)))
    loss = grpo({0: row}, {0: advantage}, clip_eps=0.2, kl_coef=settings.get("kl_coef", 0.0))
    return loss, float(loss.coefficients[0][0])


def test_a_group_is_centred_and_scaled() -> None:
    found = group_advantages([1, 0, 0, 1, 3, 1, 1, 1], 4)
    assert found[:4] == [1.0, -1.0, -1.0, 1.0]
    assert found[4:] == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3])


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e-9, 12345.678])
@pytest.mark.parametrize("group", [1, 3, 6, 7])
def test_equal_rewards_give_zero_advantage(reward: float, group: int) -> None:
    assert group_advantages([reward] * group, group) == [0.0] * group


def test_equal_rewards_and_no_kl_give_zero_gradient() -> None:
    loss = grpo(TOKENS, dict.fromkeys(TOKENS, 0.0), clip_eps=0.2, kl_coef=0.0)
    assert all(not row.any() for row in loss.coefficients.values())
    with_kl = grpo(TOKENS, dict.fromkeys(TOKENS, 0.0), clip_eps=0.2, kl_coef=0.01)
    assert any(row.any() for row in with_kl.coefficients.values())


def test_the_baseline_is_the_group_or_the_batch() -> None:
    rewards = [1.0, 1.0, 0.0, 0.0]
    assert advantages(rewards, "group", 2) == [0.0] * 4
    assert advantages(rewards, "batch", 1) == [1.0, 1.0, -1.0, -1.0]


def test_the_loss_is_a_mean_of_sample_means() -> None:
    expected = 0.0
    for sample, t in TOKENS.items():
        ratio = np.exp(t.now.astype(np.float64) - t.old)
        d = t.reference.astype(np.float64) - t.now
        a = ADVANTAGE[sample]
        policy = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)
        expected += float((policy + 0.1 * (np.exp(d) - d - 1)).mean()) / len(TOKENS)
    loss = loss_of()
    assert loss.loss == pytest.approx(expected, rel=1e-12)
    assert loss.loss == pytest.approx(loss.policy_loss + 0.1 * loss.kl, rel=1e-15)


def test_coefficients_are_the_derivative() -> None:
    now = {s: torch.tensor(t.now, dtype=torch.float64, requires_grad=True) for s, t in TOKENS.items()}
    total = torch.zeros((), dtype=torch.float64)
    for sample, t in TOKENS.items():
        a, old, reference = ADVANTAGE[sample], torch.tensor(t.old).double(), torch.tensor(t.reference).double()
        ratio, d = (now[sample] - old).exp(), reference - now[sample]
        policy = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
        total = total + (policy + 0.1 * (d.exp() - d - 1)).mean() / len(TOKENS)
    grads = torch.autograd.grad(total, list(now.values()))
    for row, grad in zip(loss_of().coefficients.values(), grads, strict=True):
        assert row.dtype == np.float32
        np.testing.assert_array_max_ulp(row, grad.numpy().astype(np.float32), maxulp=1)


@pytest.mark.parametrize(
    ("advantage", "now", "clipped"),
    [(1.0, 0.3, True), (1.0, -0.3, False), (-1.0, 0.3, False), (-1.0, -0.3, True), (1.0, 0.1, False)],
)
def test_only_a_ratio_that_gained_is_clipped(advantage: float, now: float, clipped: bool) -> None:
    loss, coefficient = single(old=-1.0, now=-1.0 + now, reference=-1.0, advantage=advantage)
    assert loss.clip_fraction == float(clipped)
    assert coefficient == (0.0 if clipped else pytest.approx(-advantage * math.exp(now), rel=1e-6))


def test_an_unchanged_policy_has_ratio_one() -> None:
    loss, coefficient = single(old=-1.7, now=-1.7, reference=-1.7, advantage=2.0, kl_coef=0.5)
    assert (loss.policy_loss, loss.kl, loss.clip_fraction, coefficient) == (-2.0, 0.0, 0.0, -2.0)


def test_k3_is_never_negative_and_keeps_small_values() -> None:
    for d in (-3.0, -1e-3, 1e-3, 3.0):
        loss, _ = single(old=-1.0, now=-4.0, reference=-4.0 + d, advantage=0.0, kl_coef=1.0)
        exact = float(np.float32(-4.0 + d)) + 4.0
        assert loss.kl == pytest.approx(math.expm1(exact) - exact, rel=1e-9)
        assert loss.kl > 0


def test_a_hopeless_token_gives_infinity_not_an_error() -> None:
    assert single(old=-1.0, now=-2000.0, reference=-1.0, advantage=0.0, kl_coef=1.0)[0].kl == math.inf


def test_coefficients_ignore_the_order_of_arrival() -> None:
    expected = loss_of()
    found = loss_of(dict(reversed(TOKENS.items())))
    assert (found.loss, found.policy_loss, found.kl) == (expected.loss, expected.policy_loss, expected.kl)
    for sample, row in expected.coefficients.items():
        assert found.coefficients[sample].tobytes() == row.tobytes()


def test_a_mean_of_micro_batch_means_would_differ() -> None:
    whole = loss_of()
    halves = [loss_of({s: TOKENS[s] for s in part}) for part in ((10,), (11, 12, 13))]
    assert sum(half.loss for half in halves) / 2 != pytest.approx(whole.loss, rel=1e-3)
