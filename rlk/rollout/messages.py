"""What travels between the driver and an engine rank. Numbers travel as ids and arrays, never as text."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

from rlk.evidence.arrays import RolloutArrays
from rlk.plan.sampling import Sampling


class RolloutError(RuntimeError):
    """An engine cannot do what it was asked; the message is one line."""


@dataclass(frozen=True)
class Request:
    """One sample to generate. `sample_id` is unique in a run: it is half of the key of the sample's random numbers."""

    sample_id: int
    prompt_index: int
    prompt_tokens: list[int]
    sampling: Sampling
    max_tokens: int

    def __post_init__(self) -> None:
        if self.sample_id < 0:
            raise ValueError(f"sample_id {self.sample_id}: allowed is >= 0")
        if not self.prompt_tokens:
            raise ValueError(f"sample {self.sample_id}: prompt_tokens is empty: a prompt needs at least one token")
        if self.max_tokens < 1:
            raise ValueError(f"sample {self.sample_id}: max_tokens {self.max_tokens}: allowed is >= 1")


@dataclass(frozen=True)
class Generation:
    """What one rank of one engine generated in one step; samples are in the order of the requests.

    Every rank of an engine must hold the same bytes: `digest` compares them without moving them.
    """

    engine: int
    rank: int
    step: int
    arrays: RolloutArrays

    @property
    def digest(self) -> str:
        """Hex SHA-256 over names and bytes of the columns, in their order."""
        total = hashlib.sha256()
        for name, column in self.arrays.columns().items():
            total.update(f"{name} {column.dtype.str} {column.size} ".encode() + column.tobytes())
        return total.hexdigest()


@dataclass(frozen=True)
class Counters:
    """Events since the start or the last reset, counted where they happen and not from what was returned.

    steps: model executions. graph_replays: those of them that ran a captured CUDA graph. chunks: rows whose prompt was
    still incomplete after a step. preemptions: requests thrown out of the KV cache. partitioned_steps: executions whose
    query rows were shared out over context-parallel ranks. cached_tokens: prompt tokens found in the prefix cache.
    sampler_calls: calls of our sampler (0 in native mode). generated_samples, generated_tokens: requests that the
    scheduler admitted, and tokens that were sampled and kept.
    """

    steps: int = 0
    graph_replays: int = 0
    chunks: int = 0
    preemptions: int = 0
    partitioned_steps: int = 0
    cached_tokens: int = 0
    sampler_calls: int = 0
    generated_samples: int = 0
    generated_tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        """By name."""
        return asdict(self)
