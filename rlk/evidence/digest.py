"""One hash a step over what the step did, chained to the step before it.

Each part is a SHA-256 over little-endian bytes by ascending sample id, so that engines, ranks and their number do not
enter. Lengths enter, so that a token cannot move between two samples unseen.
"""

from __future__ import annotations

import hashlib

import numpy as np

from rlk.evidence.arrays import BatchArrays
from rlk.evidence.documents import canonical
from rlk.evidence.samples import Samples
from rlk.evidence.schemas import Fingerprints, TrajectoryLine

START = "0" * 64  # what the first step is chained to


def trajectory_line(
    step: int, samples: Samples, batch: BatchArrays, weights: Fingerprints, previous: str
) -> TrajectoryLine:
    """The line of one step. `weights` is the version that the step made, `previous` the digest before (or START)."""
    order = np.argsort(batch.sample_id, kind="stable")
    lengths = (samples.sample_id, samples.prompt_len, samples.response_len)
    parts = {
        "tokens": _sha(*lengths, samples.prompt_tokens, samples.tokens),
        "logprobs": _sha(samples.logprobs),
        "rewards": _sha(batch.sample_id[order], batch.reward[order]),
        "weights": hashlib.sha256(canonical(weights.trainer)).hexdigest(),
    }
    digest = hashlib.sha256("\n".join((previous, *parts.values())).encode()).hexdigest()
    return TrajectoryLine(step=step, digest=digest, **parts)


def _sha(*arrays: np.ndarray) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return found.hexdigest()
