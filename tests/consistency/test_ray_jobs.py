"""Runs on a Ray that is there: a real cluster with its dashboard, submissions through its Jobs API, and how they end.

Four ranks and one engine of two, since what is shown is the way to the cluster and back and not the numbers.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlk.evidence.ray_status import RayStatus
from rlk.evidence.validate import validate
from tests.consistency.ray_cluster import Ray, cluster, ended
from tests.plugin import ROOT

pytestmark = pytest.mark.full

PLACED = """
import os, sys, time
import ray
from rlk.driver.joined import JoinedCluster
from rlk.plan.derive import Plan

class Rank:
    def gpu(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def leave(self):
        ray.actor.exit_actor()

plan = Plan.from_json(open(sys.argv[1]).read())
cluster = JoinedCluster(plan)
cluster.start()
places = [("train", slot) for slot in range(plan.ranks)] + [("engine", slot) for slot in range(plan.engine_ranks)]
ranks = [cluster.add(f"{side}-{slot:02d}", Rank, {}, slot=slot) for side, slot in places]
print("GPUS", ray.get([rank.gpu.remote() for rank in ranks], timeout=300))
print("LEFT", [actor.cause for actor in cluster.leave()])
cluster.stop()
"""


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ray]:
    """The cluster of this module."""
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


def test_submitted_run_passes_and_leaves_the_cluster_as_it_was(ray: Ray) -> None:
    process = ray.rlk("verify", "--run-id", "green")
    output = ended(process)
    assert process.returncode == 0, output
    assert "step 2/2  sync" in output
    assert "job rlk-green SUCCEEDED\nPASS  2 steps" in output
    verdict = validate(ray.runs / "green")
    assert verdict.passed
    assert verdict.tokens_compared > 0
    manifest = json.loads((ray.runs / "green" / "manifest.json").read_text())
    assert manifest["runtime"]["submission_id"] == "rlk-green"
    assert manifest["runtime"]["ray_address"] == f"http://{ray.address}"
    assert manifest["arguments"][1] == "verify"
    assert not [p["pid"] for p in manifest["processes"] if _lives(p["pid"], p["started"])]
    assert "SUCCEEDED" in ray.job("list")


def test_interrupted_run_is_stopped_and_sealed_red(ray: Ray) -> None:
    process = ray.rlk("verify", "--run-id", "stopped")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("starting 4 train ranks"):
            break
    process.send_signal(signal.SIGINT)
    output = ended(process)
    assert process.returncode == 130, output
    assert "stopping job rlk-stopped" in output
    assert "STOPPED" in ray.job("status", "rlk-stopped").upper()
    run_dir = ray.runs / "stopped"
    assert (run_dir / "SHA256SUMS").is_file(), "it was not sealed"
    assert not validate(run_dir).passed
    assert RayStatus.from_text((run_dir / "ray-status.txt").read_text()).outcome == "FAILED"
    manifest = json.loads((run_dir / "manifest.json").read_text())
    assert manifest["error"] == "interrupted"
    assert not [p["pid"] for p in manifest["processes"] if _lives(p["pid"], p["started"])]


def test_detached_run_returns_its_submission_and_the_job_decides(ray: Ray) -> None:
    """The record is taken away before the job reads it, as where the node shares no file system."""
    process = ray.rlk("verify", "--run-id", "away", "--detach")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("submission  rlk-away on node ")
    (ray.runs / "away.submission.json").unlink()
    ended(process)
    assert process.returncode == 0
    logs = ray.job("logs", "--follow", "rlk-away")
    assert "allowed is an output root on a file system that the cluster's node shares" in logs
    assert "FAILED" in ray.job("status", "rlk-away").upper()
    assert not (ray.runs / "away").exists()


def test_train_rank_and_rollout_worker_share_a_gpu(ray: Ray, tmp_path: Path) -> None:
    """Four slots on two GPUs: a worker is where its train rank is, and each GPU is taken by two slots."""
    plan = json.loads(
        subprocess.run(
            [sys.executable, "-m", "rlk", "plan", "--json", "--profile", str(ray.profile), "--run-id", "placed"],
            env=ray.environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    plan["profile"] |= {"device": "cuda", "gpus": 2}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "placed.py").write_text(PLACED)
    environment = json.dumps({"env_vars": {"PYTHONPATH": str(ROOT)}})
    python = [sys.executable, "-P", str(tmp_path / "placed.py"), str(tmp_path / "plan.json")]
    output = ray.job("submit", "--runtime-env-json", environment, "--", *python)
    assert "\nGPUS " in output, output
    (gpus,) = (json.loads(line[5:].replace("'", '"')) for line in output.splitlines() if line.startswith("GPUS "))
    train, workers = gpus[:4], gpus[4:]
    assert workers == train[:2]
    assert sorted(train) == ["0", "0", "1", "1"]
    assert f"LEFT {['INTENDED_USER_EXIT'] * 6}" in output


def test_gpus_that_ray_gave_are_looked_at_before_the_run(ray: Ray) -> None:
    """Ray gives a GPU that is not there; what a node has is known only on it."""
    content = json.loads(ray.profile.read_text()) | {"device": "cuda", "gpus": 1}
    path = ray.profile.with_name("blind.json")
    path.write_text(json.dumps(content))
    process = ray.rlk("verify", "--run-id", "blind", profile=path)
    output = ended(process)
    assert process.returncode == 1, output
    assert "gpus 1: 0 are visible (CUDA_VISIBLE_DEVICES, else all of the machine)" in output
    assert "job rlk-blind FAILED" in output
    assert "no sealed verdict" in output
    assert not (ray.runs / "blind").exists()


def _lives(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 0.01 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
