"""Is every planned sample there once, and every token of it scored once?"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rlk.evidence.arrays import I64, LENGTH, STOP, Arrays, length_problem
from rlk.evidence.checks.tally import Tally, token_place
from rlk.evidence.record import Record, StepRecord
from rlk.evidence.samples import Samples
from rlk.evidence.verdict import Failure, Side


def lengths(run: Record, step: StepRecord, tally: Tally) -> None:
    """The columns of each array file fit each other: as many log-probs as tokens, as many tokens as lengths say."""
    named: dict[str, Arrays] = {f"rollout-{engine:02d}": arrays for engine, arrays in enumerate(step.rollouts)}
    named |= {f"train-{rank:02d}": arrays for rank, arrays in enumerate(step.trains)}
    for name, arrays in {**named, "batch": step.batch}.items():
        tally.add()
        if problem := length_problem(arrays):
            tally.fail_at(Failure(where=name, step=step.step), f"{name}: {problem}")


def sample_coverage(run: Record, step: StepRecord, tally: Tally) -> None:
    """Sample ids step * batch + index: each planned one exactly once over all engines, and once in the batch."""
    size = run.plan.samples_per_step
    planned = np.arange(step.step * size, (step.step + 1) * size, dtype=np.int64)
    tally.add(size)
    for where, found in (("engines", step.samples.sample_id), ("batch", step.batch.sample_id)):
        for sample, problem in _odd(planned, found):
            tally.fail_at(Failure(where=where, step=step.step, sample=sample), f"{problem} in the {where}")


def token_coverage(run: Record, step: StepRecord, tally: Tally) -> None:
    """The CP ranks of each TP rank score every response token exactly once, and score the token that was sampled."""
    samples = step.samples
    for tp_rank, scored in enumerate(step.scored):
        where = f"TP rank {tp_rank}"
        tally.add(len(samples.key))
        for key, problem in _odd(samples.key, scored.key):
            tally.fail_at(token_place(step.step, where, key), f"{problem} on {where}")
        _, left, right = np.intersect1d(samples.key, scored.key, return_indices=True)
        wrong = np.flatnonzero(samples.tokens[left] != scored.token[right])
        if len(wrong):
            mine, theirs = left[wrong[0]], right[wrong[0]]
            sampled, seen = samples.tokens[mine], scored.token[theirs]
            sides = Side(source="rollout", value=str(sampled)), Side(source="train", value=str(seen))
            place = token_place(step.step, where, samples.key[mine], sampled, *sides)
            tally.fail_at(place, f"{where} scored id {seen}, the engine sampled id {sampled}", len(wrong))


def generated_counts(run: Record, step: StepRecord, tally: Tally) -> None:
    """What each engine counted while it generated is what was recorded of it."""
    counted = run.metrics_of(step.step).generated
    where = f"step {step.step} engines"
    tally.equal(where, "number", len(counted), len(step.rollouts), step.step)
    for engine, (said, arrays) in enumerate(zip(counted, step.rollouts, strict=False)):
        where = f"step {step.step} engine {engine}"
        tally.equal(where, "generated samples", said.samples, len(arrays.sample_id), step.step)
        tally.equal(where, "generated tokens", said.tokens, len(arrays.tokens), step.step)


def token_ids(run: Record, step: StepRecord, tally: Tally) -> None:
    """Every prompt and response token is an id of the real vocabulary, and every response token is trained."""
    samples, size = step.samples, run.plan.shape.vocab_size
    for name, tokens in (("prompt", samples.prompt_tokens), ("response", samples.tokens)):
        tally.add(len(tokens))
        wrong = np.flatnonzero((tokens < 0) | (tokens >= size))
        if len(wrong):
            place = Failure(where=name, step=step.step, token_id=int(tokens[wrong[0]]))
            tally.fail_at(place, f"{name} token outside the real vocabulary of {size} ids", len(wrong))
    masked = np.flatnonzero(samples.mask != 1)
    if len(masked):
        at = masked[0]
        place = token_place(step.step, "mask", samples.key[at], samples.tokens[at])
        tally.fail_at(place, f"mask is {samples.mask[at]}, expected 1", len(masked))


def prompts(run: Record, step: StepRecord, tally: Tally) -> None:
    """Prompts have an allowed length, are one in each group, and no more of one was cached than there is."""
    samples, group = step.samples, run.plan.samples_per_prompt
    first = step.step * run.plan.samples_per_step
    heads: dict[int, int] = {}
    for row, sample in enumerate(samples.sample_id.tolist()):
        tally.add()
        head = heads.setdefault((sample - first) // group, row)
        if problem := _prompt_problem(samples, row, head, run.plan.profile.max_prompt_len):
            tally.fail_at(Failure(where="prompt", step=step.step, sample=sample), problem)


def responses(run: Record, step: StepRecord, tally: Tally) -> None:
    """Each response ends for the reason it states: at its limit, or at the only id it holds that ends one."""
    ends = np.array(run.plan.stop_ids, np.int64)
    for row, sample in enumerate(step.samples.sample_id.tolist()):
        tally.add()
        if problem := _response_problem(step.samples, row, run.plan.config.max_response_len, ends):
            tally.fail_at(Failure(where="response", step=step.step, sample=sample), problem)


def _odd(planned: I64, found: I64) -> Iterable[tuple[int, str]]:
    """Every planned entry that is missing, every one that is there twice or was never planned."""
    for entry in np.setdiff1d(planned, found).tolist():
        yield entry, "missing"
    known, times = np.unique(found, return_counts=True)
    for entry in known[times > 1].tolist():
        yield entry, "there more than once"
    for entry in np.setdiff1d(known, planned).tolist():
        yield entry, "there but not expected"


def _prompt_problem(samples: Samples, row: int, head: int, limit: int) -> str | None:
    prompt = samples.prompt(row)
    if not 1 <= len(prompt) <= limit:
        return f"has {len(prompt)} prompt tokens, 1 to {limit} are allowed"
    if samples.prompt_index[row] != samples.prompt_index[head] or not np.array_equal(prompt, samples.prompt(head)):
        return f"has another prompt than sample {samples.sample_id[head]} of its group"
    if not 0 <= samples.cached_tokens[row] <= len(prompt):
        return f"{samples.cached_tokens[row]} prompt tokens were cached, the prompt has {len(prompt)}"
    return None


def _response_problem(samples: Samples, row: int, limit: int, ends: I64) -> str | None:
    response, reason = samples.tokens[samples.response(row)], int(samples.finish_reason[row])
    if not 1 <= len(response) <= limit:
        return f"has {len(response)} response tokens, 1 to {limit} are allowed"
    stops = np.flatnonzero(np.isin(response, ends))
    if reason == STOP and (len(stops) != 1 or stops[0] != len(response) - 1):
        return f"stopped, but end-of-sequence ids stand at {stops.tolist()} of {len(response)} tokens"
    if reason == LENGTH and (len(stops) or len(response) != limit):
        return f"ended by length at {len(response)} of {limit} tokens, with end-of-sequence ids at {stops.tolist()}"
    return None if reason in (STOP, LENGTH) else f"finish_reason is {reason}, 0 (stop) or 1 (length) is known"
