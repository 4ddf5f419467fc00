"""A session that was reset makes the same run again, byte for byte: without that, cells could not share processes.

Three runs in one session of one topology: a cell, another setting with other samples and updates in between, and the
cell again.
"""

from __future__ import annotations

import pytest

from rlk.plan.cells import Cell
from tests.consistency.conftest import CellRun, Sessions
from tests.plugin import ROOT

pytestmark = pytest.mark.cpu

TOPOLOGY = {"tp": 1, "rollout_tp": 1}
NUCLEUS = {**TOPOLOGY, "temperature": 0.7, "top_p": 0.95}


def _cell(sampling: str, config: dict[str, object]) -> Cell:
    sentence = "Made by a test, to be run more than once in one session."
    return Cell(id=f"tp1_rtp1-cp8-{sampling}", sentence=sentence, config=config, timeout_s=300)


@pytest.fixture(scope="module")
def runs(sessions: Sessions) -> list[CellRun]:
    """Nucleus, greedy, nucleus again."""
    nucleus, greedy = _cell("t0.7-p0.95-koff", NUCLEUS), _cell("greedy", {**TOPOLOGY, "temperature": 0})
    return [sessions.run(cell, cell.plan(ROOT)) for cell in (nucleus, greedy, nucleus)]


def test_all_runs_of_the_session_pass(runs: list[CellRun]) -> None:
    assert [run.outcome.errors for run in runs] == [(), (), ()]


def test_reset_session_repeats_every_hash_of_every_step(runs: list[CellRun]) -> None:
    first, _, again = runs
    assert first.record.trajectory == again.record.trajectory
    assert [f.trainer for f in first.record.fingerprints] == [f.trainer for f in again.record.fingerprints]


def test_another_setting_makes_another_trajectory(runs: list[CellRun]) -> None:
    """The twin: hashes that could not differ would prove nothing."""
    first, other, _ = runs
    assert first.record.fingerprints[0].trainer == other.record.fingerprints[0].trainer
    assert first.outcome.digest != other.outcome.digest
    assert first.record.fingerprints[-1].trainer != other.record.fingerprints[-1].trainer
