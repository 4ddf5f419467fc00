"""The probe check on recorded runs: green where every row agrees, and red with the first op, place and ranks where not.

The small run of the evidence tests with probe files: TP2 x CP2 train ranks, two engines of two ranks, one layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlk.evidence.checks.registry import PROBE_CHECKS, STEP_CHECKS
from rlk.evidence.program import forward
from tests.unit.evidence_builder import Change, Draft, build, red
from tests.unit.evidence_faults import Fault, one_ulp, parameters, then
from tests.unit.probe_builder import flip

DOCUMENT = Path(__file__).parents[2] / "docs" / "evidence.md"


def _flip(role: str, array: str, row: int = 0, column: int = 0) -> Change:
    return lambda draft: flip(draft.probes[1], role, array, row, column)


def _without_row(role: str, phase: str) -> Change:
    """A rank that lost its last predicted row."""

    def change(draft: Draft) -> None:
        probe = next(p for p in draft.probes[1] if p.role == role)
        for name in ("head_sample", "head_position", *(op.name for op in forward(1) if op.head)):
            probe.arrays[f"{phase}/{name}"] = probe.arrays[f"{phase}/{name}"][:-1]  # type: ignore[index]

    return change


def _rows(role: str, name: str, keep: Callable[[np.ndarray], np.ndarray]) -> Change:
    def change(draft: Draft) -> None:
        probe = next(p for p in draft.probes[0] if p.role == role)
        probe.arrays[name] = keep(probe.arrays[name])  # type: ignore[index]

    return change


def _garbled(run_dir: Path) -> None:
    (run_dir / "steps/000000/probe-train-02.safetensors").write_bytes(b"no array file")


def _without_array(role: str, name: str) -> Change:
    def change(draft: Draft) -> None:
        del next(p for p in draft.probes[0] if p.role == role).arrays[name]  # type: ignore[attr-defined]

    return change


FAULTS = [
    Fault(
        "a_shard_of_one_engine_rank",
        {"probe"},
        # Engine 1 has samples 5 and 7; its row 3 is position 3 of sample 5, its column 1 shard 5.
        r"probe: step 1 layers\.0\.qkv shard 5 sample 5 position 3: score train-03 and 1 more 0x[0-9a-f]{16}, "
        r"rollout engine-01-01 0x[0-9a-f]{16} \[1 rows of this op, and 0 later ops\]",
        before=_flip("engine-01-01", "rollout/layers.0.qkv", 3, 1),
    ),
    Fault(
        "one_replica_of_an_op_that_is_not_cut",
        {"probe"},
        r"probe: step 1 layers\.0\.o sample 4 position 1: update train-03 0x[0-9a-f]{16}, rollout engine-00-00 and \d",
        before=_flip("train-03", "update/layers.0.o"),
    ),
    Fault(
        "the_earlier_of_two_ops",
        {"probe"},
        r"layers\.0\.k_rope shard 4 sample 5 position 0.*1 rows of this op, and 1 later ops",
        before=then(_flip("engine-01-01", "rollout/norm"), _flip("engine-01-01", "rollout/layers.0.k_rope")),
    ),
    Fault(
        "a_gradient_of_one_replica",
        {"probe"},
        r"layers\.0\.d_residual sample 4 position 0: backward train-\d\d 0x",
        before=_flip("train-02", "backward/layers.0.d_residual"),
    ),
    Fault(
        "an_atom_of_a_replicated_master",
        {"probe"},
        r"master_out of norm piece 5: optimizer train-\d\d 0x",
        before=_flip("train-03", "optimizer/master_out/norm", 0, 1),
    ),
    Fault(
        "predicted_token_without_logits",
        {"probe"},
        r"probe: step 1: 1 predicted tokens have no recorded logits on both sides",
        before=then(_without_row("engine-01-00", "rollout"), _without_row("engine-01-01", "rollout")),
    ),
    Fault(
        "predicted_token_that_only_the_update_has_logits_of",
        {"probe"},
        r"probe: step 1: 1 predicted tokens have no recorded logits on both sides",
        before=then(_without_row("train-00", "score"), _without_row("train-02", "score")),
    ),
    Fault(
        "array_that_is_missing",
        {"probe"},
        r"probe-train-01\.safetensors: score/layers\.0\.swiglu is missing",
        before=_without_array("train-01", "score/layers.0.swiglu"),
    ),
    Fault(
        "several_arrays_that_are_missing",
        {"probe"},
        r"probe-train-01\.safetensors: score/layers\.0\.o is missing \[",
        before=then(_without_array("train-01", "score/norm"), _without_array("train-01", "score/layers.0.o")),
    ),
    Fault(
        "array_that_is_not_of_a_probe",
        {"probe"},
        r"probe-train-01\.safetensors: rollout/norm is no array of a probe \[",
        before=then(
            _without_array("train-01", "score/norm"),
            lambda draft: draft.probes[0][1].arrays.update({"rollout/norm": np.ones((1, 1), np.uint64)}),  # type: ignore[attr-defined]
        ),
    ),
    Fault(
        "array_with_a_row_less",
        {"probe"},
        r"probe-train-01\.safetensors: update/layers\.0\.o has \d+ rows, \d+ are needed",
        before=_rows("train-01", "update/layers.0.o", lambda words: words[:-1]),
    ),
    Fault(
        "array_with_a_row_more",
        {"probe"},
        r"probe-engine-01-00\.safetensors: rollout/logits has \d+ rows, \d+ are needed",
        before=_rows("engine-01-00", "rollout/logits", lambda words: np.concatenate([words, words[:1]])),
    ),
    Fault(
        "positions_of_fewer_rows_than_samples",
        {"probe"},
        r"probe-train-01\.safetensors: score/position has \d+ rows, \d+ are needed",
        before=_rows("train-01", "score/position", lambda words: words[:-1]),
    ),
    Fault(
        "file_that_is_no_array_file",
        {"probe"},
        r"probe-train-02\.safetensors: cannot be read: ",
        disk=_garbled,
    ),
    Fault(
        "probe_of_another_step",
        {"probe"},
        r"probe-train-00\.safetensors: header is .*'step': '1'",
        disk=lambda run_dir: (run_dir / "steps/000000/probe-train-00.safetensors").write_bytes(
            (run_dir / "steps/000001/probe-train-00.safetensors").read_bytes()
        ),
    ),
    Fault(
        "rank_that_recorded_nothing",
        {"files", "probe"},
        r"probe: steps/000001/probe-engine-00-01\.safetensors: missing",
        disk=lambda run_dir: (run_dir / "steps/000001/probe-engine-00-01.safetensors").unlink(),
    ),
]


@parameters(FAULTS)
def test_each_fault_reddens_the_probe_alone(fault: Fault, tmp_path: Path) -> None:
    _, validation = build(tmp_path, before=fault.before, disk=fault.disk, probe=True)
    assert red(validation) == fault.reds
    errors = "\n".join(validation.errors)
    assert re.search(fault.says, errors), errors


def test_probed_run_is_green_with_one_check_more(tmp_path: Path) -> None:
    _, validation = build(tmp_path, probe=True)
    assert validation.passed, validation.errors
    names = [check.name for check in validation.checks]
    assert [n for n in names if n in {c.name for c in STEP_CHECKS}] + ["probe"] == names[-len(STEP_CHECKS) - 3 : -2]
    assert validation.check("probe").count > 100


def test_native_run_is_whole_without_leaves_tokens_and_gradients(tmp_path: Path) -> None:
    def native(draft: Draft) -> None:
        kept = {op.name for op in forward(1, native=True)} | {"sample", "position", "head_sample", "head_position"}
        for probe in (probe for probes in draft.probes for probe in probes):
            for name in [name for name in probe.arrays if not name.startswith("optimizer/")]:
                phase, _, op = name.partition("/")
                if phase == "backward" or op not in kept:
                    del probe.arrays[name]  # type: ignore[attr-defined]

    _, validation = build(tmp_path, before=native, probe=True, mode="native")
    assert validation.check("probe").passed, validation.check("probe").message
    _, validation = build(tmp_path / "canonical", before=native, probe=True)
    assert "is missing" in validation.check("probe").message


def test_run_without_a_probe_has_no_such_check(tmp_path: Path) -> None:
    _, validation = build(tmp_path)
    with pytest.raises(KeyError):
        validation.check("probe")


def test_failed_logprob_says_the_first_op(tmp_path: Path) -> None:
    change = then(one_ulp(1, 0, "logprob"), one_ulp(1, 2, "logprob"), _flip("train-00", "score/layers.0.swiglu", 2))
    _, validation = build(tmp_path, before=change, probe=True)
    assert {"logprobs_policy", "probe"} <= red(validation)
    message = validation.check("logprobs_policy").message
    assert "; first op that differs: layers.0.swiglu shard 0 sample 4 position 4: " in message


def test_failed_logprob_with_equal_ops_says_so(tmp_path: Path) -> None:
    _, validation = build(tmp_path, before=then(one_ulp(1, 0, "logprob"), one_ulp(1, 2, "logprob")), probe=True)
    message = validation.check("logprobs_policy").message
    assert "every recorded op agrees, the log-probability included: the difference came after it was comp" in message


def test_first_failure_names_token_and_sides(tmp_path: Path) -> None:
    _, validation = build(tmp_path, before=_flip("engine-01-01", "rollout/layers.0.qkv", 3, 1), probe=True)
    failure = validation.check("probe").failure
    assert failure is not None
    # Sample 5 has a prompt of 2, so position 3 predicts token 2 of the response.
    assert (failure.where, failure.step, failure.sample, failure.token_index) == (
        "layers.0.qkv shard 5 position 3",
        1,
        5,
        2,
    )
    assert failure.left is not None
    assert failure.right is not None
    assert int(failure.left.value, 16) ^ int(failure.right.value, 16) == np.uint64(1)


def test_probe_check_is_documented() -> None:
    assert [check.name for check in PROBE_CHECKS] == ["probe"]
    assert "| `probe` |" in DOCUMENT.read_text(encoding="utf-8")
