"""The element behind a place: which two raw rows are compared, which part of them, and how a word is said; and when a
search says it at all.

Made for mutants, as test_evidence_sample_edges: recordings of two or three ranks in memory, one op, one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rlk.evidence.compare import compare
from rlk.evidence.element import element
from rlk.evidence.locate import Search
from rlk.evidence.place import Place, Side, Word
from rlk.evidence.probe import Probe
from rlk.evidence.program import Op
from tests.unit.evidence_builder import Draft, build
from tests.unit.probe_builder import flip

QKV, NORM = Op("layers.0.qkv", sharded=True), Op("norm", sharded=False)
ROW = [0x3F80, 0x4000, 0x4040, 0xC080, 0x0000, 0x3F00, 0x8000, 0x0001]  # bf16: 1, 2, 3, -4, 0, .5, -0, the least
CHANGED = [0x3F80, 0x4000, 0x4041, 0xC080, 0x0000, 0x3E00, 0x8000, 0x0001]
SAID = "element 2 of 8: score train-00 3.015625 0x4041, rollout engine-00-00 3.0 0x4040 [2 elements of the row]"


def _probe(role: str, *times: list[int], dtype: Any = np.uint16, phase: str = "score", op: Op = NORM,
           shard0: int = 0, shards: int = 1) -> Probe:  # fmt: skip
    """A rank that kept one row, as often as there are times, beside one row of fingerprints."""
    arrays: dict[str, np.ndarray] = {
        f"{phase}/{op.name}": np.ones((1, shards), np.uint64),
        f"{phase}/sample": np.array([3]),
        f"{phase}/position": np.array([5]),
    }
    if times:
        arrays[f"row/{phase}/{op.name}"] = np.array(times, dtype)
    return Probe(role, shard0, 0, arrays)


def _sides(engine: Probe, train: Probe) -> list[Side]:
    return [Side("rollout", "rollout", [engine]), Side("score", "score", [train])]


def _engine(*times: list[int], **more: Any) -> Probe:
    return _probe("engine-00-00", *times, phase="rollout", **more)


def _place(op: str = NORM.name, shard: int | None = None, odd: tuple[str, ...] = ("score train-00",),
           common: tuple[str, ...] = ("rollout engine-00-00",)) -> Place:  # fmt: skip
    return Place(op, shard, 3, 5, None, Word(common, 1), Word(odd, 2))


def _said(engine: Probe, train: Probe) -> str | None:
    return element(_place(), _sides(engine, train))


def test_first_element_that_differs_is_said_with_both_values_words_and_their_number() -> None:
    assert _said(_engine(ROW), _probe("train-00", CHANGED)) == SAID
    other = "element 2 of 8: score train-00 3.0 0x4040, rollout engine-00-00 3.015625 0x4041 [2 elements of the row]"
    assert _said(_engine(CHANGED), _probe("train-00", ROW)) == other


@pytest.mark.parametrize(
    ("words", "dtype", "says"),
    [
        ((0x0000, 0x8000), np.uint16, "-0.0 0x8000, rollout engine-00-00 0.0 0x0000"),
        ((0x7FC0, 0x0001), np.uint16, "9.1835e-41 0x0001, rollout engine-00-00 nan 0x7fc0"),
        ((0x3F800000, 0x3F800001), np.uint32, "1.0000001 0x3f800001, rollout engine-00-00 1.0 0x3f800000"),
        ((0x00000000, 0x80000000), np.uint32, "-0.0 0x80000000, rollout engine-00-00 0.0 0x00000000"),
    ],
)
def test_word_is_said_as_a_value_of_its_width(words: tuple[int, int], dtype: Any, says: str) -> None:
    said = _said(_engine([words[0]], dtype=dtype), _probe("train-00", [words[1]], dtype=dtype))
    assert said == f"element 0 of 1: score train-00 {says} [1 elements of the row]"


@pytest.mark.parametrize("op", ["settings", "key"])
def test_word_of_many_kinds_is_said_in_bits_alone(op: str) -> None:
    own = Op(op, sharded=False, head=True)
    engine, train = _engine([1, 7], dtype=np.uint32, op=own), _probe("train-00", [1, 42], dtype=np.uint32, op=own)
    assert element(_place(op), _sides(engine, train)) == (
        "element 1 of 2: score train-00 0x0000002a, rollout engine-00-00 0x00000007 [1 elements of the row]"
    )


@pytest.mark.parametrize("train", [(), (ROW[:7],), ([*ROW, 1],), (ROW,)], ids=["none", "shorter", "longer", "equal"])
def test_row_that_has_no_counterpart_or_does_not_differ_says_nothing(train: tuple[list[int], ...]) -> None:
    assert _said(_engine(ROW), _probe("train-00", *train)) is None
    assert _said(_engine(*train), _probe("train-00", ROW)) is None


def test_rank_that_never_computed_the_row_says_nothing() -> None:
    never = _engine(ROW)
    arrays = {**never.arrays, f"row/rollout/{NORM.name}": np.empty((0, 8), np.uint16)}
    assert _said(Probe(never.role, 0, 0, arrays), _probe("train-00", CHANGED)) is None
    assert _said(_engine(CHANGED), _probe("train-00", CHANGED)) is None


def test_row_that_was_computed_several_times_is_that_of_the_last() -> None:
    assert _said(_engine(CHANGED, CHANGED, ROW), _probe("train-00", ROW, ROW, CHANGED)) == SAID


def test_shard_of_each_rank_begins_at_its_own_first() -> None:
    """Shard 5 is the second of two of an engine's rank that begins at 4, the last of three of a train rank's from 3."""
    engine = _engine(ROW, op=QKV, shard0=4, shards=2)
    train = _probe("train-00", [9, 9, 9, 9, *CHANGED], op=QKV, shard0=3, shards=3)
    assert element(_place(QKV.name, 5), _sides(engine, train)) == (
        "element 1 of 4: score train-00 0.125 0x3e00, rollout engine-00-00 0.5 0x3f00 [1 elements of the row]"
    )
    said = element(_place(QKV.name, 4), _sides(engine, train))
    assert said is not None
    assert said.startswith("element 2 of 4: score train-00 3.015625 0x4041")


def test_rows_are_those_of_the_first_holders() -> None:
    """Every other rank, pass and holder has another row; names stand before and behind that of the pass."""
    wrong = [0] * 8
    trains = [_probe(f"train-{rank:02d}", CHANGED if rank == 1 else wrong) for rank in range(3)]
    others = [_probe(f"train-{rank:02d}", wrong, phase="update") for rank in range(3)]
    sides = [
        Side("zero", "update", others),
        Side("rollout", "rollout", [_engine(ROW)]),
        Side("score", "score", trains),
        Side("update", "update", others),
    ]
    place = _place(odd=("score train-01", "score train-02"), common=("rollout engine-00-00", "update train-00"))
    assert element(place, sides) == SAID.replace("train-00", "train-01")


def _search(kept: str | None, ops: Mapping[Op, tuple[list[int], list[int]]]) -> Search:
    """A search over ops whose single row differs; the two raw rows by op."""
    search = Search(kept)
    for op, (engine, train) in ops.items():
        sides = _sides(_engine(engine, op=op), _probe("train-00", train, op=op))
        sides[1].probes[0].arrays[f"score/{op.name}"][0, 0] = 2
        search.op(op, sides)
    return search


def test_search_says_the_element_of_the_row_that_was_kept() -> None:
    search = _search("norm@3/5", {NORM: (ROW, CHANGED)})
    # One engine and one train rank: `common` is the first side.
    assert search.element == SAID
    assert str(search) == (
        "norm sample 3 position 5: score train-00 0x0000000000000002, rollout engine-00-00 0x0000000000000001 "
        f"[1 rows of this op, and 0 later ops]; {SAID}"
    )


@pytest.mark.parametrize("kept", [None, "norm@3/4", "norm@2/5", "output@3/5"])
def test_kept_row_of_another_place_is_not_taken_for_that_of_the_first_difference(kept: str | None) -> None:
    search = _search(kept, {NORM: (ROW, CHANGED)})
    assert search.element is None
    assert str(search).endswith("[1 rows of this op, and 0 later ops]")


def test_element_is_that_of_the_first_op_that_differs() -> None:
    later = Op("output", sharded=False)
    found = _search("output@3/5", {NORM: (ROW, CHANGED), later: (CHANGED, ROW)})
    assert (found.element, found.later) == (None, 1)
    found = _search("norm@3/5", {NORM: (ROW, CHANGED), later: (CHANGED, ROW)})
    assert (found.element, found.later) == (SAID, 1)


def _differs(draft: Draft) -> None:
    """The row of a rank of engine 1, fingerprint and words."""
    flip(draft.probes[0], "engine-01-01", "rollout/norm")
    for probe in draft.probes[0]:
        if probe.role.startswith("engine-01"):
            probe.arrays["row/rollout/norm"] = np.array([CHANGED if probe.role.endswith("1") else ROW], np.uint16)  # type: ignore[index]


def _kept(draft: Draft) -> None:
    for probe in draft.probes[0]:
        if probe.role.startswith("engine-01"):
            probe.arrays["row/rollout/norm"] = np.array([ROW], np.uint16)  # type: ignore[index]


@pytest.mark.parametrize("rows", [("norm@1/0", "norm@1/0"), ("norm@1/0", None), (None, "norm@1/0")])
def test_two_runs_have_an_element_where_both_kept_the_row(rows: tuple[str | None, str | None], tmp_path: Any) -> None:
    left, _ = build(tmp_path / "a", before=_kept, probe=True, probe_row=rows[0])
    right, _ = build(tmp_path / "b", before=_differs, probe=True, probe_row=rows[1])
    said = compare(left.rename(tmp_path / "l"), right.rename(tmp_path / "r")).op
    assert said is not None
    assert ("element 2 of 8: r engine-01-01 3.015625 0x4041, l engine-01-00 3.0 0x4040" in said) == (None not in rows)


def test_verdict_ends_with_the_element_of_the_row_that_was_kept(tmp_path: Any) -> None:
    _, verdict = build(tmp_path, before=_differs, probe=True, probe_row="norm@1/0")
    assert " 3.015625 0x4041" in verdict.check("probe").message
    _, verdict = build(tmp_path / "other", before=_differs, probe=True, probe_row="norm@1/1")
    assert "element" not in verdict.check("probe").message
