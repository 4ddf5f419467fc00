"""Scoring and differentiating one micro-batch, canonically or with the library's ordinary operators."""

from __future__ import annotations

from typing import Protocol

import torch

from rlk.kernels import policy
from rlk.kernels.policy import RowParams
from rlk.model.policy import Policy
from rlk.model.probe import Recorder
from rlk.model.qwen3 import Qwen3, Tape
from rlk.train import native
from rlk.train.attention import PackedAttention
from rlk.train.backward import Backward
from rlk.train.batching import MicroBatch
from rlk.train.gradients import Accumulators


class Arm(Protocol):
    """How a trainer computes. R rows that predict a response token."""

    def score(self, model: Qwen3, batch: MicroBatch, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities fp32 [R] of the response tokens, and whether each lies in its support, bool [R]."""

    def accumulate(
        self, model: Qwen3, batch: MicroBatch, params: RowParams, coefficients: torch.Tensor, sums: Accumulators
    ) -> torch.Tensor:
        """Adds the gradient of sum(coefficients * log-probability); returns the log-probabilities it differentiated."""


class CanonicalArm:
    """The canonical program; a recorder that is given also sees the gradients."""

    def __init__(self, recorder: Recorder | None = None, policy: Policy = policy) -> None:
        self.recorder, self.policy = recorder, policy

    def score(self, model: Qwen3, batch: MicroBatch, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
        """See Arm."""
        core = PackedAttention(batch, model.context, save=False)
        hidden = model.forward(batch.ids, batch.positions, core)
        logprob, inside, _ = self.policy.score_rows(model.logits(hidden[batch.rows]), params, batch.target)
        return logprob, inside

    def accumulate(
        self, model: Qwen3, batch: MicroBatch, params: RowParams, coefficients: torch.Tensor, sums: Accumulators
    ) -> torch.Tensor:
        """See Arm."""
        core, tape = PackedAttention(batch, model.context, save=True), Tape([])
        hidden = model.forward(batch.ids, batch.positions, core, tape)
        logits = model.logits(hidden[batch.rows])
        logprob, _, _ = self.policy.score_rows(logits, params, batch.target)
        dlogits = self.policy.score_backward(logits, params, batch.target, coefficients)
        if self.recorder is not None:
            self.recorder.turn("backward")
        Backward(model, batch, tape, core, sums, self.recorder).run(hidden, dlogits)
        return logprob


class NativeArm:
    """torch's ordinary operators."""

    def score(self, model: Qwen3, batch: MicroBatch, params: RowParams) -> tuple[torch.Tensor, torch.Tensor]:
        """See Arm."""
        with torch.no_grad():
            hidden = model.forward(batch.ids, batch.positions, native.NativeAttention(batch, model.context))
            return native.score(model.logits(hidden[batch.rows]), params, batch.target)

    def accumulate(
        self, model: Qwen3, batch: MicroBatch, params: RowParams, coefficients: torch.Tensor, sums: Accumulators
    ) -> torch.Tensor:
        """See Arm."""
        return native.accumulate(model, batch, params, coefficients, sums)
