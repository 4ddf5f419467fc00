"""Array files keep every bit, say where they belong, and are refused when anything about them is off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from rlk.evidence.arrays import BatchArrays, RolloutArrays, TrainArrays, length_problem
from rlk.evidence.errors import EvidenceError
from rlk.evidence.samples import join, merge, token_keys, token_of
from tests.unit.evidence_builder import make_draft

PLACE = {"step": 0, "engine": 1}
STEP = make_draft().steps[0]


def _rollout() -> RolloutArrays:
    columns = {name: column.copy() for name, column in STEP.rollouts[1].items()}
    columns["logprobs"].view(np.uint32)[3] = 0x7FC00001  # a NaN with a payload must survive too
    return RolloutArrays(**columns)


def test_columns_survive_the_file_bit_for_bit(tmp_path: Path) -> None:
    train, batch = TrainArrays(**STEP.trains[0]), BatchArrays(**STEP.batch)
    for arrays in (_rollout(), train, batch):
        path = tmp_path / "file"
        path.write_bytes(arrays.to_bytes(PLACE))
        again = type(arrays).read(path, "file", PLACE)
        for name, column in arrays.columns().items():
            assert again.columns()[name].tobytes() == column.tobytes()
            assert again.columns()[name].dtype == column.dtype


@pytest.mark.parametrize("place", [{"step": 1, "engine": 1}, {"step": 0, "engine": 0}, {"step": 0}])
def test_file_in_another_place_is_refused(place: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(_rollout().to_bytes(place))
    with pytest.raises(EvidenceError, match=r"^file: header is .*, expected "):
        RolloutArrays.read(tmp_path / "file", "file", PLACE)


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BatchArrays(**STEP.batch).to_bytes(PLACE))
    with pytest.raises(EvidenceError, match=r"'rlk\.batch/1'.*expected.*'rlk\.rollout/1'"):
        RolloutArrays.read(tmp_path / "file", "file", PLACE)


@pytest.mark.parametrize("change", [{"mask": None}, {"extra": np.zeros(3, np.int64)}], ids=["missing", "unknown"])
def test_columns_of_another_table_are_refused(change: dict[str, np.ndarray | None], tmp_path: Path) -> None:
    columns = {**load(_rollout().to_bytes(PLACE)), **change}
    header = {"schema": RolloutArrays.SCHEMA, "step": "0", "engine": "1"}
    content = save({name: column for name, column in columns.items() if column is not None}, metadata=header)
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(EvidenceError, match=r"missing or unknown columns \['(mask|extra)'\]"):
        RolloutArrays.read(tmp_path / "file", "file", PLACE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", np.zeros(7, np.float64)),
        ("tokens", np.zeros(7, np.int64)),
        ("temperature", np.zeros(2, np.float32)),
        ("sample_id", np.zeros((2, 1), np.int64)),
        ("sample_id", np.array(1, np.int64)),
        ("mask", [1, 1]),
    ],
)
def test_other_dtypes_and_shapes_are_refused(name: str, value: object) -> None:
    with pytest.raises(EvidenceError, match=rf"^rlk\.rollout/1 column {name}: is .*, needs one dimension of"):
        RolloutArrays(**{**STEP.rollouts[1], name: value})


@pytest.mark.parametrize("name", [name for name in STEP.rollouts[1] if not name.endswith("_len")])
def test_column_of_another_length_is_named(name: str) -> None:
    columns = STEP.rollouts[1]
    short = RolloutArrays(**{**columns, name: columns[name][:-1]})
    problem = length_problem(short)
    assert problem is not None
    # sample_id sets the number of samples, so the next column is the one that does not fit it.
    assert problem.startswith("prompt_index" if name == "sample_id" else name)


@pytest.mark.parametrize("name", ["prompt_len", "response_len"])
def test_negative_lengths_are_a_problem_and_no_crash(name: str) -> None:
    columns = {**STEP.rollouts[1], name: np.array([-1, 9], np.int32)}
    assert "must not be negative" in (length_problem(RolloutArrays(**columns)) or "")


@pytest.mark.parametrize(
    ("name", "column"),
    [("reward", np.zeros(4, np.float32)), ("advantage", np.zeros((4, 1))), ("sample_id", np.array(1, np.int64))],
)
def test_file_with_a_column_of_another_kind_is_refused_by_its_name(
    name: str, column: np.ndarray, tmp_path: Path
) -> None:
    header = {"schema": BatchArrays.SCHEMA, "step": "0"}
    (tmp_path / "file").write_bytes(save({**STEP.batch, name: column}, metadata=header))
    with pytest.raises(EvidenceError, match=rf"^file: rlk\.batch/1 column {name}: is .*, needs one dimension of"):
        BatchArrays.read(tmp_path / "file", "file", {"step": 0})


def test_merged_samples_do_not_depend_on_engines() -> None:
    both = [RolloutArrays(**columns) for columns in STEP.rollouts]
    forward, backward = merge(both), merge(both[::-1])
    assert forward.sample_id.tolist() == [0, 1, 2, 3]
    for name in ("tokens", "prompt_tokens", "logprobs", "temperature", "key"):
        assert getattr(forward, name).tobytes() == getattr(backward, name).tobytes()
    for row, sample in enumerate(forward.sample_id.tolist()):
        own = STEP.rollouts[sample % 2]
        at = own["sample_id"].tolist().index(sample)
        start = int(own["response_len"][:at].sum())
        expected = own["tokens"][start : start + int(own["response_len"][at])]
        assert forward.tokens[forward.response(row)].tobytes() == expected.tobytes()


def test_joined_shards_have_the_keys_of_the_rollout() -> None:
    samples = merge([RolloutArrays(**columns) for columns in STEP.rollouts])
    scored = join([TrainArrays(**columns) for columns in STEP.trains[:2]])
    assert scored.key.tobytes() == samples.key.tobytes()
    assert token_of(int(scored.key[-1])) == (3, 4)


@pytest.mark.parametrize(
    ("sample", "index"), [(-1, 0), (0, -1), (0, 1 << 24), (0, 1 << 25), (1 << 38, 0), (1 << 39, 0)]
)
def test_ids_without_a_key_are_refused(sample: int, index: int) -> None:
    with pytest.raises(EvidenceError, match=rf"^sample {sample} index {index}: "):
        token_keys(np.array([1, sample, -9]), np.array([1, index, -9]))


def test_largest_ids_have_a_key() -> None:
    sample, index = (1 << 38) - 1, (1 << 24) - 1
    (key,) = token_keys(np.array([sample]), np.array([index])).tolist()
    assert key == (1 << 62) - 1
    assert token_of(key) == (sample, index)
