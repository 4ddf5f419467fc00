"""Faults of a train rank: in the rows that it is given, in its optimizer step, in what it returns. See
rlk.plan.faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from rlk.plan.faults import Moment, moment
from rlk.train.batching import MicroBatch
from rlk.train.optimizer import AdamSettings

RANK = 1
"""The one train rank of the faults that say one rank; rank 0 is the one that most code looks at."""


def train_fault(inject: str | None, rank: int) -> TrainFault | None:
    """The fault of one rank, or None."""
    when = moment(inject, ("batch", "update"), ("train",))
    return None if when is None else TrainFault(when, rank)


class TrainFault:
    """Passes everything through, except what its fault changes while it acts."""

    def __init__(self, when: Moment, rank: int) -> None:
        self.when, self.rank, self.name = when, rank, when.injection.fault.name

    def _acts(self, name: str) -> bool:
        return self.name == name and self.when.on

    def batch(self, batch: MicroBatch) -> MicroBatch:
        """A micro-batch before it is used."""
        if self._acts("cp-layout"):
            parts = [part.sort().values for part in batch.gather.split(batch.key_first.diff().tolist())]
            return replace(batch, gather=torch.cat(parts))
        if self._acts("labels-rolled"):
            return replace(batch, target=batch.ids.roll(-1)[batch.rows])
        return batch

    def scoring(self, batch: MicroBatch) -> MicroBatch:
        """A micro-batch before it is scored."""
        if self._acts("packing-ignored"):
            ends = torch.tensor([0, 1], device=batch.first.device)
            return replace(batch, first=batch.first[-1] * ends, key_first=batch.key_first[-1] * ends)
        return batch

    def gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Gradients before the optimizer sees them, changed in place."""
        factor = 0 if self._acts("gradient-zeroed") else 1
        if self._acts("gradient-twice") and self.rank == RANK:
            factor = 2
        for gradient in gradients.values():
            gradient.mul_(factor)

    def settings(self, settings: AdamSettings) -> AdamSettings:
        """Constants of the optimizer step."""
        return replace(settings, lr=0.0) if self._acts("lr-zero") else settings

    def exports(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """New weights before the model takes them."""
        return {} if self._acts("master-not-exported") else weights

    def scored(self, logprobs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Log-probabilities before they are returned."""
        if self._acts("nan-on-one-rank") and self.rank == RANK and len(logprobs):
            return np.concatenate([np.full(1, np.nan, np.float32), logprobs[1:]])
        return logprobs
