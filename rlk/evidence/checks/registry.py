"""The list of checks: name, function, what it counts. A verdict has all of them, in this order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlk.evidence.checks import (
    coverage,
    logprobs,
    metrics,
    oracle,
    partition,
    probe,
    processes,
    settings,
    structure,
    trajectory,
    weights,
)
from rlk.evidence.checks.tally import Tally
from rlk.evidence.record import Record, StepRecord

RunFunction = Callable[[Record, Tally], None]
StepFunction = Callable[[Record, StepRecord, Tally], None]
_Function = TypeVar("_Function", RunFunction, StepFunction)


@dataclass(frozen=True)
class Check(Generic[_Function]):
    """One check. `name` is that of its function and never changes; `compared` is what its count counts."""

    function: _Function
    compared: str

    @property
    def name(self) -> str:
        """The stable name."""
        return self.function.__name__


RUN_CHECKS: tuple[Check[RunFunction], ...] = (
    Check(structure.files, "files"),
    Check(structure.schemas, "schemas"),
    Check(structure.status, "fields"),
    Check(structure.plan, "plans"),
    Check(structure.injected, "plans"),
    Check(structure.manifest, "fields"),
    Check(structure.steps, "entries"),
    Check(processes.ray, "actors"),
    Check(processes.processes, "pids"),
    Check(settings.train_settings, "settings"),
    Check(settings.engine_settings, "settings"),
    Check(settings.kernels, "processes"),
    Check(partition.query_partition, "counts"),
    Check(metrics.metrics_finite, "numbers"),
    Check(metrics.logprob_reuse, "flags"),
    Check(metrics.engine_ranks_agree, "steps"),
    Check(weights.tensor_list, "tensors"),
    Check(weights.weights_equal, "tensors"),
    Check(weights.replicas_agree, "versions"),
)

STEP_CHECKS: tuple[Check[StepFunction], ...] = (
    Check(coverage.lengths, "files"),
    Check(coverage.sample_coverage, "samples"),
    Check(coverage.token_coverage, "tokens"),
    Check(coverage.generated_counts, "counts"),
    Check(coverage.token_ids, "tokens"),
    Check(coverage.prompts, "samples"),
    Check(coverage.responses, "samples"),
    Check(settings.sampling_settings, "settings"),
    Check(weights.weight_versions, "samples"),
    Check(weights.optimizer_states, "fields"),
    Check(metrics.metrics_counts, "counts"),
    Check(logprobs.logprobs_policy, "tokens"),
    Check(logprobs.logprobs_update, "tokens"),
    Check(logprobs.logprobs_nan, "values"),
    Check(logprobs.logprobs_inf, "values"),
    Check(logprobs.logprobs_positive, "values"),
    Check(logprobs.logprobs_negative_zero, "values"),
    Check(logprobs.logprobs_zero_tail, "samples"),
    Check(logprobs.support, "tokens"),
    Check(logprobs.tp_replicas, "rows"),
    Check(oracle.oracle, "tokens"),
    Check(trajectory.digest, "hashes"),
)

PROBE_CHECKS: tuple[Check[StepFunction], ...] = (Check(probe.probe, "rows"),)
"""Step checks of a run that was asked to record what every op returned."""

VERIFY_CHECKS: tuple[Check[RunFunction], ...] = (
    Check(metrics.two_steps, "steps"),
    Check(metrics.gradient_nonzero, "steps"),
    Check(metrics.learning_rate, "steps"),
    Check(weights.weights_changed, "tensors"),
)
