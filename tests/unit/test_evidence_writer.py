"""The writer never reuses a run id, never leaves half a file, never writes twice or after the seal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlk.evidence import files, layout
from rlk.evidence.arrays import BatchArrays, RolloutArrays
from rlk.evidence.digest import START
from rlk.evidence.errors import EvidenceError
from rlk.evidence.ray_status import Actor, RayStatus
from rlk.evidence.record import Record
from rlk.evidence.schemas import Manifest
from rlk.evidence.validate import validate
from rlk.evidence.writer import RunWriter
from tests.unit.evidence_builder import build, make_draft, red


def test_run_id_is_never_used_twice(tmp_path: Path) -> None:
    RunWriter.create(tmp_path, "one")
    with pytest.raises(EvidenceError, match=r"^run id 'one': was used before"):
        RunWriter.create(tmp_path, "one")


def test_folders_above_a_run_are_made(tmp_path: Path) -> None:
    assert RunWriter.create(tmp_path / "of" / "runs", "one").run_dir.is_dir()


def test_documents_that_people_read_are_indented_by_two(tmp_path: Path) -> None:
    run_dir, _ = build(tmp_path)
    for name in (layout.MANIFEST, layout.VALIDATION):
        text = (run_dir / name).read_text(encoding="utf-8")
        assert text == json.dumps(json.loads(text), indent=2, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("run_id", ["", "../up", "a/b", ".hidden", "a b", "a" * 129])
def test_run_id_that_is_no_plain_name_is_refused(run_id: str, tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="run id"):
        RunWriter.create(tmp_path / "runs", run_id)
    assert not (tmp_path / "runs").exists()


def test_step_file_is_written_only_once(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path, "one")
    batch = BatchArrays(**make_draft().steps[0].batch)
    writer.batch(0, batch)
    before = (writer.run_dir / layout.batch_file(0)).read_bytes()
    with pytest.raises(FileExistsError):
        writer.batch(0, batch)
    assert (writer.run_dir / layout.batch_file(0)).read_bytes() == before
    assert [path.name for path in (writer.run_dir / "steps/000000").iterdir()] == ["batch.safetensors"]


def test_manifest_alone_may_be_replaced(tmp_path: Path) -> None:
    writer, draft = RunWriter.create(tmp_path, "one"), make_draft()
    for status in ("running", "complete"):
        writer.manifest(Manifest(**{**draft.manifest, "status": status}))
        assert Record(writer.run_dir).manifest.status == status
    writer.plan(draft.plan)
    with pytest.raises(FileExistsError):
        writer.plan(draft.plan)


def test_nothing_is_written_after_the_seal(tmp_path: Path) -> None:
    writer, draft = RunWriter.create(tmp_path, "one"), make_draft()
    writer.finish(Manifest(**draft.manifest), draft.ray)
    for write in (
        lambda: writer.plan(draft.plan),
        lambda: writer.fingerprints(draft.fingerprints[0]),
        lambda: writer.batch(0, BatchArrays(**draft.steps[0].batch)),
        lambda: writer.manifest(Manifest(**draft.manifest)),
    ):
        with pytest.raises(EvidenceError, match="the run is sealed"):
            write()


def test_run_that_died_early_is_sealed_and_red(tmp_path: Path) -> None:
    writer, draft = RunWriter.create(tmp_path, "one"), make_draft()
    failed = Manifest(**{**draft.manifest, "status": "failed", "error": "rank 3 left"})
    validation = writer.finish(failed, RayStatus("FAILED", ()))
    assert {"status", "ray", "files", "steps", "plan", "logprobs_policy", "weights_changed"} <= red(validation)
    assert {"seal", "verdict"} & red(validation) == set()
    assert validate(writer.run_dir) == validation


def test_trajectory_lines_are_chained_by_the_writer(tmp_path: Path) -> None:
    writer, draft = RunWriter.create(tmp_path / "by-hand", "one"), make_draft()
    run_dir, _ = build(tmp_path / "built")
    for number, step in enumerate(draft.steps):
        rollouts = [RolloutArrays(**columns) for columns in step.rollouts]
        writer.trajectory(number, rollouts, BatchArrays(**step.batch), draft.made(number))
    assert Record(writer.run_dir).trajectory == Record(run_dir).trajectory
    assert len({START, *(line.digest for line in Record(run_dir).trajectory)}) == 3


def test_line_with_a_newline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must not hold a newline"):
        files.append_line(tmp_path / "lines", "a\nb")
    assert not (tmp_path / "lines").exists()


def test_line_stands_in_the_file_before_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits in a buffer while the file goes to the disk is lost with the machine."""
    seen, path = list[bytes](), tmp_path / "lines"
    monkeypatch.setattr(files.os, "fsync", lambda _: seen.append(path.read_bytes()))
    for line in ("a", "b"):
        files.append_line(path, line)
    assert seen == [b"a\n", b"a\nb\n"]


def test_ray_status_reads_back_equal() -> None:
    status = RayStatus("FAILED", (Actor("train-00", "DEAD", 7, "RAY_KILL"), Actor("engine-00-01", "ALIVE", 8, "-")))
    assert status.to_text() == "FAILED\ntrain-00 DEAD 7 RAY_KILL\nengine-00-01 ALIVE 8 -\n"
    assert RayStatus.from_text(status.to_text()) == status


@pytest.mark.parametrize(
    "text",
    ["", "DONE\n", "SUCCEEDED", "SUCCEEDED\ntrain-00 DEAD 7\n", "SUCCEEDED\n\n", "SUCCEEDED\ntrain-00 GONE 7 -\n"],
)
def test_other_ray_status_texts_are_refused(text: str) -> None:
    with pytest.raises(EvidenceError, match=r"^ray-status\.txt: "):
        RayStatus.from_text(text)
