"""Where two steps part: which entry is the first, whose value is shown on which side, and how many things differ.

Made for mutants, as test_evidence_sample_edges: two records in memory, with changes on either side.
"""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlk.evidence import parting
from rlk.evidence.errors import EvidenceError
from rlk.evidence.parting import Parting
from tests.unit.evidence_builder import Change, Draft, complete, make_draft
from tests.unit.evidence_faults import drop_sample, on_token, then
from tests.unit.evidence_memory import held, step_of


def _record(change: Change | None) -> Any:
    draft = complete(make_draft(), change)
    run = held(draft)
    run.step = partial(step_of, draft)
    return run


def _first(left: Change | None = None, right: Change | None = None) -> Parting | None:
    """The first difference of step 1."""
    return next(parting.step(_record(left), _record(right), 1, ("l", "r")), None)


def _said(left: Change | None = None, right: Change | None = None) -> str:
    return str(_first(left, right))


def _drop(sample: int) -> Change:
    def change(draft: Draft) -> None:
        for columns in draft.steps[1].rollouts:
            for row in np.flatnonzero(columns["sample_id"] == sample)[::-1]:
                drop_sample(columns, int(row))

    return change


def _tokens(sample: int, *values: tuple[int, int]) -> Change:
    """Other response tokens at some places, scored alike."""
    return then(*(on_token(1, sample, at, tokens=value, token=value) for at, value in values))


def _batch(column: str, *values: tuple[int, float]) -> Change:
    def change(draft: Draft) -> None:
        for row, value in values:
            draft.steps[1].batch[column][row] = value

    return change


def _without_row(row: int) -> Change:
    """A batch that lacks one sample."""

    def change(draft: Draft) -> None:
        for name, column in draft.steps[1].batch.items():
            draft.steps[1].batch[name] = np.delete(column, row)

    return change


def _scored(sample: int, *values: tuple[int, float]) -> Change:
    return then(*(on_token(1, sample, at, logprob=np.float32(value)) for at, value in values))


def test_equal_steps_have_no_difference() -> None:
    assert _first() is None


# Step 1 has samples 4 to 7 with responses of 6, 3, 4 and 5 tokens and prompts of 2, 2, 3 and 3.
@pytest.mark.parametrize(
    ("left", "right", "says"),
    [
        (_tokens(4, (1, 30), (3, 30)), _tokens(4, (1, 31), (3, 31)), "tokens sample 4 token 1: l 30, r 31 [2 of 18]"),
        (_tokens(4, (1, 31), (3, 31)), _tokens(4, (1, 30), (3, 30)), "tokens sample 4 token 1: l 31, r 30 [2 of 18]"),
        (_tokens(4, (5, 30)), then(_tokens(4, (5, 31)), _tokens(6, (0, 39))), "sample 4 token 5: l 30, r 31 [2 of 18]"),
        (_drop(7), None, "prompts sample 7 token 0: l nothing, r 12 [3 of 10]"),
        (None, _drop(7), "prompts sample 7 token 0: l 12, r nothing [3 of 10]"),
        (None, then(_drop(4), _drop(7)), "prompts sample 4 token 0: l 2, r nothing [5 of 10]"),
    ],
)
def test_first_token_that_differs_stands_with_both_and_all_are_counted(left: Change, right: Change, says: str) -> None:
    assert _said(left, right).endswith(says)


def test_logprob_that_one_run_lacks_is_nothing() -> None:
    def shorter(draft: Draft) -> None:
        columns = draft.steps[1].rollouts[0]
        assert columns["sample_id"].tolist() == [6, 4]
        for name in ("tokens", "logprobs", "mask"):
            columns[name] = columns[name][:-2]
        columns["response_len"][1] -= 2

    every = parting.step(_record(None), _record(shorter), 1, ("l", "r"))
    said = {one.field: str(one) for one in every}
    assert re.fullmatch(
        r"step 1 logprobs sample 4 token 4: l -\S+ 0x[0-9a-f]{8}, r nothing \[2 of 18\]", said["logprobs"]
    )
    assert re.fullmatch(r"step 1 tokens sample 4 token 4: l \d+, r nothing \[2 of 18\]", said["tokens"])


@pytest.mark.parametrize("swap", [False, True])
def test_logprobs_are_told_by_value_and_word_on_their_own_side(swap: bool) -> None:
    one, other = (on_token(1, 5, 1, logprobs=np.float32(value)) for value in (-0.1, -2.0))
    left, right = "-0.1 0xbdcccccd", "-2.0 0xc0000000"
    assert _said(one, other) == f"step 1 logprobs sample 5 token 1: l {left}, r {right} [1 of 18]"
    assert _said(other, one) == f"step 1 logprobs sample 5 token 1: l {right}, r {left} [1 of 18]"


@pytest.mark.parametrize(("column", "field"), [("reward", "rewards"), ("advantage", "advantages")])
def test_number_of_a_sample_differs_by_its_bits(column: str, field: str) -> None:
    left, right = _batch(column, (1, 0.5), (3, 0.0)), _batch(column, (1, 2.0), (3, -0.0))
    assert _said(left, right) == (
        f"step 1 {field} sample 5: l 0.5 0x3fe0000000000000, r 2.0 0x4000000000000000 [2 of 4]"
    )
    assert _said(_batch(column, (3, 0.0)), _batch(column, (3, -0.0))).startswith(f"step 1 {field} sample 7: l 0.0 0x0")


def _same(draft: Draft) -> None:
    _batch("reward", (0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0))(draft)


def test_sample_that_one_batch_lacks_is_a_difference() -> None:
    lacks = then(_same, _without_row(1))
    word = "0x3ff0000000000000"
    assert _said(lacks, _same) == f"step 1 rewards sample 5: l nothing, r 1.0 {word} [1 of 4]"
    assert _said(_same, lacks) == f"step 1 rewards sample 5: l 1.0 {word}, r nothing [1 of 4]"
    other = then(lacks, _batch("reward", (2, 2.0)))
    assert _said(_same, other) == f"step 1 rewards sample 5: l 1.0 {word}, r nothing [2 of 4]"
    both = then(_same, _batch("reward", (0, 2.0)), _without_row(3))
    assert _said(_same, both).startswith(f"step 1 rewards sample 4: l 1.0 {word}, r 2.0 0x4")


@pytest.mark.parametrize("column", ["reward", "advantage"])
@pytest.mark.parametrize("left", [True, False])
def test_batch_whose_columns_do_not_fit_is_no_evidence(column: str, left: bool) -> None:
    runs = [_record(None), _record(None)]
    whole = runs[0 if left else 1].step(1)
    columns = {**whole.batch.columns(), column: whole.batch.columns()[column][:-1]}
    broken = SimpleNamespace(**{**vars(whole), "batch": type(whole.batch)(**columns)}, samples=whole.samples)
    runs[0 if left else 1].step = lambda step: broken
    with pytest.raises(EvidenceError, match=rf"^step 1: batch: {column} has 3 entries, 4 are needed$"):
        next(parting.step(*runs, 1, ("l", "r")), None)


def test_first_scored_token_that_differs_stands_with_both_and_all_are_counted() -> None:
    left, right = (_scored(4, (1, value), (3, value)) for value in (-0.5, -4.0))
    words = "l -0.5 0xbf000000, r -4.0 0xc0800000"
    assert _said(left, right) == f"step 1 policy logprobs sample 4 token 1: {words} [2 of 18]"
    words = "l -4.0 0xc0800000, r -0.5 0xbf000000"
    assert _said(right, left) == f"step 1 policy logprobs sample 4 token 1: {words} [2 of 18]"


def _other_replica(draft: Draft) -> None:
    for columns in draft.steps[1].trains[2:]:
        columns["logprob"] = columns["logprob"] - np.float32(3)


def test_scored_tokens_are_those_of_the_first_replica() -> None:
    """What another one has is a matter of tp_replicas."""
    assert _first(_other_replica, None) is None
    assert _first(None, _other_replica) is None


NAMES = ("model.embed_tokens.weight", "model.layers.0.q.weight", "model.layers.2.a.weight", "model.layers.2.b.weight",
         "model.layers.10.a.weight", "lm_head.weight", "model.norm.weight")  # fmt: skip
STORED = ("embed", "layers.0.qkv", "layers.9.qkv", "layers.10.down", "layers.10.up", "head", "norm")


@pytest.mark.parametrize("names", [NAMES, STORED], ids=["exported", "stored"])
def test_tensors_are_looked_at_in_the_order_of_the_model(names: tuple[str, ...]) -> None:
    """Embedding, layers by number, then what comes after them; a tensor that one run lacks has nothing there."""
    for first in range(len(names)):
        runs = [_record(None), _record(None)]
        for run, word in zip(runs, ("a", "b"), strict=True):
            run.fingerprints[0].trainer.clear()
            run.fingerprints[0].trainer.update(dict.fromkeys(reversed(names[:first]), "equal"))
            run.fingerprints[0].trainer.update(dict.fromkeys(reversed(names[first:]), word))
        found = parting.initial(*runs, ("l", "r"))
        assert str(found) == (f"initial weights tensor {names[first]}: l a, r b [{len(names) - first} of {len(names)}]")
        del runs[1].fingerprints[0].trainer[names[first]]
        found = parting.initial(*runs, ("l", "r"))
        assert found is not None
        assert (found.tensor, found.left.value, found.right.value) == (names[first], "a", "nothing")
