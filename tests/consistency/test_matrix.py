"""All pairs of topologies make one trajectory: the cells that matrices/topologies.yaml and matrices/sampling.yaml run.

Every cell is marked `full` (an hour on two cores). Without that mark runs a part that another commit moves: two pairs,
neighbours in the order of the matrix, under the mixed batch, whose digests must be equal. The greedy run is the twin:
another setting makes another digest.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlk.driver.provenance import repository
from rlk.evidence.matrix import CellRecord, MatrixEvidence, composed, problems, record
from rlk.plan.cells import Cell
from rlk.plan.matrix import Matrix, MatrixCell
from tests.consistency.conftest import CellRun, Sessions
from tests.plugin import ROOT

pytestmark = pytest.mark.cpu

FOLDER = ROOT / "matrices"
CELLS = list(Matrix.load(FOLDER / "topologies.yaml", FOLDER / "sampling.yaml", ROOT).cells())
MIXED = [cell for cell in CELLS if cell.sampling == "mixed" and not cell.plan.unbuilt]
Report = Callable[[CellRun], None]


def _run(cell: MatrixCell, sessions: Sessions) -> CellRun:
    sentence = "A pair of topologies under a sampling setting of the matrix."
    return sessions.run(Cell(id=cell.id, sentence=sentence, config={}, timeout_s=600), cell.plan)


def _turn(revision: str | None) -> int:
    """Which pair it is this commit's turn to run; the next one is its neighbour."""
    return int(revision[:8], 16) % (len(MIXED) - 1) if revision else 0


@pytest.fixture(scope="module")
def turn(sessions: Sessions) -> tuple[CellRun, CellRun]:
    """The two pairs of this commit."""
    first = _turn(repository().revision)
    return _run(MIXED[first], sessions), _run(MIXED[first + 1], sessions)


def test_neighbouring_pairs_of_this_commit_make_one_trajectory(turn: tuple[CellRun, CellRun], report: Report) -> None:
    one, other = turn
    for run in turn:
        report(run)
        assert run.outcome.errors == ()
    assert (one.plan.train, one.plan.rollout) != (other.plan.train, other.plan.rollout)
    assert one.record.trajectory == other.record.trajectory
    assert all(metrics.nonzero_advantages > 0 for metrics in one.record.metrics)


def test_another_setting_of_the_pair_makes_another_trajectory(
    turn: tuple[CellRun, CellRun], sessions: Sessions
) -> None:
    _, last = turn
    pair = (last.plan.train, last.plan.rollout)
    (greedy,) = [c for c in CELLS if c.sampling == "greedy" and (c.plan.train, c.plan.rollout) == pair]
    assert _run(greedy, sessions).outcome.digest not in (None, last.outcome.digest)


def test_every_pair_has_its_turn() -> None:
    assert {_turn(f"{revision:08x}cafe") for revision in range(1000)} == set(range(len(MIXED) - 1))


@pytest.fixture(scope="module")
def ran() -> dict[str, CellRecord]:
    """What the cells of this session left, by id."""
    return {}


@pytest.mark.full
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.how == "run"], ids=lambda cell: cell.id)
def test_cell_of_the_matrix_passes(
    cell: MatrixCell, sessions: Sessions, ran: dict[str, CellRecord], report: Report
) -> None:
    run = _run(cell, sessions)
    report(run)
    found = run.outcome
    ran[cell.id] = record(cell, found.digest, found.passed, tokens=found.tokens_compared, errors=found.errors)
    assert found.errors == ()


@pytest.mark.full
def test_all_cells_of_the_matrix_have_one_digest_a_setting(ran: dict[str, CellRecord]) -> None:
    known = ran | {one.id: one for one in composed(CELLS, ran)}
    cells = tuple(known.values())
    assert problems(CELLS, MatrixEvidence(command="pytest -m full", device="", versions={}, cells=cells)) == []
