"""One check on a run that stands in memory alone: a millisecond, so that each edge of a rule can have its own case."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from rlk.evidence.arrays import BatchArrays, OracleArrays, RolloutArrays, TrainArrays
from rlk.evidence.checks.registry import PROBE_CHECKS, RUN_CHECKS, STEP_CHECKS, VERIFY_CHECKS
from rlk.evidence.checks.tally import Tally
from rlk.evidence.record import StepRecord
from rlk.evidence.schemas import Manifest
from rlk.evidence.verdict import CheckResult
from tests.unit.evidence_builder import Change, Draft, complete, make_draft

STEP = {check.name: check for check in (*STEP_CHECKS, *PROBE_CHECKS)}
RUN = {check.name: check for check in (*RUN_CHECKS, *VERIFY_CHECKS)}


@dataclass(frozen=True)
class Case:
    """A check, what is changed before or after the counts follow, and what the check then says; None: it is green."""

    check: str
    name: str
    says: str | None
    before: Change | None = None
    after: Change | None = None
    step: int = 0
    options: dict[str, Any] = field(default_factory=dict)


def cases(found: list[Case]) -> pytest.MarkDecorator:
    """Parametrise a test over cases."""
    return pytest.mark.parametrize("case", found, ids=[f"{case.check}-{case.name}" for case in found])


def assert_said(case: Case) -> CheckResult:
    """The check is green, or red with these words."""
    result = judged(case)
    if case.says is None:
        assert result.passed, result.message
    else:
        assert not result.passed
        assert re.search(case.says, result.message), result.message
    return result


def judged(case: Case) -> CheckResult:
    """What the check says of the run."""
    draft = complete(make_draft(**case.options), case.before, case.after)
    run: Any = held(draft)
    if case.check in RUN:
        one = RUN[case.check]
        tally = Tally(one.name, one.compared)
        one.function(run, tally)
        return tally.result()
    other = STEP[case.check]
    tally = Tally(other.name, other.compared)
    other.function(run, step_of(draft, case.step), tally)
    return tally.result()


def step_of(draft: Draft, step: int) -> StepRecord:
    """One step of a draft."""
    arrays = draft.steps[step]
    rollouts = tuple(RolloutArrays(**columns) for columns in arrays.rollouts)
    trains = tuple(TrainArrays(**columns) for columns in arrays.trains)
    return StepRecord(
        step, draft.plan, rollouts, trains, BatchArrays(**arrays.batch), lambda: tuple(draft.probes[step])
    )


def held(draft: Draft) -> SimpleNamespace:
    """What checks read of a Record beside the arrays of a step."""
    manifest = Manifest(**draft.manifest)

    def one(lines: list[Any]) -> Callable[[int], Any]:
        return lambda step: next(line for line in lines if line.step == step)

    return SimpleNamespace(
        plan=draft.plan, manifest=manifest, ray=draft.ray, metrics=tuple(draft.metrics),
        trajectory=tuple(draft.trajectory), fingerprints=tuple(draft.fingerprints), metrics_of=one(draft.metrics),
        trajectory_of=one(draft.trajectory), update=one(draft.updates),
        oracle=lambda step: OracleArrays(**draft.steps[step].oracle),
        train_readback=lambda: {f"train-{i:02d}": said for i, said in enumerate(manifest.readback.train)},
        engine_readback=lambda: {
            f"engine-{e:02d}-{r:02d}": said
            for e, ranks in enumerate(manifest.readback.engines) for r, said in enumerate(ranks)
        },
    )  # fmt: skip
