"""The independent oracle's arithmetic: which tokens are looked at, and the sampling rules in float64.

Equal bits show that two engines agree, not that they are right: a mistake made alike on both sides stays equal. So for
a few tokens of every step the log-probability is computed once more by someone else's model in float64, and the rules
of sampling are written here once more, from docs/numerics.md and not from the kernels, with which nothing is shared.

The engines' logits are bf16 results of bf16 operands, the oracle's are float64. They differ by the rounding that the
program declares, and that error decides what the comparison may claim: `LOGIT_ERROR` for one logit, in units of
2^-8 of the row's largest logit (bf16 keeps 8 bits), measured on the tiny model, see docs/evidence.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from rlk.plan.sampling import Sampling

Row = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
LOGIT_ERROR = 16.0
"""Largest error of one logit that is allowed, in units of 2^-8 * max |x| of its row; it decides about supports.
Measured on 1376 response tokens of the tiny model: 9.04 at most, 1.26 root mean square of the rows' largest."""
LOGPROB_ERROR = 12.0
"""Largest error of a log-probability over one fixed support, in the same units, times (1 - probability) / T.
Measured on the same tokens: 4.84 at most, .58 root mean square."""
_LEAST_SHARE = 0.01
"""What 1 - probability is taken to be at least: an almost certain token has errors of its own."""
_WORD = 2**32 - 1
SAMPLES = 4
"""Samples looked at in a step; more where a mix has more settings."""
SHORT = 1024
"""Tokens of a response that are looked at, but of one response a step, which may be of any length."""


@dataclass(frozen=True)
class Expected:
    """What the oracle says of one token.

    `logprob` follows from its own logits; `least` and `most` are the log-probabilities over the largest and the
    smallest support that logits within the allowed error could have (both are `logprob` where nothing is truncated).
    `scale` is the largest magnitude of a logit. `reachable`: some logits within the error keep the token in the
    support. `below` and `through` are the kept shares of the ids before the token, and of those up to it.
    """

    logprob: float
    least: float
    most: float
    scale: float
    reachable: bool
    below: float
    through: float


def logit_error(scale: float) -> float:
    """How far a logit may be off, for a row whose largest magnitude is `scale`."""
    return LOGIT_ERROR * scale / 256


def tolerance(scale: float, least: float, temperature: float) -> float:
    """How far beyond `least` and `most` a log-probability may lie.

    The derivative of log p by the logits is (1 - p) / T for the token's own, and -p_j / T for the others, whose sum is
    the same: a certain token's log-probability hardly moves.
    """
    return LOGPROB_ERROR * scale / 256 * max(-math.expm1(least), _LEAST_SHARE) / (temperature or 1.0)


def share_tolerance(scale: float, least: float, most: float, share: float, temperature: float) -> float:
    """How far a kept share may be off: by the logits on either side of it, and by what a changed support weighs."""
    moved = LOGPROB_ERROR * scale / 256 * max(share * (1 - share), _LEAST_SHARE) / (temperature or 1.0)
    return moved + math.expm1(min(most - least, 1.0))


def uniform(seed: int, sample: int, position: int) -> float:
    """The number in [0, 1) that draws a token: two words of Philox4x32-10 (Salmon et al., 2011)."""
    counter = [position & _WORD, sample & _WORD, sample >> 32 & _WORD, 0]
    key = [seed & _WORD, seed >> 32 & _WORD]
    for _ in range(10):
        first, third = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [third >> 32 ^ counter[1] ^ key[0], third & _WORD, first >> 32 ^ counter[3] ^ key[1], first & _WORD]
        key = [key[0] + 0x9E3779B9 & _WORD, key[1] + 0xBB67AE85 & _WORD]
    return (counter[0] * 2**32 + counter[1]) / 2**64


def looked_at(step: int, responses: Sequence[Sequence[float]], settings: int) -> list[tuple[int, int]]:
    """The (row, position in the response) pairs of a step, by row; rows are its samples by ascending id.

    responses: the rollout's log-probabilities of each row. `settings` is how many samplings the batch cycles through:
    every one of them is looked at. Rows change with the step and lie in different prompts where they can. Of a row the
    least probable token is taken, which says most about temperature and truncation, and one whose place changes with
    step and row. Of one row that may be any token; of the others one of the first `SHORT`, since a look costs a float64
    pass over all tokens before it.
    """
    rounds = max(1, len(responses) // settings)
    wanted = max(SAMPLES, settings)
    stride = max(1, rounds // -(-wanted // settings))
    found: set[tuple[int, int]] = set()
    for j in range(wanted):
        again, setting = divmod(j, settings)
        row = (setting + settings * ((step + setting + again * stride) % rounds)) % len(responses)
        values = responses[row] if j == 0 else responses[row][:SHORT]
        if len(values):
            lowest = min(range(len(values)), key=lambda i: (not math.isnan(values[i]), values[i], i))
            found |= {(row, lowest), (row, (step + row) % len(values))}
    return sorted(found)


def expect(logits: Sequence[float] | Row, token: int, sampling: Sampling) -> Expected:
    """What the rules of docs/numerics.md give for one row of float64 logits over the real vocabulary."""
    row = np.asarray(logits, np.float64)
    scale = float(np.abs(row).max())
    error, own = logit_error(scale), float(row[token])
    if sampling.greedy:
        logprob = own - _log_sum(row, 1.0)
        return Expected(logprob, logprob, logprob, scale, own + 2 * error >= row.max(), 0.0, 1.0)
    heat = sampling.temperature
    kept = _support(row, sampling, 0.0)
    surely, maybe = (_support(row, sampling, shift) for shift in (-error, error))

    def over(support: Mask) -> float:
        return own / heat - _log_sum(row[support | (np.arange(len(row)) == token)], heat)

    shares = np.where(kept, np.exp(row / heat - _log_sum(row[kept], heat)), 0.0)
    below, through = (float(shares[:end].sum()) for end in (token, token + 1))
    return Expected(over(kept), over(maybe), over(surely), scale, bool(maybe[token]), below, through)


def _support(row: Row, sampling: Sampling, error: float) -> Mask:
    """Top-k, then top-p. With an error, the tokens that logits wrong by as much may keep (error > 0), or that they
    keep in any case (error < 0)."""
    ranked = np.argsort(-row, kind="stable")  # ties by the lower id
    ahead = _ahead(-row[ranked], error)
    limit = sampling.top_k if sampling.top_k > 0 else len(row)
    within = ahead - (error < 0) < limit  # the first places, since `ahead` ascends
    masses = np.exp((row[ranked] - row[ranked[0]]) / sampling.temperature)
    sums = np.concatenate([[0.0], np.cumsum(masses)])
    total = sums[np.count_nonzero(within)]
    # What is ahead has its least share where all of it lost an error and the rest gained one.
    favour = math.exp(min(2 * error / sampling.temperature, 700.0))
    front = sums[ahead] - np.where(np.arange(len(row)) < ahead, masses, 0.0)
    if sampling.top_p != 1.0:
        within &= front < sampling.top_p * (front + (total - front) * favour)
    kept = np.zeros(len(row), np.bool_)
    kept[ranked[within]] = True
    return kept


def _ahead(descending: Row, error: float) -> npt.NDArray[np.int64]:
    """For each place how many places rank before it: all before; with an error > 0 those that certainly do, with one
    < 0 those that may, itself among them. `descending` holds negated logits, ascending."""
    if not error:
        return np.arange(len(descending))
    side: Literal["left", "right"] = "left" if error > 0 else "right"
    return np.searchsorted(descending, descending - 2 * error, side).astype(np.int64)


def _log_sum(values: Row, heat: float) -> float:
    """log of the sum of exp(value / heat)."""
    top = float(values.max())
    return top / heat + math.log(np.exp((values - top) / heat).sum())
