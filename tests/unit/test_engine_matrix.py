"""matrices/engine.yaml covers what it says: every pair of values in some schedule, and every size of a crowd.

The evidence of its last run has a row for every line, with nothing left out and nothing that did not pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import pytest

from tests import engine_evidence
from tests.consistency.engine_matrix import ALL_ENGINES, BATCH, Schedule, load, make_batch, make_crowd, shares

VALUES: dict[str, tuple[object, ...]] = {
    "budget": (17, 32, 64, 2048),
    "cache": ("cold", "warm"),
    "pages": ("few", "plenty"),
    "engines": (1, 2, ALL_ENGINES),
}
CROWDS = (1, 7, 8, 15, 16, 17, 44, 45, 64)
MATRIX = load()


def uncovered(schedules: Sequence[Schedule]) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """Pairs of values that stand together in no schedule."""
    columns = list(combinations(VALUES, 2))
    wanted = {((a, x), (b, y)) for a, b in columns for x, y in product(VALUES[a], VALUES[b])}
    return wanted - {((a, getattr(s, a)), (b, getattr(s, b))) for s in schedules for a, b in columns}


def test_every_pair_of_values_is_in_some_schedule() -> None:
    assert uncovered(MATRIX.schedules) == set()


@pytest.mark.parametrize("left_out", range(12))
def test_schedule_left_out_would_be_noticed(left_out: int) -> None:
    rest = [s for i, s in enumerate(MATRIX.schedules) if i != left_out]
    assert uncovered(rest) != set()


def test_part_that_ci_runs_has_every_value_but_all_engines() -> None:
    lines = [s for s in MATRIX.schedules if not s.marks]
    for column, values in VALUES.items():
        assert {getattr(s, column) for s in lines} == set(values) - {ALL_ENGINES}, column


def test_every_crowd_is_there() -> None:
    assert tuple(crowd.requests for crowd in MATRIX.crowds) == CROWDS


def test_lines_have_names_of_their_own() -> None:
    names = [line.id for line in (*MATRIX.schedules, *MATRIX.crowds)]
    assert len(set(names)) == len(names) == len(MATRIX.schedules) + len(CROWDS)


@pytest.mark.parametrize("engines", VALUES["engines"])
def test_shares_are_neighbours_and_cover_the_batch(engines: int) -> None:
    parts = shares(make_batch(), engines)
    assert [len(part) for part in parts] == [BATCH // engines] * engines
    assert [r.sample_id for part in parts for r in part] == list(range(BATCH))


def test_requests_of_a_crowd_do_not_depend_on_its_size() -> None:
    assert make_crowd(7) == make_crowd(64)[:7]


def test_evidence_has_every_line_and_no_mismatch() -> None:
    rows = engine_evidence.read()
    assert [row.id for row in rows] == [line.id for line in (*MATRIX.schedules, *MATRIX.crowds)]
    assert all(row.passed and row.mismatches == 0 and row.tokens > 0 for row in rows)
    assert len({row.digest for row in rows if row.id.startswith("budget")}) == 1, "one batch, one digest"
