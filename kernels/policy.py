"""Sampling and log-probability over exact integer masses: w_i = int64(exp((x_i - max) / T) * 2^40).

Sums of w are int64 sums, exact and so associative: no tiling, sharding, sort or batch can change them. Rank order is
logit descending, then token id ascending. Top-k keeps exactly k; top-p after it keeps a token while the mass ranked
before it is below int64(p * kept mass). The log-probability is float64(d_t) - log(float64(Z) * 2^-40), rounded once to
fp32. A sample is inverse-CDF in ascending token id with Philox4x32-10 bits keyed by (seed, position, sample id): a
function of logits and key alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch

from rlk.kernels.forms import form


class NonFiniteLogitError(RuntimeError):
    """A logit is NaN or infinite."""


@dataclass(frozen=True)
class RowParams:
    """Sampling settings, one a row: temperature fp32 [R] (1 where greedy), top_k int64 [R] (vocabulary = off), top_p
    float64 [R] (1 = off), greedy bool [R]; and the size of the vocabulary."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    greedy: torch.Tensor
    vocabulary: int

    @classmethod
    def build(cls, settings: Sequence[tuple[float, float, int]], vocab: int) -> RowParams:
        """From (temperature, top_p, top_k) a row. T = 0 is greedy: top-p and top-k are ignored, the log-probability
        is untempered."""
        greedy = [t == 0 for t, _, _ in settings]
        return cls(
            torch.tensor([1.0 if g else t for g, (t, _, _) in zip(greedy, settings, strict=True)], dtype=torch.float32),
            torch.tensor(
                [vocab if g or k < 1 else min(k, vocab) for g, (_, _, k) in zip(greedy, settings, strict=True)]
            ),
            torch.tensor([1.0 if g else p for g, (_, p, _) in zip(greedy, settings, strict=True)], dtype=torch.float64),
            torch.tensor(greedy, dtype=torch.bool),
            vocab,
        )

    @cached_property
    def cut(self) -> torch.Tensor:
        """Indices int64 [n] of the rows that top-k or top-p cuts. Found once, since a device is waited for."""
        return ((self.top_k < self.vocabulary) | (self.top_p < 1.0)).nonzero()[:, 0]

    def to(self, device: torch.device) -> RowParams:
        """The same settings where the logits are."""
        return self._each(lambda t: t.to(device))

    def full_support(self) -> RowParams:
        """The same temperatures over the whole vocabulary: what the KL reference is scored with."""
        v = torch.full_like(self.top_k, torch.iinfo(torch.int64).max)
        return replace(self, top_k=v, top_p=torch.ones_like(self.top_p))

    def rows(self, index: torch.Tensor) -> RowParams:
        """Settings of the rows `index` int64 [n], repeated as asked."""
        return self._each(lambda t: t[index])

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> RowParams:
        """The settings with each column changed."""
        t, k, p, greedy = map(change, (self.temperature, self.top_k, self.top_p, self.greedy))
        return RowParams(t, k, p, greedy, self.vocabulary)


def sample_rows(
    logits: torch.Tensor,
    params: RowParams,
    seed: torch.Tensor,
    sample_id: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token a row of logits [R, V] bf16, V the real vocabulary.

    seed, sample_id, position: int64 [R]; position is that of the token being drawn.

    Returns:
        Tokens int64 [R] and the log-probability of each, fp32 [R].

    Raises:
        NonFiniteLogitError: names the row.
    """
    return cast(
        tuple[torch.Tensor, torch.Tensor],
        form("policy", logits).sample(logits, params, seed, sample_id, position),
    )


def score_rows(
    logits: torch.Tensor, params: RowParams, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability fp32 [R] of given tokens int64 [R], whether each lies in its row's support, and the kept mass
    int64 [R].

    A token outside the support is reported, never repaired.

    Raises:
        NonFiniteLogitError: names the row.
    """
    return cast(tuple[torch.Tensor, torch.Tensor, torch.Tensor], form("policy", logits).score(logits, params, tokens))


def score_backward(
    logits: torch.Tensor, params: RowParams, tokens: torch.Tensor, coefficients: torch.Tensor
) -> torch.Tensor:
    """Gradient [R, V] bf16 of sum(coefficients * logprob) with respect to the logits; coefficients fp32 [R]."""
    return cast(torch.Tensor, form("policy", logits).score_backward(logits, params, tokens, coefficients))
