"""Submissions without a cluster: which node fits, what a record compares, and what a job's end makes of a run.

Ray's client is replaced by a list of calls; the live cluster is in tests/consistency/test_ray_jobs.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from ray.job_submission import JobStatus

from rlk import cli_submit
from rlk.cli import main
from rlk.cli_submit import judged, submit
from rlk.driver import submission as submission_module
from rlk.driver.jobs import Jobs, Node, fitting_node
from rlk.driver.submission import Submission, read_submission
from rlk.evidence.schemas import Repository
from rlk.plan.config import RunConfig
from rlk.plan.derive import Plan
from rlk.plan.errors import ConfigErrors
from rlk.plan.load import load_plan
from tests.unit.tiny import write_profile

CPU = Node("10.0.0.1", True, {"CPU": 16.0})
HOPPERS = Node("10.0.0.2", False, {"CPU": 64.0, "GPU": 8.0, "accelerator_type:H100": 1.0})
SHA = "ab" * 20


def plan_in(folder: Path, said: dict[str, Any] | None = None, **profile: Any) -> Plan:
    write_profile(folder, **{"test": True, **profile})
    options = {"ray_address": "127.0.0.1:8265", "output_root": str(folder / "runs"), **(said or {})}
    return load_plan("verify", options, {}, folder).with_run_id("one")


class Client:
    """Ray's client of the Jobs API, as far as it is used."""

    def __init__(self, address: str = "") -> None:
        self._server_ray_version = "2.60.0"
        self.submitted: list[dict[str, Any]] = []
        self.stopped: list[str] = []
        self.states = [JobStatus.PENDING, JobStatus.RUNNING, JobStatus.SUCCEEDED]
        self.refusal: Exception | None = None
        self.lost: Exception | None = None
        self.interrupt = False

    def submit_job(self, **job: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(job)

    async def tail_job_logs(self, name: str) -> Any:
        yield "step 1/2\n"
        if self.interrupt:
            raise KeyboardInterrupt
        raise RuntimeError("the connection closed")

    def get_job_info(self, name: str) -> Any:
        if self.lost is not None:
            raise self.lost
        return SimpleNamespace(status=self.states.pop(0) if len(self.states) > 1 else self.states[0], message="exit 1")

    def stop_job(self, name: str) -> None:
        self.stopped.append(name)
        self.states = [JobStatus.STOPPED]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    """The one client that every `Jobs` gets, of a cluster with one CPU node."""
    made = Client()
    monkeypatch.setattr("rlk.driver.jobs.JobSubmissionClient", lambda address: made)
    monkeypatch.setattr("rlk.driver.jobs.POLL_S", 0)
    listed = SimpleNamespace(node_ip=CPU.ip, is_head_node=True, resources_total=CPU.resources)
    monkeypatch.setattr("rlk.driver.jobs.list_nodes", lambda **options: [listed])
    return made


def test_head_comes_before_other_nodes_that_fit(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    node, placed = fitting_node(plan, [HOPPERS, CPU], "--ray-address x")
    assert node == CPU
    assert placed.gpus == 0


def test_gpu_run_goes_where_the_hoppers_are(tmp_path: Path) -> None:
    node, placed = fitting_node(plan_in(tmp_path, device="cuda", gpus=8), [CPU, HOPPERS], "--ray-address x")
    assert (node, placed.gpus) == (HOPPERS, 8)


@pytest.mark.parametrize(
    ("resources", "has"),
    [
        ({"CPU": 64.0, "GPU": 8.0, "accelerator_type:A100": 1.0}, "64 CPU and 8 GPU (A100)"),
        ({"CPU": 64.0, "GPU": 8.0}, "64 CPU and 8 GPU (of no known kind)"),
        ({"CPU": 64.0, "GPU": 4.0, "accelerator_type:H100": 1.0}, "64 CPU and 4 GPU (H100)"),
        ({"CPU": 15.0, "GPU": 8.0, "accelerator_type:H100": 1.0}, "15 CPU and 8 GPU (H100)"),
        ({"CPU": 64.0}, "64 CPU and no GPU"),
    ],
)
def test_cluster_without_a_fitting_node_is_refused_with_what_it_has(
    tmp_path: Path, resources: dict[str, float], has: str
) -> None:
    with pytest.raises(ConfigErrors) as caught:
        fitting_node(plan_in(tmp_path, device="cuda", gpus=8), [Node("10.0.0.3", True, resources)], "--ray-address x")
    (line,) = caught.value.errors
    assert f"8 ranks need one node with 16 CPU and 8 Hopper GPU: 10.0.0.3 has {has}: start" in line


def test_submission_names_command_node_and_time_to_seal(client: Client, tmp_path: Path) -> None:
    assert submit(plan_in(tmp_path), {"PYTHONPATH": "/extra"}, wait=False) is None
    (job,) = client.submitted
    record = tmp_path / "runs" / "one.submission.json"
    assert job["submission_id"] == "rlk-one"
    assert job["entrypoint"].endswith(f" -P -m rlk job {record}")
    assert job["entrypoint_resources"] == {"node:10.0.0.1": 0.001}
    environment = job["runtime_env"]["env_vars"]
    assert environment["PYTHONPATH"].endswith(":/extra")
    assert int(environment["RAY_JOB_STOP_WAIT_TIME_S"]) > 30
    assert read_submission(record).plan_of_run.run_id == "one"
    assert not (tmp_path / "runs" / "one").exists()


def test_job_gets_the_plan_with_paths_that_hold_anywhere(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_in(tmp_path, {"output_root": "runs", "detach": True})
    monkeypatch.chdir(tmp_path)
    submit(plan, {}, wait=False)
    config = read_submission(tmp_path / "runs" / "one.submission.json").plan_of_run.config
    assert (config.output_root, config.detach) == (str(tmp_path / "runs"), False)


def test_refused_submission_leaves_no_record(client: Client, tmp_path: Path) -> None:
    client.refusal = RuntimeError("no\nroom")
    with pytest.raises(ConfigErrors, match=r"^--ray-address http://127.0.0.1:8265: the job was refused: no room$"):
        submit(plan_in(tmp_path), {}, wait=False)
    assert list((tmp_path / "runs").iterdir()) == []


def test_refusals_come_before_anything_is_created(client: Client, tmp_path: Path) -> None:
    plan = plan_in(tmp_path, device="cuda", gpus=1)
    with pytest.raises(ConfigErrors, match="expandable_segments"):
        submit(plan, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, wait=False)
    with pytest.raises(ConfigErrors, match="need one node with"):
        submit(plan, {}, wait=False)
    client._server_ray_version = "2.9.0"
    with pytest.raises(ConfigErrors, match=r"the cluster runs Ray 2\.9\.0: allowed is 2\.60\.0"):
        submit(plan, {}, wait=False)
    assert client.submitted == []
    assert not (tmp_path / "runs").exists()


def test_address_where_nobody_answers_is_one_line() -> None:
    with pytest.raises(ConfigErrors, match=r"^--ray-address http://127.0.0.1:1: no Ray dashboard answers: allowed is"):
        Jobs("127.0.0.1:1")


def test_state_of_the_job_is_waited_for_after_its_log_breaks_off(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = submit(plan_in(tmp_path), {}, wait=True)
    assert report is not None
    assert client.states == [JobStatus.SUCCEEDED]
    assert "step 1/2\nthe log of job rlk-one broke off: the connection closed\n" in capsys.readouterr().out


def test_json_is_one_object_after_the_log_on_the_other_stream(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plan_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["verify", "--ray-address", "127.0.0.1:8265", "--run-id", "one", "--json"]) == 1
    captured = capfd.readouterr()
    (line,) = captured.out.splitlines()
    assert json.loads(line)["errors"] == [
        f"{tmp_path}/runs/one: no sealed verdict: the job ended without one, or wrote it where this host sees nothing"
    ]
    assert "step 1/2\n" in captured.err


@pytest.mark.parametrize("error", [requests.ConnectionError("refused"), RuntimeError("500")])
def test_cluster_that_goes_away_is_red(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("rlk.driver.jobs.LOST_S", 0)
    client.lost = error
    report = submit(plan_in(tmp_path), {}, wait=True)
    assert report is not None
    assert not report.passed
    assert report.errors[0] == f"job rlk-one UNREACHABLE: the cluster stopped answering: {error}"


def test_interrupt_stops_the_job_and_waits_for_its_end(client: Client, tmp_path: Path) -> None:
    client.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        submit(plan_in(tmp_path), {}, wait=True)
    assert client.stopped == ["rlk-one"]


def verdict(monkeypatch: pytest.MonkeyPatch, folder: Path, passed: bool) -> Path:
    folder.mkdir()
    (folder / "SHA256SUMS").write_text("")
    errors = () if passed else ("logprobs_policy: 3 of 9",)
    counts = {"steps": 2, "tokens_compared": 9, "mismatching_tokens": 0, "digest": SHA}
    found = SimpleNamespace(passed=passed, errors=errors, **counts)
    monkeypatch.setattr(cli_submit, "validate", lambda run_dir: found)
    return folder


@pytest.mark.parametrize(
    ("status", "passed", "green"),
    [("SUCCEEDED", True, True), ("SUCCEEDED", False, False), ("FAILED", True, False), ("STOPPED", True, False)],
)
def test_job_and_evidence_must_both_be_green(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str, passed: bool, green: bool
) -> None:
    report = judged("rlk-one", status, "exit code 1", verdict(monkeypatch, tmp_path / "one", passed), 1.0)
    assert report.passed == green
    assert (report.errors == ()) == green
    assert (f"job rlk-one {status}: exit code 1" in report.errors) == (status != "SUCCEEDED")


@pytest.mark.parametrize("there", [False, True])
def test_job_that_succeeded_without_a_seal_is_red(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "one").mkdir()
        (tmp_path / "one" / "manifest.json").write_text("{}")
    report = judged("rlk-one", "SUCCEEDED", "", tmp_path / "one", 1.0)
    assert not report.passed
    (line,) = report.errors
    assert "no sealed verdict" in line


def record(folder: Path, **changes: Any) -> Submission:
    return Submission.of(plan_in(folder), "rlk-one", "http://x:1", ("rlk",)).model_copy(update=changes)


def test_same_side_has_no_differences(tmp_path: Path) -> None:
    assert list(record(tmp_path).differences()) == []


def test_every_difference_of_the_job_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = record(tmp_path)
    other = {**made.versions, "torch": "1.0", "extra": "2"}
    made = made.model_copy(
        update={"versions": other, "repository": Repository(revision=SHA, dirty=False, patch_sha256=None)}
    )
    write_profile(tmp_path, test=True, max_prompt_len=32)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    lines = list(made.differences())
    starts = ["extra is missing", f"torch {submission_module.versions()['torch']}: allowed is", "checkout ", "profile "]
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=False))
    assert lines[-1].startswith("model ")
    assert len(lines) == 5


def test_record_that_the_node_does_not_see_says_what_to_share(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match=r"No such file or directory: allowed is an output root on a file system"):
        read_submission(tmp_path / "none.json")
    (tmp_path / "half.json").write_text("{")
    with pytest.raises(ConfigErrors, match="not valid JSON"):
        read_submission(tmp_path / "half.json")


def test_address_without_a_scheme_is_http() -> None:
    assert RunConfig(ray_address="https://host:1").ray_address == "https://host:1"
    with pytest.raises(ValueError, match="allowed is HOST:PORT or http"):
        RunConfig(ray_address="ray://host:1")
