"""The committed evidence of the matrix is whole: nothing is missing, and the page says what it says.

Pairs are counted from the degrees in test_matrix; here every cell of the files must have its record.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlk.evidence.matrix import MatrixEvidence, problems
from rlk.plan.matrix import Matrix, MatrixCell
from tools.matrix_page import page

ROOT = Path(__file__).parents[2]
TOKENS = 250_000


@pytest.fixture(scope="module")
def cells() -> list[MatrixCell]:
    folder = ROOT / "matrices"
    return list(Matrix.load(folder / "topologies.yaml", folder / "sampling.yaml", ROOT).cells())


@pytest.fixture(scope="module")
def matrix() -> MatrixEvidence:
    file = ROOT / "docs" / "evidence" / "matrix-cpu.json"
    return MatrixEvidence.from_json(file.read_text(encoding="utf-8"), str(file))


def test_every_cell_of_the_matrix_has_its_record(cells: list[MatrixCell], matrix: MatrixEvidence) -> None:
    assert problems(cells, matrix) == []


def test_a_topology_left_out_of_the_evidence_would_show(cells: list[MatrixCell], matrix: MatrixEvidence) -> None:
    """The twin: each pair's records are taken away in turn."""
    for degrees in {(c.plan.train.tp, c.plan.rollout.tp, c.plan.rollout.cp) for c in cells}:
        left = tuple(c for c in matrix.cells if (c.train_tp, c.rollout_tp, c.rollout_cp) != degrees)
        missing = problems(cells, matrix.model_copy(update={"cells": left}))
        assert len(missing) == len({cell.sampling for cell in cells}), degrees


def test_each_setting_has_forty_equal_digests(matrix: MatrixEvidence) -> None:
    for sampling in {one.sampling for one in matrix.cells}:
        digests = [one.digest for one in matrix.cells if one.sampling == sampling]
        assert len(digests) == 40
        assert len(set(digests)) == 1
    assert len({one.digest for one in matrix.cells}) == len({one.sampling for one in matrix.cells})


def test_enough_tokens_were_compared_and_none_differed(matrix: MatrixEvidence) -> None:
    assert sum(one.tokens for one in matrix.cells) >= TOKENS
    assert sum(one.mismatches for one in matrix.cells) == 0


def test_the_page_is_what_the_evidence_gives(cells: list[MatrixCell], matrix: MatrixEvidence) -> None:
    assert (ROOT / "docs" / "matrix.md").read_text(encoding="utf-8") == page(cells, matrix)
