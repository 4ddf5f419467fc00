"""The negative control: with ordinary operators the same cell must mismatch, or the others' equality means nothing.

Once more with engines that share out query rows and pages: ordinary attention then runs over gathered pages too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.consistency.conftest import CellRun, Sessions
from tests.plugin import ROOT, cells

pytestmark = pytest.mark.cpu

CELL = "tp2_rtp4-cp4-t0.7-p0.95-koff"
ENGINES: dict[str, dict[str, Any]] = {CELL: {}, "tp2_rtp2-cp4-rcp2-t0.7-p0.95-koff": {"rollout_tp": 2, "rollout_cp": 2}}
"""What is changed of the cell's engines."""


@pytest.fixture(scope="module", params=ENGINES)
def native(request: pytest.FixtureRequest, sessions: Sessions) -> CellRun:
    """The first smoke cell in native mode."""
    (cell,) = [cell for cell in cells("smoke") if cell.id == CELL]
    config = {**cell.config, "mode": "native", **ENGINES[request.param]}
    control = cell.model_copy(update={"id": f"{request.param}-native", "config": config})
    return sessions.run(control, control.plan(ROOT))


def test_ordinary_operators_mismatch(native: CellRun, report: Callable[[CellRun], None]) -> None:
    report(native)
    assert not native.outcome.passed
    assert native.outcome.mismatching_tokens > 0
    assert not native.verdict.check("logprobs_policy").passed


def test_nothing_but_the_logprobs_is_red(native: CellRun) -> None:
    red = {check.name for check in native.verdict.checks if not check.passed}
    allowed = {"logprobs_policy", "logprobs_update", "support"}
    assert red <= allowed, f"the control failed for other reasons: {sorted(red - allowed)}"


def test_failure_names_step_sample_token_and_words(native: CellRun) -> None:
    failure = native.verdict.check("logprobs_policy").failure
    assert failure is not None
    assert None not in (failure.step, failure.sample, failure.token_index, failure.token_id)
    assert failure.left is not None
    assert failure.right is not None
    assert failure.left.word != failure.right.word
