"""Eight Hopper GPUs and the Qwen3-8B shape: the cells of matrices/h100.yaml, the documented command lines first.

`make h100` runs the same cells with their native arms and records what they cost. Each cell has its own limit, since a
machine of this kind is rarely there for long.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from rlk.driver.processes import time_limit
from tests.consistency.conftest import CellRun, Sessions
from tests.plugin import ROOT, cells

pytestmark = pytest.mark.h100


@pytest.fixture(scope="module", params=cells("h100"), ids=lambda cell: cell.id)
def run(request: pytest.FixtureRequest, sessions: Sessions) -> CellRun:
    """The run of each cell, made once."""
    cell = request.param
    with time_limit(cell.timeout_s, cell.id):
        return sessions.run(cell, cell.plan(ROOT))


@pytest.fixture(autouse=True)
def _leave_properties(run: CellRun, report: Callable[[CellRun], None]) -> None:
    report(run)


def test_every_check_of_the_run_passes(run: CellRun) -> None:
    assert run.outcome.passed, "\n".join(run.outcome.errors)
    assert all(check.count > 0 for check in run.verdict.checks)


def test_rollout_and_policy_logprobs_are_equal_words(run: CellRun) -> None:
    compared = 0
    for step in range(run.plan.config.steps):
        found = run.record.step(step)
        left, right = found.matched
        rollout, policy = (a.view(np.int32) for a in (found.samples.logprobs[left], found.scored[0].logprob[right]))
        assert len(rollout) == len(found.samples.tokens), "a token was not scored"
        assert np.array_equal(rollout, policy), f"step {step}: {(rollout != policy).sum()} of {len(rollout)} differ"
        compared += len(rollout)
    assert compared == run.outcome.tokens_compared > 0


def test_gradients_move_the_weights_on_both_sides(run: CellRun) -> None:
    assert all(metrics.grad_norm > 0 for metrics in run.record.metrics)
    for before, after in pairwise(run.record.fingerprints):
        assert before.trainer != after.trainer
        assert all(engine == after.trainer for engine in after.engines)
