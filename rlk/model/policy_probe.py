"""Records the steps of sampling and scoring: what the rule was given, and what it returned, a row each.

`ProbedPolicy` stands where the arithmetic is: around rlk.kernels.policy, and inside whatever an owner puts around that.
Outside of a recorded pass it only passes on.
"""

from __future__ import annotations

import torch

from rlk.kernels.policy import RowParams
from rlk.model.policy import Policy
from rlk.model.probe import Recorder


class ProbedPolicy:
    """See rlk.model.policy.Policy. Of several calls over the rows of one pass the last counts: its log-probability is
    the one that is returned."""

    def __init__(self, inner: Policy, recorder: Recorder, seed: int | None = None) -> None:
        """`seed` is given where nothing is drawn: the key that the plan gives a row's token, to be compared with."""
        self.inner, self.recorder, self.seed = inner, recorder, seed

    def sample_rows(
        self,
        logits: torch.Tensor,
        params: RowParams,
        seed: torch.Tensor,
        sample_id: torch.Tensor,
        position: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Policy. The kept mass is that of scoring the same rows: drawing does not return its own."""
        tokens, logprobs = self.inner.sample_rows(logits, params, seed, sample_id, position)
        if self.recorder.active:
            self.recorder.policy({"key": _words(seed, sample_id, position)})
            mass = self.inner.score_rows(logits, params, tokens)[2]
            self._record(logits, params, tokens, mass, logprobs)
        return tokens, logprobs

    def score_rows(
        self, logits: torch.Tensor, params: RowParams, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See Policy."""
        logprobs, inside, mass = self.inner.score_rows(logits, params, tokens)
        if self.recorder.active:
            if self.seed is not None:
                sample, position = self.recorder.head_rows()
                self.recorder.policy({"key": _words(torch.full_like(sample, self.seed), sample, position + 1)})
            self._record(logits, params, tokens, mass, logprobs)
        return logprobs, inside, mass

    def score_backward(
        self, logits: torch.Tensor, params: RowParams, tokens: torch.Tensor, coefficients: torch.Tensor
    ) -> torch.Tensor:
        """See Policy."""
        return self.inner.score_backward(logits, params, tokens, coefficients)

    def _record(
        self, logits: torch.Tensor, params: RowParams, tokens: torch.Tensor, mass: torch.Tensor, logprobs: torch.Tensor
    ) -> None:
        settings = (params.temperature, params.top_k.clamp(max=logits.shape[1]), params.top_p, params.greedy.int())
        given = {"policy_logits": logits, "settings": _words(*settings)}
        self.recorder.policy({**given, "token": tokens, "kept_mass": mass, "logprob": logprobs})


def _words(*columns: torch.Tensor) -> torch.Tensor:
    """Columns of 4- or 8-byte elements side by side, as 4-byte words [rows, words]."""
    return torch.cat([column.contiguous().view(torch.int32).view(len(column), -1) for column in columns], 1)
