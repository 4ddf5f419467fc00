"""The samples of one step, merged over engines, and its scored tokens, joined over CP ranks: both in one order.

A token is known by its key, sample_id * 2^24 + index, so that two sides are matched by who the token is and never by
where it stands in a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlk.evidence.arrays import F32, F64, I32, I64, U8, RolloutArrays, TrainArrays, length_problem
from rlk.evidence.errors import EvidenceError

_INDEX_BITS = 24


@dataclass(frozen=True)
class Samples:
    """All samples of a step by ascending id. Columns as in RolloutArrays; `engine` says who generated each."""

    engine: I64
    sample_id: I64
    prompt_index: I64
    prompt_len: I32
    response_len: I32
    prompt_tokens: I32
    tokens: I32
    mask: U8
    logprobs: F32
    temperature: F64
    top_p: F64
    top_k: I64
    finish_reason: U8
    weight_version: I64
    cached_tokens: I64

    @cached_property
    def response_start(self) -> I64:
        """Where each sample's response begins in the ragged columns; i64[N]."""
        return np.cumsum(self.response_len, dtype=np.int64) - self.response_len

    @cached_property
    def prompt_start(self) -> I64:
        """Where each sample's prompt begins in `prompt_tokens`; i64[N]."""
        return np.cumsum(self.prompt_len, dtype=np.int64) - self.prompt_len

    @cached_property
    def row(self) -> I64:
        """For each response token the row of its sample; i64[R]."""
        return np.repeat(np.arange(len(self.sample_id)), self.response_len)

    @cached_property
    def index(self) -> I64:
        """For each response token its position in the response; i64[R]."""
        return np.arange(len(self.tokens)) - self.response_start[self.row]

    @cached_property
    def key(self) -> I64:
        """For each response token its key; i64[R], ascending unless a sample id repeats."""
        return token_keys(self.sample_id[self.row], self.index)

    def prompt(self, row: int) -> I32:
        """Prompt tokens of one sample."""
        start = int(self.prompt_start[row])
        return self.prompt_tokens[start : start + int(self.prompt_len[row])]

    def response(self, row: int) -> slice:
        """Where one sample's response lies in the ragged columns."""
        start = int(self.response_start[row])
        return slice(start, start + int(self.response_len[row]))

    def logprobs_by_row(self) -> list[list[float]]:
        """Log-probabilities of each sample's response."""
        return [self.logprobs[self.response(row)].tolist() for row in range(len(self.sample_id))]


@dataclass(frozen=True)
class Scored:
    """The tokens that the CP ranks of one TP rank scored together, by ascending key; columns as in TrainArrays."""

    key: I64
    sample_id: I64
    index: I32
    token: I32
    logprob: F32
    update_logprob: F32
    ref_logprob: F32
    in_support: U8


def merge(rollouts: Sequence[RolloutArrays]) -> Samples:
    """The samples of all engines, by id. Raises EvidenceError where a file's columns do not fit each other."""
    for engine, arrays in enumerate(rollouts):
        if problem := length_problem(arrays):
            raise EvidenceError(f"rollout of engine {engine}: {problem}")
    joined = _join([arrays.columns() for arrays in rollouts])
    owner = np.concatenate([np.full(len(a.sample_id), number, np.int64) for number, a in enumerate(rollouts)])
    order = np.argsort(joined["sample_id"], kind="stable")
    prompt, response = (_ragged(joined[name], order) for name in ("prompt_len", "response_len"))
    ragged = {"prompt_tokens": prompt, "tokens": response, "mask": response, "logprobs": response}
    columns = {name: column[ragged.get(name, order)] for name, column in joined.items()}
    return Samples(engine=owner[order], **columns)


def join(trains: Sequence[TrainArrays]) -> Scored:
    """The rows of all given ranks, by key. Raises EvidenceError where a file's columns do not fit each other."""
    for arrays in trains:
        if problem := length_problem(arrays):
            raise EvidenceError(f"scored tokens: {problem}")
    joined = _join([arrays.columns() for arrays in trains])
    key = token_keys(joined["sample_id"], joined["index"])
    order = np.argsort(key, kind="stable")
    return Scored(key=key[order], **{name: column[order] for name, column in joined.items()})


def token_keys(sample_id: I64, index: NDArray[np.integer[Any]]) -> I64:
    """Key of each token. Raises EvidenceError for an id or index that has none."""
    bad = (index < 0) | (index >= 1 << _INDEX_BITS) | (sample_id < 0) | (sample_id >= 1 << (62 - _INDEX_BITS))
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise EvidenceError(f"sample {sample_id[at]} index {index[at]}: not a sample id and a position in a response")
    return (sample_id << _INDEX_BITS) + index.astype(np.int64)


def token_of(key: int) -> tuple[int, int]:
    """Sample id and index of a key."""
    return key >> _INDEX_BITS, key & ((1 << _INDEX_BITS) - 1)


def _join(parts: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _ragged(lengths: I32, order: I64) -> I64:
    """Where the entries of a ragged column come from when its samples are put in `order`."""
    wide = lengths.astype(np.int64)
    start = np.cumsum(wide) - wide
    taken = wide[order]
    offset = np.cumsum(taken) - taken
    return np.repeat(start[order] - offset, taken) + np.arange(taken.sum())
