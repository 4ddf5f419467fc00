"""A session makes a run again, byte for byte, after it was reset and after it was moved to another topology and back:
without that, cells could not share processes.

Four runs in one session. The first is of a fresh start. In between come another setting and another topology of both
sides: TP 2 x CP 4 trains with two engines of four, TP 1 x CP 8 with one of eight, in the same sixteen processes.
"""

from __future__ import annotations

import pytest

from rlk.evidence.schemas import Manifest
from rlk.plan.cells import Cell
from tests.consistency.conftest import CellRun, Sessions
from tests.plugin import ROOT

pytestmark = pytest.mark.cpu

NUCLEUS = {"temperature": 0.7, "top_p": 0.95}
HERE = Cell(
    id="tp2_rtp4-cp4-t0.7-p0.95-koff",
    sentence="Made by a test, to be run more than once in one session.",
    config={"tp": 2, "rollout_tp": 4, **NUCLEUS},
    timeout_s=300,
)
GREEDY = HERE.model_copy(update={"id": "tp2_rtp4-cp4-greedy", "config": {"tp": 2, "rollout_tp": 4, "temperature": 0}})
AWAY = HERE.model_copy(update={"id": "tp1_rtp8-cp8-t0.7-p0.95-koff", "config": {"tp": 1, "rollout_tp": 8, **NUCLEUS}})


@pytest.fixture(scope="module")
def runs(sessions: Sessions) -> list[CellRun]:
    """A fresh start, another setting, another topology, and the first again."""
    sessions.stop()
    return [sessions.run(cell, cell.plan(ROOT)) for cell in (HERE, GREEDY, AWAY, HERE)]


def test_all_runs_of_the_session_pass(runs: list[CellRun]) -> None:
    assert [run.outcome.errors for run in runs] == [()] * 4


def test_the_session_repeats_every_hash_of_every_step(runs: list[CellRun]) -> None:
    fresh, *_, again = runs
    assert fresh.record.trajectory == again.record.trajectory
    assert fresh.record.fingerprints == again.record.fingerprints


def test_the_processes_of_the_session_say_the_same_again(runs: list[CellRun]) -> None:
    """Groups, weights, kernels, caches and limits as their own objects show them; and nobody was replaced."""
    fresh, *_, again = (run.record.manifest for run in runs)
    assert fresh.readback == again.readback
    assert _by_role(fresh) == _by_role(again)


def test_the_topology_moved_in_the_same_processes(runs: list[CellRun]) -> None:
    """The proof that a move happened: the roles are others, the processes are not."""
    here, _, away, _ = (run.record.manifest for run in runs)
    assert {(one.tp, one.cp) for one in here.readback.train} == {(2, 4)}
    assert {(one.tp, one.cp) for one in away.readback.train} == {(1, 8)}
    assert [len(engine) for engine in here.readback.engines] == [4, 4]
    assert [len(engine) for engine in away.readback.engines] == [8]
    assert set(_by_role(here)) != set(_by_role(away))
    assert set(_by_role(here).values()) == set(_by_role(away).values())


def test_another_topology_makes_the_same_trajectory(runs: list[CellRun]) -> None:
    here, _, away, _ = runs
    assert here.record.trajectory == away.record.trajectory


def test_another_setting_makes_another_trajectory(runs: list[CellRun]) -> None:
    """The twin: hashes that could not differ would prove nothing."""
    first, other, *_ = runs
    assert first.record.fingerprints[0].trainer == other.record.fingerprints[0].trainer
    assert first.outcome.digest != other.outcome.digest
    assert first.record.fingerprints[-1].trainer != other.record.fingerprints[-1].trainer


def _by_role(manifest: Manifest) -> dict[str, int]:
    """Pid by role, of the ranks."""
    return {p.role: p.pid for p in manifest.processes if p.role.startswith(("train-", "engine-"))}
