"""Evidence of finished runs: what the validator finds in each directory now, not what the run once said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner, Result

from rlk.evidence.matrix import MatrixEvidence
from rlk.evidence.record import Record
from rlk.plan.matrix import MatrixCell
from tests.unit.evidence_builder import build
from tests.unit.evidence_faults import one_ulp
from tools.gather import cell_of, main


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


def test_a_run_has_the_name_of_the_listed_cell_that_planned_it(tmp_path: Path) -> None:
    plan = Record(build(tmp_path)[0]).plan
    few = replace(plan, profile=plan.profile.limited({"kv_cache_bytes": plan.profile.engine.kv_cache_bytes // 2}))
    plain = MatrixCell(plan, "run", (), sentence="Pages for all.")
    listed = [MatrixCell(few, "run", (), "pressed", sentence="Pages for a part."), plain]
    assert cell_of(few, "", listed).id == f"{plan.cell}-pressed"
    assert cell_of(plan, "", listed).id == plan.cell
    other = replace(plan, profile=plan.profile.limited({"max_num_seqs": 2}))
    assert (cell_of(other, "None's.", listed).id, cell_of(other, "None's.", listed).sentence) == (
        plan.cell,
        "Pages for all.",
    )
    assert cell_of(other, "None's.", listed[:1]).sentence == "None's."


def test_one_ulp_in_a_finished_run_is_said(tmp_path: Path) -> None:
    run_dir, _ = build(tmp_path, before=one_ulp(0, 1, "logprob"))
    done = gather(tmp_path / "out.json", run_dir)
    assert done.exit_code == 1
    assert "failed: tp2_rtp2" in done.output
    (one,) = MatrixEvidence.from_json((tmp_path / "out.json").read_text(), "out.json").cells
    assert not one.passed
    assert one.errors
