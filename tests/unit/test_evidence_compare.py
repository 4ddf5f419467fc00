"""Two runs are equal, or the first step, field, place and both values are named; the copy without a change is equal.

The small run of the evidence tests, written twice, with one change in the second.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlk.cli import main
from rlk.evidence.compare import Comparison, compare
from tests.unit.evidence_builder import Change, Draft, build
from tests.unit.evidence_faults import drop_sample, on_sample, on_token, one_ulp, then
from tests.unit.probe_builder import flip


def _pair(root: Path, change: Change | None = None, *, probe: bool = False) -> tuple[Path, Path]:
    left, _ = build(root / "a", probe=probe)
    right, _ = build(root / "b", before=change, probe=probe)
    return left.rename(root / "left"), right.rename(root / "right")


def _compared(root: Path, change: Change | None = None, *, probe: bool = False) -> Comparison:
    return compare(*_pair(root, change, probe=probe))


def _on_update(field: str, name: str) -> Change:
    def change(draft: Draft) -> None:
        hashes = {**getattr(draft.updates[1], field), name: "0" * 16 + ":" + "0" * 16}
        draft.updates[1] = draft.updates[1].model_copy(update={field: hashes})

    return change


def _on_weights(version: int, name: str) -> Change:
    return lambda draft: draft.fingerprints[version].trainer.update({name: "0" * 16 + ":" + "0" * 16})


def _on_batch(column: str) -> Callable[[Draft], None]:
    return lambda draft: draft.steps[1].batch[column].__setitem__(2, 0.25)


def test_run_equals_its_copy(tmp_path: Path) -> None:
    found = _compared(tmp_path)
    assert found.equal
    assert (found.steps, found.first, found.op, found.settings) == (2, None, None, ())


def test_probed_run_equals_its_copy(tmp_path: Path) -> None:
    assert _compared(tmp_path, probe=True).equal


@pytest.mark.parametrize(
    ("change", "field", "tensor", "sample", "token"),
    [
        (on_token(1, 6, 1, tokens=7, token=7), "tokens", None, 6, 1),
        (on_token(1, 6, 1, logprobs=np.float32(-9)), "logprobs", None, 6, 1),
        (_on_batch("reward"), "rewards", None, 6, None),
        (_on_batch("advantage"), "advantages", None, 6, None),
        (one_ulp(1, 0, "logprob"), "policy logprobs", None, 7, 0),
        (one_ulp(1, 1, "update_logprob"), "update logprobs", None, 7, 1),
        (one_ulp(1, 0, "ref_logprob"), "reference logprobs", None, 7, 0),
        (_on_update("gradients", "layers.0.qkv"), "gradients", "layers.0.qkv", None, None),
        (_on_update("masters", "embed"), "masters", "embed", None, None),
        (_on_update("first_moments", "norm"), "first moments", "norm", None, None),
        (_on_update("second_moments", "head"), "second moments", "head", None, None),
        (_on_weights(2, "lm_head.weight"), "weights", "lm_head.weight", None, None),
    ],
)
def test_each_field_is_the_first_that_differs(
    change: Change, field: str, tensor: str | None, sample: int | None, token: int | None, tmp_path: Path
) -> None:
    first = _compared(tmp_path, change).first
    assert first is not None
    assert (first.step, first.field, first.tensor) == (1, field, tensor)
    assert (first.sample, first.token_index) == (sample, token)
    assert first.left.run == "left"
    assert (first.left.value, first.left.word) != (first.right.value, first.right.word)
    assert 1 <= first.count < first.compared


def test_earliest_step_and_field_win(tmp_path: Path) -> None:
    change = then(_on_weights(1, "model.norm.weight"), on_token(1, 4, 0, tokens=9, token=9), _on_batch("reward"))
    first = _compared(tmp_path, change).first
    assert first is not None
    assert (first.step, first.field) == (0, "weights")


def test_logprobs_are_told_by_value_and_word(tmp_path: Path) -> None:
    first = _compared(tmp_path, on_token(0, 1, 2, logprobs=np.float32(-0.0))).first
    assert first is not None
    assert str(first).startswith("step 0 logprobs sample 1 token 2: left -")
    assert (first.right.value, first.right.word) == ("-0.0", "0x80000000")


def test_sample_that_one_run_lacks_is_a_difference(tmp_path: Path) -> None:
    first = _compared(tmp_path, lambda draft: drop_sample(draft.steps[0].rollouts[0], 0)).first
    assert first is not None
    assert (first.step, first.field, first.sample, first.right.value) == (0, "prompts", 2, "nothing")


def test_longer_response_differs_where_the_shorter_ends(tmp_path: Path) -> None:
    def shorter(draft: Draft) -> None:
        columns = draft.steps[1].rollouts[1]
        end = int(columns["response_len"][0])
        for name in ("tokens", "logprobs", "mask"):
            columns[name] = np.delete(columns[name], end - 1)
        columns["response_len"][0] -= 1

    first = _compared(tmp_path, shorter).first
    assert first is not None
    assert (first.field, first.sample, first.right.value) == ("tokens", 7, "nothing")
    assert first.token_index == 4


def test_other_initial_weights_are_no_matter_of_a_step(tmp_path: Path) -> None:
    first = _compared(tmp_path, _on_weights(0, "model.layers.0.self_attn.q_norm.weight")).first
    assert first is not None
    assert (first.step, first.field) == (None, "initial weights")


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (
            "rollout/layers.0.attention",
            "step 1 rollout layers.0.attention shard 5 sample 5 position 0: right engine-01-01",
        ),
        ("rollout/logits", "step 1 rollout logits shard 5 sample 5 position 1: right engine-01-01"),
    ],
)
def test_first_op_stands_beside_the_field(array: str, says: str, tmp_path: Path) -> None:
    found = _compared(tmp_path, lambda draft: flip(draft.probes[1], "engine-01-01", array, 0, 1), probe=True)
    assert not found.equal
    assert found.first is None
    assert found.op is not None
    assert found.op.startswith(says)


@pytest.mark.parametrize("array", ["backward/layers.0.d_swiglu", "optimizer/m_out/layers.0.o"])
def test_gradients_and_states_are_compared_too(array: str, tmp_path: Path) -> None:
    phase, _, name = array.partition("/")
    found = _compared(tmp_path, lambda draft: flip(draft.probes[0], "train-02", array), probe=True)
    assert found.op is not None
    assert found.op.startswith(f"step 0 {phase} {name.replace('/', ' of ')} shard 4")
    assert "right train-02" in found.op


def test_settings_that_differ_are_named(tmp_path: Path) -> None:
    left, _ = build(tmp_path / "a")
    right, _ = build(tmp_path / "b", lr=1e-3)
    assert compare(left, right).settings == ("lr",)


def test_command_exits_by_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, right = _pair(tmp_path, on_sample(1, 5, prompt_index=0))
    changed, _ = build(tmp_path / "c", before=_on_batch("reward"))
    assert main(["compare", str(left), str(right)]) == 0
    assert capsys.readouterr().out.startswith("EQUAL  left and right: 2 steps looked at\n")
    assert main(["compare", str(left), str(right), str(changed)]) == 1
    assert (
        "first field: step 1 rewards sample 6: left 0.0 0x0000000000000000, small-run 0.25" in capsys.readouterr().out
    )
    assert main(["compare", str(left)]) == 2
    assert main(["compare", str(left), str(tmp_path)]) == 2
    assert "allowed is a run directory" in capsys.readouterr().err


def test_command_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, right = _pair(tmp_path, _on_update("masters", "norm"))
    assert main(["compare", "--json", str(left), str(right)]) == 1
    said = json.loads(capsys.readouterr().out)
    (one,) = said["comparisons"]
    assert (said["equal"], one["equal"], one["error"]) == (False, False, None)
    assert (one["first"]["step"], one["first"]["field"], one["first"]["tensor"]) == (1, "masters", "norm")


def test_run_that_cannot_be_read_equals_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, right = _pair(tmp_path)
    (right / "steps/000000/update.json").unlink()
    assert main(["compare", str(left), str(right)]) == 1
    assert "cannot be compared: steps/000000/update.json: missing" in capsys.readouterr().out
