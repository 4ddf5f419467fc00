"""Are the metrics numbers, do they count what the arrays hold, and did every step of a verify really train?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from rlk.evidence.checks.tally import Tally
from rlk.evidence.counts import batch_counts
from rlk.evidence.layout import METRICS
from rlk.evidence.record import Record, StepRecord
from rlk.evidence.schemas import Metrics
from rlk.evidence.verdict import Failure

_LEAST_STEPS = 2  # one step cannot show that the next rollout uses what the step made


def metrics_finite(run: Record, tally: Tally) -> None:
    """Every number of every line is finite."""
    for line in run.metrics:
        for name, value in _numbers(line):
            tally.add()
            if not -float("inf") < value < float("inf"):
                place = Failure(where=f"{METRICS}: {name}", step=line.step)
                tally.fail(f"{METRICS}: step {line.step}: {name} is {value}, expected a finite number", place)


def metrics_counts(run: Record, step: StepRecord, tally: Tally) -> None:
    """The counts, shares and reward figures of the line follow from the arrays of the step."""
    said = run.metrics_of(step.step)
    for name, counted in asdict(batch_counts(step.samples, step.batch)).items():
        tally.equal(f"step {step.step} metrics", name, getattr(said, name), counted, step.step)


def logprob_reuse(run: Record, tally: Tally) -> None:
    """The trainer never used the engine's log-probs: the plan does not ask for it and no step did."""
    tally.equal("plan.json", "use_rollout_logprobs", run.plan.config.use_rollout_logprobs, False)
    for line in run.metrics:
        where = f"{METRICS}: step {line.step}"
        tally.equal(where, "rollout_logprobs_reused", line.rollout_logprobs_reused, False, line.step)


def engine_ranks_agree(run: Record, tally: Tally) -> None:
    """All ranks of each engine returned the same bytes in every step."""
    for line in run.metrics:
        expected = (True,) * run.plan.engines
        where = f"{METRICS}: step {line.step}"
        tally.equal(where, "engine_ranks_agree", line.engine_ranks_agree, expected, line.step)


def two_steps(run: Record, tally: Tally) -> None:
    """At least two steps ran."""
    tally.add(len(run.metrics))
    if len(run.metrics) < _LEAST_STEPS:
        message = f"{METRICS}: {len(run.metrics)} steps, a verify needs {_LEAST_STEPS} or more"
        tally.fail(message, Failure(where=METRICS))


def gradient_nonzero(run: Record, tally: Tally) -> None:
    """Every step has a gradient, and something in the loss that it can come from."""
    for line in run.metrics:
        tally.add()
        where = Failure(where=f"{METRICS}: grad_norm", step=line.step)
        if not line.grad_norm > 0:
            tally.fail(f"{METRICS}: step {line.step}: zero gradient, grad_norm is {line.grad_norm}", where)
        elif not line.nonzero_advantages and not run.plan.config.kl_coef:
            message = "all advantages are zero and there is no KL term, so nothing can make it"
            tally.fail(f"{METRICS}: step {line.step}: grad_norm is {line.grad_norm}, but {message}", where)


def learning_rate(run: Record, tally: Tally) -> None:
    """Every step has a positive learning rate."""
    for line in run.metrics:
        tally.add()
        if not line.lr > 0:
            place = Failure(where=f"{METRICS}: lr", step=line.step)
            tally.fail(f"{METRICS}: step {line.step}: learning rate is {line.lr}, a verify needs > 0", place)


def training_notes(lines: tuple[Metrics, ...]) -> Iterator[str]:
    """What a reader of a green verdict must still know about the data of each step."""
    for line in lines:
        if line.truncated_share:
            yield f"step {line.step}: {100 * line.truncated_share:g} % of the responses were truncated"
        if not line.nonzero_advantages and line.grad_norm > 0:
            yield f"step {line.step}: all advantages were zero, so the gradient came from the KL term alone"


def _numbers(line: Metrics) -> Iterator[tuple[str, float]]:
    for name, value in line.model_dump().items():
        if isinstance(value, float):
            yield name, value
    for name, value in line.seconds.model_dump().items():
        yield f"seconds.{name}", value
