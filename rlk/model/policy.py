"""What an owner of a model samples and scores with."""

from __future__ import annotations

from typing import Protocol

import torch

from rlk.kernels.policy import RowParams


class Policy(Protocol):
    """What samples and scores: rlk.kernels.policy, or something that stands around it."""

    def sample_rows(
        self,
        logits: torch.Tensor,
        params: RowParams,
        seed: torch.Tensor,
        sample_id: torch.Tensor,
        position: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See rlk.kernels.policy.sample_rows."""

    def score_rows(
        self, logits: torch.Tensor, params: RowParams, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See rlk.kernels.policy.score_rows."""

    def score_backward(
        self, logits: torch.Tensor, params: RowParams, tokens: torch.Tensor, coefficients: torch.Tensor
    ) -> torch.Tensor:
        """See rlk.kernels.policy.score_backward."""
