"""From samples to what one rank computes: micro-batches of whole, consecutive samples, and each rank's rows of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlk.model.parallel import ParallelContext
from rlk.model.slices import shard_positions
from rlk.plan.sampling import Sampling
from rlk.plan.topology import VIRTUAL


@dataclass(frozen=True)
class Sample:
    """One response to score or to train on. `tokens` holds the prompt, then the response."""

    sample_id: int
    tokens: tuple[int, ...]
    prompt_len: int
    sampling: Sampling

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_len < len(self.tokens):
            raise ValueError(
                f"sample {self.sample_id}: prompt of {self.prompt_len} of {len(self.tokens)} tokens; both need one"
            )

    @property
    def response_len(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - self.prompt_len


def micro_batches(samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
    """Consecutive samples up to `budget` tokens each; a sample is never split, so one over the budget goes alone.

    Raises:
        ValueError: sample ids are not strictly ascending.
    """
    ids = [s.sample_id for s in samples]
    if ids != sorted(set(ids)):
        raise ValueError("samples must come sorted by id, each once")
    out: list[list[Sample]] = []
    room = 0
    for sample in samples:
        if not out or len(sample.tokens) > room:
            out.append([])
            room = budget
        out[-1].append(sample)
        room -= len(sample.tokens)
    return out


@dataclass(frozen=True)
class MicroBatch:
    """One rank's rows of a micro-batch. A row is a token; rows of a sample lie together, slice by slice.

    ids, positions: int64 [T]. first: int64 [samples + 1], rows of each sample. slices[i]: row ranges of the local
    virtual slices of sample i. key_first: int64 [samples + 1], rows of each sample in the gathered, position-ordered
    keys. gather: int64 [keys], where each of these lies among the gathered rows of all context-parallel ranks,
    `padded` a rank.
    rows: int64 [R], the rows that predict a response token; target, owner, index: that token, its sample (index
    within the micro-batch) and its place in the response. row_slices: as slices, with ranges of these rows.
    """

    samples: tuple[Sample, ...]
    ids: torch.Tensor
    positions: torch.Tensor
    first: torch.Tensor
    slices: tuple[tuple[tuple[int, int], ...], ...]
    key_first: torch.Tensor
    gather: torch.Tensor
    padded: int
    rows: torch.Tensor
    row_slices: tuple[tuple[tuple[int, int], ...], ...]
    target: torch.Tensor
    owner: torch.Tensor
    index: torch.Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """The same rows where the model is."""
        moved: dict[str, Any] = {n: t.to(device) for n, t in vars(self).items() if isinstance(t, torch.Tensor)}
        return replace(self, **moved)


def build(samples: Sequence[Sample], context: ParallelContext) -> MicroBatch:
    """This rank's part of a micro-batch, on the host.

    Every array is a function of the samples and of the rank's place alone.
    """
    size, per_rank = context.cp.size, VIRTUAL // context.cp.size
    placed = [_place(samples, range(c * per_rank, (c + 1) * per_rank)) for c in range(size)]
    mine = placed[context.cp.rank]
    padded = max(len(p.where) for p in placed)
    key_first = [0]
    for s in samples:
        key_first.append(key_first[-1] + len(s.tokens))
    gather = torch.empty(key_first[-1], dtype=torch.int64)
    for c, p in enumerate(placed):
        keys = torch.tensor([key_first[i] + position for i, position in p.where], dtype=torch.int64)
        gather[keys] = c * padded + torch.arange(len(keys))
    predicting = [
        (row, samples[i].tokens[position + 1], i, position + 1 - samples[i].prompt_len)
        for row, (i, position) in enumerate(mine.where)
        if samples[i].prompt_len - 1 <= position < len(samples[i].tokens) - 1
    ]
    columns = torch.tensor(predicting, dtype=torch.int64).reshape(-1, 4).t().contiguous()
    return MicroBatch(
        samples=tuple(samples),
        ids=torch.tensor([samples[i].tokens[position] for i, position in mine.where], dtype=torch.int64),
        positions=torch.tensor([position for _, position in mine.where], dtype=torch.int64),
        first=torch.tensor(mine.first, dtype=torch.int64),
        slices=tuple(mine.slices),
        key_first=torch.tensor(key_first, dtype=torch.int64),
        gather=gather,
        padded=padded,
        rows=columns[0],
        row_slices=tuple(tuple(_within(predicting, *r) for r in ranges) for ranges in mine.slices),
        target=columns[1],
        owner=columns[2],
        index=columns[3],
    )


def _within(rows: Sequence[tuple[int, ...]], start: int, end: int) -> tuple[int, int]:
    """The range of ascending rows that lie from `start` to `end`."""
    return bisect_left(rows, (start,)), bisect_left(rows, (end,))


@dataclass(frozen=True)
class _Placed:
    """Rows of one context-parallel rank: (sample, position) of each, and where samples and slices begin."""

    where: list[tuple[int, int]]
    first: list[int]
    slices: list[tuple[tuple[int, int], ...]]


def _place(samples: Sequence[Sample], owned: range) -> _Placed:
    placed = _Placed([], [0], [])
    for i, sample in enumerate(samples):
        ranges = []
        for positions in shard_positions(owned, len(sample.tokens)):
            start = len(placed.where)
            placed.where.extend((i, position) for position in positions)
            ranges.append((start, len(placed.where)))
        placed.slices.append(tuple(ranges))
        placed.first.append(len(placed.where))
    return placed
