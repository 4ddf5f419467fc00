"""The matrix holds every pair of topologies under every setting, and its evidence is complete or says what is missing.

Eight ranks have four (TP, CP), and an engine ten of up to eight: both lists are counted from the degrees, not from the
file, so a topology that is left out of it shows.
"""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import pytest

from rlk.evidence.matrix import CellRecord, MatrixEvidence, composed, problems, record
from rlk.plan.errors import ConfigErrors
from rlk.plan.matrix import Matrix, MatrixCell
from rlk.plan.topology import DEGREES
from tools.matrix_page import page

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "matrices" / "topologies.yaml", ROOT / "matrices" / "sampling.yaml")
TRAIN = {(tp, cp) for tp, cp in product(DEGREES, DEGREES) if tp * cp == 8}
ROLLOUT = {(tp, cp) for tp, cp in product(DEGREES, DEGREES) if tp * cp <= 8}
SAMPLINGS = ("t0.7-p0.95-koff", "mixed", "greedy", "t0.7-poff-koff", "t1.3-p0.99-k128", "t1-poff-k20", "t1-p0.5-koff",
             "t0.005-poff-koff")  # fmt: skip


@pytest.fixture(scope="module")
def cells() -> list[MatrixCell]:
    return list(Matrix.load(*FILES, ROOT).cells())


def _pairs(found: list[MatrixCell]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [((c.plan.train.tp, c.plan.train.cp), (c.plan.rollout.tp, c.plan.rollout.cp)) for c in found]


def test_every_pair_of_topologies_stands_under_every_setting(cells: list[MatrixCell]) -> None:
    assert (len(TRAIN), len(ROLLOUT)) == (4, 10)
    for sampling in SAMPLINGS:
        own = _pairs([cell for cell in cells if cell.sampling == sampling])
        assert sorted(own) == sorted(product(TRAIN, ROLLOUT)), sampling
    assert len(cells) == len({cell.id for cell in cells}) == 40 * len(SAMPLINGS)


def test_all_pairs_run_the_long_and_the_mixed_setting(cells: list[MatrixCell]) -> None:
    for sampling, steps in (("t0.7-p0.95-koff", 20), ("mixed", 2)):
        own = [cell for cell in cells if cell.sampling == sampling]
        assert {(cell.how, cell.plan.config.steps) for cell in own} == {("run", steps)}
    mix = next(cell for cell in cells if cell.sampling == "mixed").plan
    assert len(set(mix.config.samplings)) == len(mix.config.samplings) <= mix.samples_per_step


def test_other_settings_are_composed_of_one_row_and_one_column(cells: list[MatrixCell]) -> None:
    by_id = {cell.id: cell for cell in cells}
    for sampling in SAMPLINGS[2:]:
        own = [cell for cell in cells if cell.sampling == sampling]
        run = [cell for cell in own if cell.how == "run"]
        assert {pair[0] for pair in _pairs(run)} == TRAIN
        assert {pair[1] for pair in _pairs(run)} == ROLLOUT
        assert len(run) == 13, "ten and four, one of which is both"
        for cell in own:
            row, column = (by_id[name] for name in cell.sources) if cell.sources else (cell, cell)
            assert row.plan.rollout == cell.plan.rollout
            assert column.plan.train == cell.plan.train
            assert row.how == column.how == "run"


def test_cells_never_need_more_processes_than_those_before(cells: list[MatrixCell]) -> None:
    """What makes a session enough for all of them: engine processes leave, and none is started."""
    used = [cell.plan.engines * cell.plan.engine_ranks for cell in cells]
    assert all(after <= before for before, after in pairwise(used))
    assert sum(a.plan.rollout != b.plan.rollout for a, b in pairwise(cells)) == len(ROLLOUT) - 1


def test_a_degree_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "topologies.yaml"
    file.write_text(FILES[0].read_text().replace("{tp: 8, cp: 1}", "{tp: 3, cp: 1}"))
    with pytest.raises(ConfigErrors, match=r"train\.3\.tp 3"):
        Matrix.load(file, FILES[1], ROOT)


def _evidence(cells: list[MatrixCell], **of_first: object) -> MatrixEvidence:
    """Evidence in which everything that is run ran well; the first record is changed."""
    ran = {c.id: record(c, c.sampling, True, tokens=9, revision="r") for c in cells if c.how == "run"}
    first = next(iter(ran))
    ran[first] = ran[first].model_copy(update=of_first)
    made = ran | {one.id: one for one in composed(cells, ran)}
    return MatrixEvidence(command="c", device="d", versions={}, cells=tuple(made[c.id] for c in cells if c.id in made))


def test_whole_evidence_has_no_problem(cells: list[MatrixCell]) -> None:
    evidence = _evidence(cells)
    assert problems(cells, evidence) == []
    assert MatrixEvidence.from_json(evidence.to_json(), "evidence") == evidence
    assert f"{len(cells)} of {len(cells)} cells" in page(cells, evidence)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"passed": False, "errors": ("seal: broken",)}, "failed: seal: broken"),
        ({"mismatches": 1}, "failed"),
        ({"digest": "another"}, "2 digests over its topologies"),
        ({"digest": None}, "2 digests over its topologies"),
        ({"tokens": 0}, "compared no token"),
        ({"steps": 1}, "run with 1 steps"),
        ({"steps": 21}, "run with 21 steps"),
        ({"how": "composed"}, "composed with 20 steps"),
        ({"id": "tp3_rtp1-cp1-greedy"}, "is no cell of the matrix"),
    ],
)
def test_a_wrong_record_is_a_problem(cells: list[MatrixCell], change: dict[str, object], words: str) -> None:
    assert any(words in line for line in problems(cells, _evidence(cells, **change)))


@pytest.mark.parametrize("place", [0, 3, -1])
def test_a_cell_that_is_left_out_or_stands_twice_is_a_problem(cells: list[MatrixCell], place: int) -> None:
    evidence = _evidence(cells)
    left = [one for one in evidence.cells if one != evidence.cells[place]]
    assert any(cells[place].id in line for line in problems(cells, evidence.model_copy(update={"cells": tuple(left)})))
    twice = evidence.model_copy(update={"cells": (*evidence.cells, evidence.cells[place])})
    assert problems(cells, twice) == ["a cell stands twice"]


@pytest.mark.parametrize("change", [{"passed": False}, {"digest": "another"}, {"steps": 1}, {"steps": 3}])
def test_nothing_is_composed_of_sources_that_failed_or_differ(
    cells: list[MatrixCell], change: dict[str, object]
) -> None:
    cell = next(cell for cell in cells if cell.how == "composed")
    by_id = {one.id: one for one in cells}
    ran: dict[str, CellRecord] = {name: record(by_id[name], "same", True, tokens=9) for name in cell.sources}
    (good,) = composed([cell], ran)
    assert (good.passed, good.digest, good.tokens, good.mismatches, good.seconds) == (True, "same", 0, 0, 0.0)
    for name in cell.sources:
        (bad,) = composed([cell], {**ran, name: ran[name].model_copy(update=change)})
        assert not bad.passed
    if "steps" in change:  # of both, and so of a run of another length
        (bad,) = composed([cell], {name: one.model_copy(update=change) for name, one in ran.items()})
        assert not bad.passed
    assert list(composed([cell], {cell.sources[0]: ran[cell.sources[0]]})) == []


def test_cell_without_a_record_is_missing_for_its_own_reason(cells: list[MatrixCell]) -> None:
    evidence = _evidence(cells)
    for how, words in (("run", "was not run"), ("composed", "its sources were not run")):
        cell = next(cell for cell in cells if cell.how == how)
        left = evidence.model_copy(update={"cells": tuple(one for one in evidence.cells if one.id != cell.id)})
        assert f"{cell.id}: {words}" in problems(cells, left)


def test_a_run_cell_is_never_composed(cells: list[MatrixCell]) -> None:
    ran = {cell.id: record(cell, "same", True, tokens=9) for cell in cells if cell.how == "run"}
    assert {one.how for one in composed(cells, ran)} == {"composed"}
    assert len(list(composed(cells, ran))) == sum(cell.how == "composed" for cell in cells)
