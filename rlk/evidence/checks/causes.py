"""A word on the classic mistakes, where the numbers of a mismatch fit one. Never part of a verdict."""

from __future__ import annotations

import numpy as np

from rlk.evidence.arrays import F32, F64
from rlk.evidence.bits import Flags

_ENOUGH = 8  # tokens, below which a fit may be chance
_FIT = 1e-3  # relative: far above rounding, far below any of the mistakes


def likely_cause(rollout: F32, trainer: F32, temperature: F64, truncated: Flags) -> str | None:
    """What may explain all the tokens that differ, or None. All arrays have one entry a token compared."""
    usable = (rollout < 0) & (trainer < 0) & np.isfinite(rollout) & np.isfinite(trainer)
    wrong = (rollout != trainer) & usable
    if np.count_nonzero(wrong) < _ENOUGH:
        return None
    left, right = rollout[wrong].astype(np.float64), trainer[wrong].astype(np.float64)
    heat = temperature[wrong]
    if ((heat != 1) & (heat > 0)).all():
        for ratio in (left / right, right / left):
            if (np.abs(ratio / heat - 1) < _FIT).all():
                return "the ratio is the temperature everywhere: one side scaled log-probs instead of logits"
    gap = (left - right) / np.maximum(np.abs(left), np.abs(right))
    for side, larger in (("rollout", gap), ("trainer", -gap)):
        if truncated[wrong].all() and (larger > _FIT).all():
            return f"the {side}'s are larger everywhere: only that side normalised over the kept tokens"
    return None
