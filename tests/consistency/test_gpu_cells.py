"""Every GPU cell: two real training steps and vLLM rollouts on the GPUs that are there, whose ranks share them.

The sizes are those of Qwen3-0.6B with random weights; every batch mixes top-p, top-k, both and neither. All cells ask
for the same samples, so whatever the topology and however many GPUs, there is one trajectory.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from rlk.plan.cells import Cell
from tests.consistency.conftest import CellRun, Sessions
from tests.plugin import ROOT, cells

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def digests() -> dict[str, str | None]:
    """The trajectory's digest of each cell that ran."""
    return {}


@pytest.fixture(scope="module", params=cells("gpu"), ids=lambda cell: cell.id)
def run(request: pytest.FixtureRequest, sessions: Sessions) -> CellRun:
    """The run of each cell, made once."""
    cell: Cell = request.param
    return sessions.run(cell, cell.plan(ROOT))


@pytest.fixture(autouse=True)
def _leave_properties(run: CellRun, report: Callable[[CellRun], None]) -> None:
    report(run)


def test_every_check_passes_on_gpus(run: CellRun) -> None:
    assert run.outcome.passed, "\n".join(run.outcome.errors)
    assert all(check.count > 0 for check in run.verdict.checks)


def test_gpu_logprobs_are_equal_words(run: CellRun) -> None:
    compared = 0
    for step in range(run.plan.config.steps):
        found = run.record.step(step)
        left, right = found.matched
        rollout = found.samples.logprobs[left].view(np.int32)
        policy = found.scored[0].logprob[right].view(np.int32)
        assert np.array_equal(rollout, policy), f"step {step}: {(rollout != policy).sum()} words differ"
        compared += len(rollout)
    assert compared == run.outcome.tokens_compared > 0


def test_gradients_and_exports_change_weights(run: CellRun) -> None:
    for metrics in run.record.metrics:
        assert metrics.nonzero_advantages > 0
        assert metrics.grad_norm > 0
    for before, after in pairwise(run.record.fingerprints):
        assert before.trainer != after.trainer
        assert all(engine == after.trainer for engine in after.engines)


def test_decode_steps_replay_graphs_where_planned(run: CellRun) -> None:
    replays = sum(one.graph_replays for metrics in run.record.metrics for one in metrics.generated)
    assert (replays > 0) == bool(run.plan.graph_sizes)


def test_requests_are_thrown_out_where_pages_are_few(run: CellRun) -> None:
    """The twin of the pressed cell is the same cell without the pressure, which throws nobody out."""
    events = [one for metrics in run.record.metrics for one in metrics.generated]
    assert (sum(one.preemptions for one in events) > 0) == ("kv_cache_bytes" in run.cell.engine)


def test_train_state_leaves_only_when_planned(run: CellRun) -> None:
    for rank in run.record.manifest.readback.train:
        where = {h.name: h.during_rollout for h in rank.holdings}
        assert where["masters"] == where["gradients"] == ("offloaded" if run.plan.offload else "resident")
        assert (rank.freed_bytes > 0) == run.plan.offload


def test_all_cells_share_one_trajectory(run: CellRun, digests: dict[str, str | None]) -> None:
    digests[run.cell.id] = run.outcome.digest
    assert len(set(digests.values())) == 1, digests
