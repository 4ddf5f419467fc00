"""Evidence of finished runs: what the validator finds in each directory now, not what the run once said."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from rlk.evidence.matrix import MatrixEvidence
from tests.unit.evidence_builder import build
from tests.unit.evidence_faults import one_ulp
from tools.gather import main


def gather(output: Path, *runs: Path) -> Result:
    return CliRunner().invoke(main, ["--command", "pytest", "--output", str(output), *map(str, runs)])


def test_a_run_that_passes_becomes_a_record(tmp_path: Path) -> None:
    run_dir, _ = build(tmp_path)
    done = gather(tmp_path / "out.json", run_dir)
    assert done.exit_code == 0, done.output
    (one,) = MatrixEvidence.from_json((tmp_path / "out.json").read_text(), "out.json").cells
    assert (one.passed, one.mismatches, one.steps, one.errors) == (True, 0, 2, ())
    assert one.tokens == 36
    assert one.detail is not None
    assert one.detail.run == run_dir.name
    assert len(one.detail.steps) == len(one.step_seconds) == 2
    assert one.revision == json.loads((run_dir / "manifest.json").read_text())["repository"]["revision"]


def test_one_ulp_in_a_finished_run_is_said(tmp_path: Path) -> None:
    run_dir, _ = build(tmp_path, before=one_ulp(0, 1, "logprob"))
    done = gather(tmp_path / "out.json", run_dir)
    assert done.exit_code == 1
    assert "failed: tp2_rtp2" in done.output
    (one,) = MatrixEvidence.from_json((tmp_path / "out.json").read_text(), "out.json").cells
    assert not one.passed
    assert one.errors
