"""The job's side of a submission without a cluster: what ends it before there is a run directory.

Ray is replaced by a stand-in that fails where it is told to; what is left of it must have been stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlk import cli_job
from rlk.cli import main
from rlk.driver.errors import RunError
from rlk.driver.gpus import Gpu, visible_gpus
from rlk.driver.submission import Submission
from rlk.plan.derive import Plan
from rlk.plan.load import load_plan
from tests.unit.nvml import devices, library
from tests.unit.tiny import write_profile


class Joined:
    """Stands in for JoinedCluster."""

    made: list[Joined]
    fault: Exception | None
    found: tuple[Gpu, ...]

    def __init__(self, plan: Plan) -> None:
        self.stopped = False
        self.made.append(self)

    def start(self) -> None:
        if self.fault is not None:
            raise self.fault

    def gpus(self) -> tuple[Gpu, ...]:
        return self.found

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> type[Joined]:
    Joined.made, Joined.fault, Joined.found = [], None, ()
    monkeypatch.setattr(cli_job, "JoinedCluster", Joined)
    return Joined


def record(folder: Path, **profile: Any) -> Path:
    write_profile(folder, **{"test": True, **profile})
    plan = load_plan("verify", {"output_root": str(folder / "runs")}, {}, folder).with_run_id("one")
    path = folder / "one.submission.json"
    path.write_text(Submission.of(plan, "rlk-one", "http://x:1", ("rlk",)).to_json())
    return path


def test_job_without_room_says_so_and_leaves_no_run(
    joined: type[Joined], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    joined.fault = RunError("placement: node 10.0.0.1 had no 16 CPU free within 300 s: other jobs hold them")
    assert main(["job", str(record(tmp_path))]) == 1
    assert capsys.readouterr().out.startswith("placement: node 10.0.0.1 had no 16 CPU free")
    assert [one.stopped for one in joined.made] == [True]
    assert not (tmp_path / "runs").exists()


def test_gpu_in_use_ends_the_job_before_the_run(
    joined: type[Joined], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    joined.found = visible_gpus({}, library(devices(1, processes=[(10, 1 << 30)]), {10: b"trainer"}))
    assert main(["job", str(record(tmp_path, device="cuda", gpus=1))]) == 2
    assert "is in use: pid 10, trainer, 1024 MiB" in capsys.readouterr().err
    assert [one.stopped for one in joined.made] == [True]
    assert not (tmp_path / "runs").exists()


def test_other_versions_end_the_job_before_it_joins(
    joined: type[Joined], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record(tmp_path)
    path.write_text(path.read_text().replace('"torch": "', '"torch": "0.'))
    assert main(["job", str(path)]) == 2
    line = capsys.readouterr().err
    assert line.startswith("this node, ")
    assert "torch" in line
    assert "allowed is the submitting side's 0." in line
    assert joined.made == []
