"""A JSON file is read strictly or not at all, and what was written reads back as the same document."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import pytest

from rlk.evidence.documents import canonical, load_object
from rlk.evidence.errors import EvidenceError
from rlk.evidence.record import Record
from rlk.evidence.schemas import Generated, Kernel, Manifest, Metrics, TrajectoryLine
from rlk.evidence.verdict import Validation
from tests.unit.evidence_builder import build, make_draft

LINE = TrajectoryLine(step=1, **dict.fromkeys(set(TrajectoryLine.model_fields) - {"step"}, "a" * 64))


def test_documents_read_back_equal_and_spell_alike(tmp_path: Path) -> None:
    run_dir, _ = build(tmp_path)
    run = Record(run_dir)
    stored = Validation.from_json(run.validation_text(), "run-validation.json")
    for document in (run.manifest, stored, *run.metrics, *run.trajectory, *run.fingerprints):
        text = document.to_json()
        again = type(document).from_json(text, "file")
        assert again == document
        assert again.to_json() == text


def test_numbers_beyond_json_are_kept_as_words(tmp_path: Path) -> None:
    run_dir, _ = build(tmp_path)
    line = Record(run_dir).metrics[0].model_copy(update={"loss": math.nan, "kl": math.inf, "lr": -math.inf})
    text = line.to_json()
    body = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert (body["loss"], body["kl"], body["lr"]) == ("NaN", "Infinity", "-Infinity")
    again = Metrics.from_json(text, "file")
    assert math.isnan(again.loss)
    assert (again.kl, again.lr) == (math.inf, -math.inf)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"rlk.trajectory/2"', '"rlk.trajectory/3"', r"schema is 'rlk.trajectory/3', this reader knows"),
        ('"schema": "rlk.trajectory/2", ', "", r"schema is None"),
        ('"step": 1', '"step": 1, "step": 1', r"key 'step' stands twice"),
        ('"step": 1', '"step": "1"', r"step: Input should be a valid integer"),
        ('"step": 1', '"step": 1.0', r"step: Input should be a valid integer"),
        ('"step": 1', '"step": true', r"step: Input should be a valid integer"),
        ('"step": 1', '"step": -1', r"step: Input should be greater than or equal to 0"),
        ('"step": 1', '"step": NaN', r"NaN is not JSON"),
        ('"step": 1', '"step": 1, "more": 1', r"more: Extra inputs are not permitted"),
        ('"step": 1, ', "", r"step: Field required"),
        ("aaa", "AAA", r"tokens: String should match pattern"),
        ("}", "", r"not valid JSON"),
        ("}", "} {}", r"not valid JSON"),
    ],
)
def test_anything_else_is_refused_by_place(old: str, new: str, says: str) -> None:
    text = LINE.to_json()
    assert old in text
    with pytest.raises(EvidenceError, match=rf"^file line 3: .*{says}"):
        TrajectoryLine.from_json(text.replace(old, new, 1), "file line 3")


@pytest.mark.parametrize("text", ["[]", "1", "null", '"text"', "", "[" * 100_000])
def test_other_values_than_objects_are_refused(text: str) -> None:
    with pytest.raises(EvidenceError, match=r"^file: "):
        TrajectoryLine.from_json(text, "file")


def test_canonical_text_ignores_order_and_refuses_nan() -> None:
    assert canonical({"b": 1, "a": [1, "ü"]}) == canonical({"a": [1, "ü"], "b": 1}) == b'{"a":[1,"\\u00fc"],"b":1}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical({"a": math.nan})


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"step": 1', '"step": -1', "step: Input should be greater than or equal to 0"),
        ('"step": 1', '"step": -1, "more": 1', "step: Input should be greater than or equal to 0 (and 1 more)"),
        ('1, "tokens"', '-1, "more": 1, "token"', "step: Input should be greater than or equal to 0 (and 3 more)"),
    ],
)
def test_first_of_several_mistakes_is_said_and_the_others_are_counted(old: str, new: str, says: str) -> None:
    text = LINE.to_json()
    assert old in text
    with pytest.raises(EvidenceError) as raised:
        TrajectoryLine.from_json(text.replace(old, new, 1), "file")
    assert str(raised.value) == f"file: {says}"


def test_first_key_that_stands_twice_is_named() -> None:
    with pytest.raises(EvidenceError, match=r"^file: not valid JSON: key 'b' stands twice$"):
        load_object('{"a": 1, "b": 1, "c": 1, "b": 2, "c": 2}', "file")


def test_text_is_kept_as_it_was_written() -> None:
    manifest = Manifest(**{**make_draft().manifest, "arguments": ("--output-root", "Läufe")})
    text = manifest.to_json()
    assert "Läufe" in text
    assert Manifest.from_json(text, "file") == manifest


def test_nan_in_a_free_value_is_refused_and_not_written_as_broken_json() -> None:
    manifest = Manifest(**{**make_draft().manifest, "effective": {"lr": math.nan}})
    with pytest.raises(ValueError, match="not JSON compliant"):
        manifest.to_json()


@pytest.mark.parametrize("field", ["name", "form", "proof"])
def test_kernel_says_all_that_it_is_asked_for(field: str) -> None:
    for text, allowed in (("", False), ("x", True)):
        body = {"name": "gemm", "form": "loop", "proof": "fixed order", field: text}
        with contextlib.nullcontext() if allowed else pytest.raises(ValueError, match=rf"(?s){field}.*at least 1"):
            Kernel(**body)


def test_pid_of_a_process_is_at_least_one() -> None:
    said = make_draft().manifest
    for one in (said["processes"][0], said["readback"].train[0], said["readback"].engines[0][0]):
        body = one.model_dump(mode="json")
        for pid, allowed in ((-1, False), (0, False), (1, True)):
            text = json.dumps({**body, "pid": pid})
            with contextlib.nullcontext() if allowed else pytest.raises(ValueError, match=r"(?s)pid.*greater than 0"):
                type(one).model_validate_json(text)


def test_engine_that_captures_nothing_replays_nothing() -> None:
    counts = dict.fromkeys(("samples", "tokens", "chunks", "cached_tokens", "preemptions"), 1)
    assert Generated(**counts).graph_replays == 0


def test_documents_cannot_be_changed_after_construction() -> None:
    manifest = Manifest(**make_draft().manifest)
    with pytest.raises(ValueError, match="frozen"):
        manifest.status = "failed"  # type: ignore[misc]
