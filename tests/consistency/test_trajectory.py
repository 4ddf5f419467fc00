"""A run's trajectory does not know how its work was scheduled: not the micro-batch budget, nor the number of engines,
the size of a chunk or a preemption. Every hash of every step is the same, and each of these events did happen.

Three runs of one seed in one session. `plain` has two engines, all samples of a step in few micro-batches, and pages
for all. `alone` has one engine and a budget of one token, so that each sample is a micro-batch of its own. `pressed`
has 17 tokens a step, which cuts most prompts, and pages for a fraction of its requests, so that some are thrown out
and begin again. The twin is another seed, which draws other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rlk.plan.cells import Cell
from rlk.plan.config import RunConfig
from rlk.plan.derive import Plan, derive
from rlk.plan.profile import load_profile
from rlk.plan.shape import read_shape
from tests.consistency.conftest import CellRun, Sessions
from tests.plugin import ROOT

pytestmark = pytest.mark.cpu

PAGES = 14  # two sequences of 128 tokens take 16


@dataclass(frozen=True)
class Runs:
    plain: CellRun
    alone: CellRun
    pressed: CellRun
    other_seed: CellRun


def _plan(engine: dict[str, int], **options: object) -> Plan:
    profile = load_profile("tiny-cpu", ROOT).limited(engine)
    said = {**profile.defaults, "tp": 2, "rollout_tp": 2, "mix": "0.7/0.95,1.3/0.99/20,0,1", **options}
    return derive(RunConfig(**said), profile, read_shape(profile.model))


@pytest.fixture(scope="module")
def runs(sessions: Sessions) -> Runs:
    def run(plan: Plan) -> CellRun:
        cell = Cell(id=plan.cell, sentence="Made by a test, with another schedule.", config={}, timeout_s=300)
        return sessions.run(cell, plan)

    plain = _plan({})
    page = plain.profile.engine.block_size * plain.shape.kv_bytes(plain.rollout.tp, plain.rollout.cp)
    return Runs(
        run(plain),
        run(_plan({"max_engines": 1}, max_tokens_per_gpu=1)),
        run(_plan({"max_num_batched_tokens": 17, "kv_cache_bytes": PAGES * page})),
        run(_plan({}, seed=1)),
    )


def test_every_schedule_passes(runs: Runs) -> None:
    assert [run.outcome.errors for run in (runs.plain, runs.alone, runs.pressed, runs.other_seed)] == [()] * 4


def test_no_schedule_moves_the_trajectory(runs: Runs) -> None:
    assert runs.alone.record.trajectory == runs.plain.record.trajectory
    assert runs.pressed.record.trajectory == runs.plain.record.trajectory


def test_another_seed_moves_the_trajectory(runs: Runs) -> None:
    assert runs.other_seed.outcome.digest != runs.plain.outcome.digest


def test_one_engine_and_two_made_the_tokens(runs: Runs) -> None:
    engines = [len(run.record.manifest.readback.engines) for run in (runs.plain, runs.alone, runs.pressed)]
    assert engines == [2, 1, 2]


def test_samples_were_packed_and_were_alone(runs: Runs) -> None:
    """A micro-batch holds samples up to its budget, and never cuts one."""
    budgets = [run.record.manifest.readback.train[0].token_budget for run in (runs.plain, runs.alone)]
    assert budgets == [256, 1]
    samples = [runs.plain.record.step(step).samples for step in range(runs.plain.plan.config.steps)]
    longest = max(int((s.prompt_len + s.response_len).max()) for s in samples)
    assert 2 * longest < 4 * budgets[0], "two of the longest samples fit the budget of four ranks"


def test_requests_were_cut_and_thrown_out(runs: Runs) -> None:
    events = [one for metrics in runs.pressed.record.metrics for one in metrics.generated]
    assert sum(one.preemptions for one in events) > 0
    plain = [one for metrics in runs.plain.record.metrics for one in metrics.generated]
    assert sum(one.preemptions for one in plain) == 0
    assert sum(one.chunks for one in events) > sum(one.chunks for one in plain)
