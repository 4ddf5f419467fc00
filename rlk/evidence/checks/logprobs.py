"""The claim itself: rollout and trainer have the same log-probability words, and they are log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from rlk.evidence import bits
from rlk.evidence.arrays import F32, I64
from rlk.evidence.checks.causes import likely_cause
from rlk.evidence.checks.probe import located
from rlk.evidence.checks.tally import Tally, token_place
from rlk.evidence.record import Record, StepRecord
from rlk.evidence.verdict import Failure, Side

# A run of at least this many exact zeros at the end of a response looks like padding: a list of log-probs that was
# shorter than its tokens. An exact 0 says that every other token has less than 2^-40 of the mass, a gap of 27.7 * T
# in logits, so a low temperature gives honest zeros; from this temperature on, two in a row do not happen.
_ZERO_RUN = 2
_ZERO_TEMPERATURE = 0.7


def logprobs_policy(run: Record, step: StepRecord, tally: Tally) -> None:
    """Every rollout log-prob has the word of the recomputed policy."""
    _equal(run, step, tally, "policy", "logprob")


def logprobs_update(run: Record, step: StepRecord, tally: Tally) -> None:
    """Every rollout log-prob has the word of the forward that was differentiated."""
    _equal(run, step, tally, "update", "update_logprob")


def logprobs_nan(run: Record, step: StepRecord, tally: Tally) -> None:
    """No log-prob of any side is a NaN."""
    _none(step, tally, bits.is_nan, "is a NaN")


def logprobs_inf(run: Record, step: StepRecord, tally: Tally) -> None:
    """No log-prob of any side is infinite."""
    _none(step, tally, bits.is_inf, "is infinite")


def logprobs_positive(run: Record, step: StepRecord, tally: Tally) -> None:
    """No log-prob of any side is above zero."""
    _none(step, tally, bits.is_positive, "is above zero")


def logprobs_negative_zero(run: Record, step: StepRecord, tally: Tally) -> None:
    """No log-prob of any side is -0.0: the program adds +0.0 at its end, so a sign tells of another program."""
    _none(step, tally, bits.is_negative_zero, "is a negative zero")


def logprobs_zero_tail(run: Record, step: StepRecord, tally: Tally) -> None:
    """No response with a full support ends in a run of exact zeros."""
    samples, zero = step.samples, bits.is_zero(step.samples.logprobs)
    full = (samples.temperature >= _ZERO_TEMPERATURE) & (samples.top_p == 1.0) & (samples.top_k == -1)
    tally.add(len(full))
    for row in np.flatnonzero(full).tolist():
        tail = zero[samples.response(row)][::-1]
        length = len(tail) if tail.all() else int(tail.argmin())
        if length >= _ZERO_RUN:
            place = token_place(step.step, "rollout", samples.key[samples.response(row)][-length])
            heat = samples.temperature[row].item()
            problem = f"the last {length} log-probs are exactly 0 at temperature {heat} with the full support"
            tally.fail_at(place, f"{problem}, which looks like padding")


def support(run: Record, step: StepRecord, tally: Tally) -> None:
    """Every sampled token lies in the support that the trainer computes: a token outside is never repaired."""
    for tp_rank, scored in enumerate(step.scored):
        tally.add(len(scored.key))
        outside = np.flatnonzero(scored.in_support != 1)
        if len(outside):
            at, where = outside[0], f"TP rank {tp_rank}"
            place = token_place(step.step, where, scored.key[at], scored.token[at])
            tally.fail_at(place, f"outside the support of {where}", len(outside))


def tp_replicas(run: Record, step: StepRecord, tally: Tally) -> None:
    """The TP ranks of one CP rank hold the same rows, byte for byte."""
    cp = run.plan.train.cp
    for rank, arrays in enumerate(step.trains):
        first = step.trains[rank % cp].columns()
        tally.add(len(arrays.sample_id))
        for name, column in arrays.columns().items():
            if column.tobytes() == first[name].tobytes():
                continue
            place = Failure(where=f"train-{rank:02d}: {name}", step=step.step)
            tally.fail_at(place, f"{name}: TP ranks 0 and {rank // cp} of CP rank {rank % cp} differ")


def mismatching(step: StepRecord) -> tuple[int, int]:
    """Tokens compared, and those whose rollout word differs from the policy's or from the update's."""
    left, right = step.matched
    rollout, policy = step.samples.logprobs[left], step.scored[0]
    wrong = bits.differing(rollout, policy.logprob[right]) | bits.differing(rollout, policy.update_logprob[right])
    return len(left), int(np.count_nonzero(wrong))


def _equal(run: Record, step: StepRecord, tally: Tally, side: str, column: str) -> None:
    samples, (left_at, right_at) = step.samples, step.matched
    left, right = samples.logprobs[left_at], getattr(step.scored[0], column)[right_at]
    tally.add(len(left))
    difference = bits.first_difference(left, right)
    if difference is None:
        return
    at = left_at[difference.position]
    sides = _side("rollout", difference.left), _side(side, difference.right)
    place = token_place(step.step, f"rollout and {side}", samples.key[at], samples.tokens[at], *sides)
    rows = samples.row[left_at]
    cause = likely_cause(left, right, samples.temperature[rows], (samples.top_p[rows] < 1) | (samples.top_k[rows] > 0))
    said = (f"{_say(sides[0])}, {_say(sides[1])}", cause, located(run, step))
    tally.fail_at(place, "; ".join(part for part in said if part), difference.count)


def _none(step: StepRecord, tally: Tally, test: Callable[[F32], bits.Flags], what: str) -> None:
    for source, key, token, values in _all_values(step):
        tally.add(len(values))
        wrong = np.flatnonzero(test(values))
        if len(wrong):
            at, side = wrong[0], _side(source, values[wrong[0]])
            place = token_place(step.step, source, key[at], token[at], side)
            tally.fail_at(place, f"{_say(side)} {what}", len(wrong))


def _all_values(step: StepRecord) -> Iterator[tuple[str, I64, np.ndarray, F32]]:
    """Every log-prob column of the step: who says it, keys, token ids, values."""
    yield "rollout", step.samples.key, step.samples.tokens, step.samples.logprobs
    for tp_rank, scored in enumerate(step.scored):
        for source, column in (("policy", "logprob"), ("update", "update_logprob"), ("reference", "ref_logprob")):
            yield f"{source} of TP rank {tp_rank}", scored.key, scored.token, getattr(scored, column)


def _side(source: str, value: np.float32) -> Side:
    return Side(source=source, value=bits.show(value), word=bits.hex_word(value))


def _say(side: Side) -> str:
    return f"{side.source} {side.value} {side.word}"
