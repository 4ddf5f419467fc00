"""Figures of a step that follow from its arrays alone. The driver writes them, the validator counts again."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlk.evidence.arrays import LENGTH, BatchArrays
from rlk.evidence.samples import Samples


@dataclass(frozen=True)
class BatchCounts:
    """The metrics of the same names. Means are exact sums (math.fsum) over one division; std is the population's."""

    samples: int
    response_tokens: int
    nonzero_advantages: int
    truncated_share: float
    reward_mean: float
    reward_std: float
    advantage_abs_max: float


def batch_counts(samples: Samples, batch: BatchArrays) -> BatchCounts:
    """Count one step. A step without samples has shares and means of 0."""
    number = len(samples.sample_id)
    rewards = batch.reward.tolist()
    mean = math.fsum(rewards) / len(rewards) if rewards else 0.0
    spread = math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards) if rewards else 0.0
    return BatchCounts(
        samples=number,
        response_tokens=len(samples.tokens),
        nonzero_advantages=int(np.count_nonzero(batch.advantage)),
        truncated_share=float(np.count_nonzero(samples.finish_reason == LENGTH) / number) if number else 0.0,
        reward_mean=mean,
        reward_std=math.sqrt(spread),
        advantage_abs_max=float(np.abs(batch.advantage).max()) if len(batch.advantage) else 0.0,
    )
