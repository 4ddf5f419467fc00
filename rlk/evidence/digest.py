"""One hash a step over what the step did, chained to the step before it.

Each part is a SHA-256 over little-endian bytes by ascending sample id, so that engines, ranks and their number do not
enter. Lengths enter, so that a token cannot move between two samples unseen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlk.evidence.arrays import BatchArrays
from rlk.evidence.documents import canonical
from rlk.evidence.samples import Samples
from rlk.evidence.schemas import Fingerprints, TrajectoryLine, Update

START = "0" * 64  # what the first step is chained to


@dataclass(frozen=True)
class Made:
    """What a step made of the trainer: the optimizer's state and the next version of the weights. `seed` is the key of
    all random numbers: with the counter (sample id, position) it is their whole state."""

    update: Update
    weights: Fingerprints
    seed: int


def trajectory_line(step: int, samples: Samples, batch: BatchArrays, made: Made, previous: str) -> TrajectoryLine:
    """The line of one step; `previous` is the digest before (or START)."""
    order = np.argsort(batch.sample_id, kind="stable")
    update = made.update
    lengths = (samples.sample_id, samples.prompt_len, samples.response_len)
    parts = {
        "tokens": _sha(*lengths, samples.prompt_tokens, samples.tokens),
        "logprobs": _sha(samples.logprobs),
        "rewards": _sha(batch.sample_id[order], batch.reward[order]),
        "advantages": _sha(batch.sample_id[order], batch.advantage[order]),
        "gradients": weights_hash(update.gradients),
        "masters": weights_hash(update.masters),
        "moments": _json({"first": update.first_moments, "second": update.second_moments}),
        "random": _json({"seed": made.seed, "next_sample": int(batch.sample_id.max(initial=-1)) + 1}),
        "weights": weights_hash(made.weights.trainer),
    }
    digest = hashlib.sha256("\n".join((previous, *parts.values())).encode()).hexdigest()
    return TrajectoryLine(step=step, digest=digest, **parts)


def weights_hash(fingerprints: Mapping[str, str]) -> str:
    """One hash over the fingerprints of all tensors, by name."""
    return _json(dict(fingerprints))


def _json(value: object) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def _sha(*arrays: np.ndarray) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return found.hexdigest()
