"""With rollout CP the verdict needs proof that query rows were shared out: each to one rank, none left out, and any.

An engine of TP 2 x CP 2, so that ranks 0 and 2 share the rows of one tensor-parallel place, 1 and 3 those of the other;
the last rank is changed, which a check of the first ones would not see.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlk.evidence.partition import rows_key
from rlk.evidence.schemas import Partitioned, Readback
from tests.unit.evidence_builder import Change, Draft, build, red
from tests.unit.evidence_faults import Fault, assert_caught, parameters

SHARED = {"rollout_cp": 2}
ROWS = 40


def _last(**values: int) -> Change:
    def change(draft: Draft) -> None:
        said: Readback = draft.manifest["readback"]
        *first, ranks = said.engines
        partitioned = Partitioned(**{**ranks[-1].partitioned.model_dump(), **values})
        last = (*ranks[:-1], ranks[-1].model_copy(update={"partitioned": partitioned}))
        draft.manifest["readback"] = said.model_copy(update={"engines": (*first, last)})

    return change


def _nobody(draft: Draft) -> None:
    said: Readback = draft.manifest["readback"]
    none = Partitioned(steps=0, rows=0, own_rows=0, own_key=0)
    engines = tuple(tuple(one.model_copy(update={"partitioned": none}) for one in ranks) for ranks in said.engines)
    draft.manifest["readback"] = said.model_copy(update={"engines": engines})


FAULTS = [
    Fault("no_step_was_shared_out", {"query_partition"}, "it took no part", before=_nobody, options=SHARED),
    Fault(
        "rows_of_the_other_rank_computed_twice",
        {"query_partition"},
        "own_key is",
        before=_last(own_key=rows_key(0, [range(ROWS // 2)])),
        options=SHARED,
    ),
    Fault(
        "one_row_computed_by_both",
        {"query_partition"},
        f"own_rows is {ROWS + 1}, expected {ROWS}",
        before=_last(own_rows=ROWS // 2 + 1, own_key=rows_key(0, [range(ROWS // 2 - 1, ROWS)])),
        options=SHARED,
    ),
    Fault(
        "one_row_computed_by_nobody",
        {"query_partition"},
        f"own_rows is {ROWS - 1}, expected {ROWS}",
        before=_last(own_rows=ROWS // 2 - 1, own_key=rows_key(0, [range(ROWS // 2 + 1, ROWS)])),
        options=SHARED,
    ),
    Fault("one_rank_saw_another_step", {"query_partition"}, "steps is 3", before=_last(steps=3), options=SHARED),
    Fault("one_rank_saw_other_rows", {"query_partition"}, "rows is 41", before=_last(rows=41), options=SHARED),
    Fault("steps_shared_out_by_one_rank", {"query_partition"}, "steps is 1, expected 0", before=_last(steps=1)),
]


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 2), (1, 4)])
def test_disjoint_and_complete_rows_pass(tp: int, cp: int, tmp_path: Path) -> None:
    _, validation = build(tmp_path, rollout_tp=tp, rollout_cp=cp)
    assert red(validation) == set()
    assert validation.check("query_partition").count > 0


def test_key_is_the_sum_of_the_generator_that_is_named() -> None:
    """splitmix64 from state 0 gives these three first: the reference output of Vigna's code."""
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [rows_key(row, [range(1)]) for row in range(3)] == first
    assert rows_key(0, [range(2), range(2, 3)]) == rows_key(1, [range(-1, 2)]) == sum(first) % 2**64


@parameters(FAULTS)
def test_each_fault_reddens_only_this_check(fault: Fault, tmp_path: Path) -> None:
    assert_caught(fault, tmp_path)
