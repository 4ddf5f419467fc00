"""Which run is named on which side, whose ops are compared, and what differs last: the number of steps.

Made for mutants, as test_evidence_sample_edges: two records in memory, with one change in the second.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlk.evidence import compare as module
from rlk.evidence.compare import Comparison
from rlk.evidence.errors import EvidenceError
from tests.unit.evidence_builder import Change, Draft, complete, make_draft
from tests.unit.evidence_faults import on_token, then
from tests.unit.evidence_memory import held, step_of
from tests.unit.probe_builder import flip


def _record(draft: Draft) -> Any:
    run = held(draft)
    run.step, run.probes = partial(step_of, draft), lambda step: tuple(draft.probes[step])
    return run


def _compared(
    monkeypatch: pytest.MonkeyPatch, left: Draft, right: Draft, names: tuple[str, str] = ("l", "r")
) -> Comparison:
    paths = (Path(names[0]), Path(names[1]))
    records = {paths[0]: _record(left), paths[1]: _record(right)}
    monkeypatch.setattr(module, "Record", records.__getitem__)
    return module.compare(*paths)


def _draft(change: Change | None = None, **options: Any) -> Draft:
    return complete(make_draft(**options), change)


def _flip(role: str, array: str) -> Change:
    return lambda draft: flip(draft.probes[0], role, array)


def _turned(draft: Draft) -> None:
    """A model of another shape whose tensors are as many and as large."""
    draft.plan = replace(draft.plan, shape=replace(draft.plan.shape, rope_theta=2e4))


def _native(draft: Draft) -> None:
    """The mode without gradients of single ops in its recordings."""
    draft.plan = replace(draft.plan, config=draft.plan.config.model_copy(update={"mode": "native"}))
    for probes in draft.probes:
        for probe in probes:
            for name in [name for name in probe.arrays if name.startswith("backward/")]:
                del probe.arrays[name]


PROBED: dict[str, Any] = {"probe": True, "steps": 1, "command": "run"}
ATTENTION, SWIGLU = "rollout/layers.0.attention", "backward/layers.0.d_swiglu"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("a/one", "b/two"), ("one", "two")),
        (("a/two", "b/one"), ("two", "one")),
        (("a/one", "b/one"), ("a/one", "b/one")),
    ],
)
def test_runs_go_by_their_names_and_by_their_paths_only_where_the_names_are_one(
    names: tuple[str, str], said: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _compared(monkeypatch, _draft(), _draft(), names)
    assert (found.left, found.right) == said


@pytest.mark.parametrize("numbers", [(2, 3), (3, 2)])
def test_number_of_steps_is_the_last_difference_and_each_run_has_its_own(
    numbers: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = (_draft(steps=number) for number in numbers)
    found = _compared(monkeypatch, left, right)
    assert found.steps == 2
    assert str(found.first) == f"number of steps: l {numbers[0]}, r {numbers[1]} [1 of 1]"


def test_field_that_differs_is_named_before_the_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    first = _compared(monkeypatch, _draft(), _draft(on_token(1, 6, 1, tokens=7, token=7), steps=3)).first
    assert first is not None
    assert (first.step, first.field) == (1, "tokens")


def test_op_that_differs_is_named_before_the_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _compared(monkeypatch, _draft(**PROBED), _draft(_flip("engine-01-01", ATTENTION), probe=True))
    assert (found.first, str(found.op)[:26]) == (None, "step 0 rollout layers.0.at")


def test_ops_of_a_run_whose_other_was_not_probed_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    probed, other = _draft(**PROBED), _draft(_turned, **{**PROBED, "probe": False})
    other.probes = [[]]
    assert _compared(monkeypatch, probed, other).equal
    assert _compared(monkeypatch, other, probed).equal


@pytest.mark.parametrize(
    "array",
    [ATTENTION, "score/layers.0.attention", "update/layers.0.attention", "optimizer/m_out/layers.0.o"],
)
def test_native_runs_are_compared_in_all_that_they_record(array: str, monkeypatch: pytest.MonkeyPatch) -> None:
    role = "engine-01-01" if array == ATTENTION else "train-02"
    found = _compared(monkeypatch, _draft(_native, **PROBED), _draft(then(_native, _flip(role, array)), **PROBED))
    phase, _, name = array.partition("/")
    assert found.op is not None
    assert found.op.startswith(f"step 0 {phase} {name.replace('/', ' of ')} ")


def test_gradients_of_ops_are_not_compared_with_a_native_run_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    change = _flip("train-02", SWIGLU)
    assert _compared(monkeypatch, _draft(_native, **PROBED), _draft(change, **PROBED)).op is None
    assert _compared(monkeypatch, _draft(change, **PROBED), _draft(_native, **PROBED)).op is None
    assert _compared(monkeypatch, _draft(**PROBED), _draft(change, **PROBED)).op is not None


@pytest.mark.parametrize(
    ("role", "array", "row", "column", "place"),
    [
        ("train-03", "optimizer/m_out/layers.0.o", 1, 2, "m_out of layers.0.o shard 5 piece 6: r train-03"),
        ("train-00", "optimizer/grad/layers.0.qkv", 3, 1, "grad of layers.0.qkv shard 3 piece 1: r train-00"),
        ("train-01", "optimizer/v_out/norm", 0, 3, "v_out of norm piece 7: r train-01"),
    ],
)
def test_atom_that_differs_has_its_shard_and_piece(
    role: str, array: str, row: int, column: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change: Change = lambda draft: flip(draft.probes[0], role, array, row, column)  # noqa: E731
    found = _compared(monkeypatch, _draft(**PROBED), _draft(change, **PROBED))
    assert found.op is not None
    assert found.op.startswith(f"step 0 optimizer {place} 0x")


def test_models_of_different_shapes_are_refused_by_the_names_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EvidenceError, match=r"^l and r have models of different shapes"):
        _compared(monkeypatch, _draft(**PROBED), _draft(_turned, **PROBED))
