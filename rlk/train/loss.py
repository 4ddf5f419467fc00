"""Advantages, loss and each token's coefficient, in float64, from the whole batch and before the first backward pass.

GRPO (Shao et al., 2024) with the clipped ratio of PPO (Schulman et al., 2017) and the k3 estimate of the KL
divergence (Schulman, 2020): loss = mean over samples of the mean over tokens of -min(r A, clip(r) A) + kl_coef *
(exp(d) - d - 1), where r is the ratio of the policy now to the policy that was scored before the update and d = log
reference - log policy. Nothing rescales a coefficient later, so neither micro-batches nor topology enter. Sums run
in token order within a sample, then over samples in order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def group_advantages(rewards: Sequence[float], group: int) -> list[float]:
    """(reward - mean) / standard deviation within each group of `group` consecutive samples; zeros where all are
    equal."""
    out: list[float] = []
    for start in range(0, len(rewards), group):
        part = rewards[start : start + group]
        mean = math.fsum(part) / len(part)
        # The mean of equal rewards may be an ulp off, and that ulp over itself would be an advantage of one.
        spread = math.fsum((r - mean) ** 2 for r in part) if max(part) > min(part) else 0.0
        deviation = math.sqrt(spread / len(part))
        out += [(r - mean) / deviation if deviation > 0 else 0.0 for r in part]
    return out


def advantages(rewards: Sequence[float], baseline: Literal["group", "batch"], group: int) -> list[float]:
    """By prompt group, or over the whole batch where a prompt has one sample (greedy)."""
    return group_advantages(rewards, group if baseline == "group" else len(rewards))


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one response, fp32 [R]: before the update, now, and of the reference."""

    old: Floats
    now: Floats
    reference: Floats


@dataclass(frozen=True)
class Loss:
    """Scalars of a step, and the derivative of the loss by each token's log-probability, fp32 [R] by sample id."""

    loss: float
    policy_loss: float
    kl: float
    clip_fraction: float
    coefficients: Mapping[int, Floats]


def grpo(
    tokens: Mapping[int, TokenLogprobs], advantage: Mapping[int, float], *, clip_eps: float, kl_coef: float
) -> Loss:
    """The loss over all samples, in order of their ids."""
    n = len(tokens)
    policy = kl = 0.0
    clipped = count = 0
    coefficients = {}
    for sample in sorted(tokens):
        t, a = tokens[sample], advantage[sample]
        weight = 1.0 / (n * len(t.now))
        sample_policy = sample_kl = 0.0
        row = np.empty(len(t.now), dtype=np.float32)
        for i, (old, now, ref) in enumerate(zip(t.old.tolist(), t.now.tolist(), t.reference.tolist(), strict=True)):
            term = _token(now, old, ref, a, clip_eps)
            sample_policy += term.policy
            sample_kl += term.kl
            clipped += term.clipped
            row[i] = weight * (term.policy_slope + kl_coef * term.kl_slope)
        policy += sample_policy * weight
        kl += sample_kl * weight
        count += len(row)
        coefficients[sample] = row
    return Loss(policy + kl_coef * kl, policy, kl, clipped / count, coefficients)


@dataclass(frozen=True)
class _Token:
    policy: float
    kl: float
    policy_slope: float
    kl_slope: float
    clipped: bool


def _token(now: float, old: float, ref: float, a: float, eps: float) -> _Token:
    ratio = _expm1(now - old) + 1.0
    bound = min(max(ratio, 1.0 - eps), 1.0 + eps)
    clipped = bound * a < ratio * a
    d = ref - now
    return _Token(
        policy=-min(ratio * a, bound * a),
        kl=_expm1(d) - d,
        policy_slope=0.0 if clipped else -ratio * a,
        kl_slope=-_expm1(d),
        clipped=clipped,
    )


def _expm1(x: float) -> float:
    """exp(x) - 1; infinite instead of an exception, so that the metric shows it and the verdict is red."""
    return math.inf if x > 709.0 else math.expm1(x)
