"""A record that is not whole, not readable, not finished or not of its plan is red, and so is one that ended badly."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk.evidence.ray_status import RayStatus
from rlk.evidence.schemas import Process, Requested
from rlk.evidence.validate import validate_record
from tests.unit.evidence_builder import Change, Draft, build, red
from tests.unit.evidence_faults import ALL_STEP_CHECKS, Fault, assert_caught, on_manifest, parameters

READ_METRICS = {"generated_counts", "metrics_counts", "weight_versions"}


def _replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(run_dir: Path) -> None:
        text = (run_dir / name).read_text()
        assert old in text
        (run_dir / name).write_text(text.replace(old, new, 1))

    return change


def _swap(one: str, other: str) -> Callable[[Path], None]:
    def change(run_dir: Path) -> None:
        first, second = (run_dir / one).read_bytes(), (run_dir / other).read_bytes()
        (run_dir / one).write_bytes(second)
        (run_dir / other).write_bytes(first)

    return change


def _plan_says(old: str, new: str) -> Change:
    def change(draft: Draft) -> None:
        text = draft.plan.to_json()
        assert old in text
        draft.plan_text = text.replace(old, new, 1)

    return change


def _extra(name: str) -> Callable[[Path], None]:
    def change(run_dir: Path) -> None:
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).write_text("{}")

    return change


def _actor(number: int, **values: object) -> Change:
    def change(draft: Draft) -> None:
        actors = list(draft.ray.actors)
        actors[number] = dataclasses.replace(actors[number], **values)  # type: ignore[arg-type]
        draft.ray = RayStatus(draft.ray.outcome, tuple(actors))

    return change


def _failed_but_all_actors_left(draft: Draft) -> None:
    draft.ray = RayStatus("FAILED", draft.ray.actors)


def _actor_not_listed(draft: Draft) -> None:
    draft.ray = RayStatus("SUCCEEDED", draft.ray.actors[:-1])


def _two_roles_in_one_process(draft: Draft) -> None:
    shared = draft.ray.actors[0].pid
    _actor(1, pid=shared)(draft)
    processes = draft.manifest["processes"]
    moved = processes[1].model_copy(update={"pid": shared})
    said = draft.manifest["readback"]
    train = (said.train[0], said.train[1].model_copy(update={"pid": shared}), *said.train[2:])
    on_manifest(processes=(processes[0], moved, *processes[2:]), readback=said.model_copy(update={"train": train}))(
        draft
    )


def _all_alive(draft: Draft) -> None:
    draft.ray = RayStatus(
        "SUCCEEDED", tuple(dataclasses.replace(actor, state="ALIVE", cause="-") for actor in draft.ray.actors)
    )


def _swap_metrics(draft: Draft) -> None:
    draft.metrics.reverse()


FAULTS = [
    Fault("log_removed", {"files"}, r"files: run\.log: missing", disk=lambda run: (run / "run.log").unlink()),
    Fault("file_of_nobody", {"files"}, r"files: notes\.txt: is no file of this run", disk=_extra("notes.txt")),
    Fault(
        "empty_folder", {"files"}, r"files: empty/: is no file of this run", disk=lambda run: (run / "empty").mkdir()
    ),
    Fault(
        "train_rank_removed",
        {"files"} | ALL_STEP_CHECKS,
        r"support: steps/000001/train-03\.safetensors: missing",
        disk=lambda run: (run / "steps/000001/train-03.safetensors").unlink(),
    ),
    Fault(
        "two_ranks_swapped",
        ALL_STEP_CHECKS,
        r"support: steps/000000/train-00\.safetensors: header is .*'rank': '1'.*expected .*'rank': '0'",
        disk=_swap("steps/000000/train-00.safetensors", "steps/000000/train-01.safetensors"),
    ),
    Fault(
        "step_folder_removed",
        {"files", "steps"} | ALL_STEP_CHECKS,
        r"steps: steps/: step 1 is missing",
        disk=lambda run: shutil.rmtree(run / "steps/000001"),
    ),
    Fault(
        "step_folder_added",
        {"files", "steps"},
        r"steps: steps/: step 2 is not one of the 2 planned",
        disk=_extra("steps/000002/batch.safetensors"),
    ),
    Fault(
        "weight_version_added",
        {"files", "steps"},
        r"steps: fingerprints/: version 3 is not one of the 3 planned",
        disk=_extra("fingerprints/v0003.json"),
    ),
    Fault(
        "fault_on_purpose",
        {"injected"},
        r"injected: fault lr-zero was injected on purpose in every step",
        options={"inject": "lr-zero", "confirm_inject": True},
    ),
    Fault(
        "weight_version_removed",
        {"files", "steps", "schemas", "tensor_list", "weights_equal", "replicas_agree", "weights_changed", "digest"}
        | {"oracle"},
        r"steps: fingerprints/: version 1 is missing",
        disk=lambda run: (run / "fingerprints/v0001.json").unlink(),
    ),
    Fault(
        "step_skipped_in_the_metrics",
        {"steps", "two_steps"} | READ_METRICS,
        r"steps: metrics\.jsonl: step 0 is missing",
        after=lambda draft: draft.metrics.pop(0),
    ),
    Fault(
        "step_doubled_in_the_metrics",
        {"steps"} | READ_METRICS,
        r"steps: metrics\.jsonl: step 1 stands 2 times",
        after=lambda draft: draft.metrics.append(draft.metrics[1]),
    ),
    Fault(
        "steps_out_of_order",
        {"steps"},
        r"steps: metrics\.jsonl: not in the order of steps: \[1, 0\]",
        after=_swap_metrics,
    ),
    Fault(
        "step_skipped_in_the_trajectory",
        {"steps", "digest"},
        r"steps: trajectory\.jsonl: step 1 is missing",
        after=lambda draft: draft.trajectory.pop(1),
    ),
    Fault(
        "trajectory_of_another_version",
        {"schemas", "steps", "digest"},
        r"schemas: trajectory\.jsonl line 1: schema is 'rlk\.trajectory/3'",
        disk=_replace("trajectory.jsonl", "rlk.trajectory/2", "rlk.trajectory/3"),
    ),
    Fault(
        "another_digest",
        {"digest"},
        r"step 1: tokens is '0{64}', expected",
        after=lambda draft: draft.trajectory.__setitem__(
            1, draft.trajectory[1].model_copy(update={"tokens": "0" * 64})
        ),
    ),
    Fault("run_that_failed", {"status"}, r"status is 'failed'", before=on_manifest(status="failed")),
    Fault("run_with_an_error", {"status"}, r"error is 'boom'", before=on_manifest(error="boom")),
    Fault("run_still_going", {"status"}, r"status is 'running'", before=on_manifest(status="running")),
    Fault(
        "plan_of_another_cell", {"plan"}, r"cell is 'tp4.*derived again it is 'tp2", after=_plan_says('"tp2_', '"tp4_')
    ),
    Fault(
        "plan_with_another_budget",
        {"plan", "manifest", "train_settings"},
        r"plan: plan\.json: token_budget is 511, derived again it is 512",
        after=_plan_says('"token_budget": 512', '"token_budget": 511'),
    ),
    Fault(
        "manifest_with_another_convention",
        {"manifest"},
        r"manifest: manifest\.json: kl_convention is 'k1'",
        before=on_manifest(kl_convention="k1"),
    ),
    Fault(
        "manifest_of_a_run",
        {"manifest"},
        r"command is 'run', expected 'verify'",
        before=on_manifest(command="run"),
    ),
    Fault(
        "manifest_with_another_learning_rate",
        {"manifest"},
        r"effective\.lr is 1\.0, expected 5e-07",
        before=lambda draft: draft.manifest["effective"].update(lr=1.0),
    ),
    Fault(
        "manifest_that_hides_what_was_asked",
        {"manifest"},
        r"requested\.seed is .*'value': 5.*expected .*'value': 0",
        before=lambda draft: draft.manifest["requested"].update(seed=Requested(value=5, source="default")),
    ),
    Fault(
        "ray_reports_a_failed_job",
        {"ray"},
        r"ray: ray-status\.txt: outcome is 'FAILED', expected 'SUCCEEDED'",
        before=_failed_but_all_actors_left,
    ),
    Fault(
        "actor_that_crashed",
        {"ray"},
        r"engine-01-00 is DEAD SYSTEM_ERROR, expected DEAD by INTENDED_USER_EXIT",
        before=_actor(6, cause="SYSTEM_ERROR"),
    ),
    Fault("actor_that_was_killed", {"ray"}, r"train-02 is DEAD RAY_KILL", before=_actor(2, cause="RAY_KILL")),
    Fault("actor_left_behind", {"ray"}, r"train-03 is ALIVE -", before=_actor(3, state="ALIVE", cause="-")),
    Fault("actor_not_listed", {"ray", "processes"}, r"ray: ray-status\.txt: actors is", before=_actor_not_listed),
    Fault(
        "dead_actor_of_a_session_that_goes_on",
        {"ray"},
        r"train-00 is DEAD INTENDED_USER_EXIT, expected ALIVE",
        before=on_manifest(actors_outlive_run=True),
    ),
    Fault("actor_with_another_pid", {"processes"}, r"pid of train-01 is 9, expected 101", before=_actor(1, pid=9)),
    Fault(
        "process_nobody_recorded",
        {"processes"},
        r"number of processes engine-01-01 is 0, expected 1",
        before=lambda draft: on_manifest(processes=draft.manifest["processes"][:-1])(draft),
    ),
    Fault(
        "process_recorded_twice",
        {"processes"},
        r"number of processes train-00 is 2, expected 1",
        before=lambda draft: on_manifest(
            processes=(*draft.manifest["processes"], Process(pid=7, started=1.0, role="train-00"))
        )(draft),
    ),
    Fault(
        "two_ranks_in_one_process",
        {"processes"},
        r"pid 100 is both train-00 and train-01",
        before=_two_roles_in_one_process,
    ),
]


@parameters(FAULTS)
def test_each_fault_reddens_only_its_checks(fault: Fault, tmp_path: Path) -> None:
    assert_caught(fault, tmp_path)


JSON_FILES = ["manifest.json", "plan.json", "metrics.jsonl", "trajectory.jsonl", "fingerprints/v0001.json"]


def test_verdict_says_how_much_was_read_and_compared(tmp_path: Path) -> None:
    run_dir, verdict = build(tmp_path, steps=3)
    assert verdict.passed
    assert (verdict.command, verdict.mode, verdict.steps) == ("verify", "consistency", 3)
    assert (verdict.tokens_compared, verdict.mismatching_tokens) == (3 * 18, 0)
    assert verdict.digest == json.loads((run_dir / "trajectory.jsonl").read_text().splitlines()[-1])["digest"]
    (run_dir / "steps/000001/batch.safetensors").unlink()
    (run_dir / "trajectory.jsonl").write_text("")
    verdict = validate_record(run_dir)
    assert (verdict.steps, verdict.tokens_compared, verdict.mismatching_tokens, verdict.digest) == (2, 36, 0, None)


@pytest.mark.parametrize("name", JSON_FILES)
def test_another_schema_version_is_not_read(name: str, tmp_path: Path) -> None:
    run_dir, _ = build(tmp_path)
    path = run_dir / name
    path.write_text(re.sub(r'("schema": "rlk\.[a-z]+)/[0-9]+"', r'\1/9"', path.read_text(), count=1))
    validation = validate_record(run_dir)
    assert "schemas" in red(validation)
    assert re.search(rf"{re.escape(name)}.*schema", validation.check("schemas").message)


@pytest.mark.parametrize("name", ["metrics.jsonl", "trajectory.jsonl"])
def test_lines_without_the_last_newline_may_be_cut(name: str, tmp_path: Path) -> None:
    run_dir, _ = build(tmp_path)
    path = run_dir / name
    path.write_bytes(path.read_bytes()[:-1])
    message = validate_record(run_dir).check("schemas").message
    assert f"{name}: does not end with a newline, so the last line may be cut" in message
    path.write_bytes(b"")
    assert "schemas" not in red(validate_record(run_dir))


def _is_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: path.write_bytes(b"{}\xff"), r"not UTF-8 at byte 2$"),
        (_is_a_folder, r"cannot be read: Is a directory$"),
        (Path.unlink, "missing$"),
    ],
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "manifest.json"])
def test_file_that_holds_no_text_is_said_without_a_path(
    name: str, change: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    run_dir, _ = build(tmp_path)
    change(run_dir / name)
    message = validate_record(run_dir).check("status" if name == "manifest.json" else "metrics_finite").message
    assert re.match(rf"{re.escape(name)}: {says[:-1]}", message), message


@pytest.mark.parametrize(
    ("name", "field", "value", "says"),
    [
        ("steps/000001/update.json", "step", 0, "says step 0"),
        ("steps/000001/update.json", "step", 2, "says step 2"),
        ("fingerprints/v0001.json", "version", 0, "says version 0"),
        ("fingerprints/v0001.json", "version", 2, "says version 2"),
    ],
)
def test_document_of_another_place_is_not_read(name: str, field: str, value: int, says: str, tmp_path: Path) -> None:
    change = _replace(name, f'"{field}": 1', f'"{field}": {value}')
    _, validation = build(tmp_path, disk=change)
    assert any(f"{name}: {says}" in error for error in validation.errors)


def test_first_mistake_of_a_plan_is_said(tmp_path: Path) -> None:
    """Of several, in the order of the fields."""
    run_dir, _ = build(tmp_path)
    path = run_dir / "plan.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "cell": 3, "engines": "two", "more": 1}))
    message = validate_record(run_dir).check("plan").message
    assert message.startswith("plan.json: plan: cell: Input should be a valid string")


def test_first_reason_why_a_plan_cannot_be_is_said(tmp_path: Path) -> None:
    """A config that no rule lets through, for two reasons: it was not the program that wrote this plan."""
    run_dir, _ = build(tmp_path)
    path = run_dir / "plan.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "config": {**body["config"], "tp": 8, "rollout_tp": 8}}))
    message = validate_record(run_dir).check("plan").message
    assert message.startswith("plan.json: its config is refused: --tp 8")


def test_ray_status_cut_short_is_not_read(tmp_path: Path) -> None:
    run_dir, _ = build(tmp_path)
    path = run_dir / "ray-status.txt"
    path.write_bytes(path.read_bytes()[:-20])
    validation = validate_record(run_dir)
    assert red(validation) == {"schemas", "ray", "processes"}
    assert "does not end with a newline" in validation.check("ray").message


def test_actors_of_a_shared_session_may_live_on(tmp_path: Path) -> None:
    def change(draft: Draft) -> None:
        _all_alive(draft)
        draft.manifest["actors_outlive_run"] = True

    _, validation = build(tmp_path, before=change)
    assert validation.passed
    assert any("outlived this run" in note for note in validation.notes)
