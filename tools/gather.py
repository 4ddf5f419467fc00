"""Makes one evidence file of run directories that exist: of those that `pytest -m gpu` made, or `rlk run`.

    python -m tools.gather --command "pytest -m gpu" --output docs/evidence/gpu-1.json RUN_DIR ...

Each directory is validated anew. A run with ordinary operators becomes the native arm of the run of the same cell.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from rlk.driver.provenance import in_one_word
from rlk.evidence.matrix import CellRecord, MatrixEvidence, NativeArm, record
from rlk.evidence.matrix_detail import CellDetail, left, memory, planned
from rlk.evidence.record import Record
from rlk.evidence.schemas import Manifest
from rlk.evidence.validate import validate
from rlk.plan.derive import Plan
from rlk.plan.matrix import MatrixCell, listed
from rlk.plan.naming import cell_id
from tools.matrix_run import ERRORS, step_seconds

ROOT = Path(__file__).parents[1]


def cell_of(plan: Plan, sentence: str, cells: Sequence[MatrixCell]) -> MatrixCell:
    """The plan as a cell: the listed one that plans the same, else one of its own with the sentence of its namesake."""
    asked = planned(plan)
    for cell in cells:
        if planned(cell.plan) == asked:
            return replace(cell, plan=plan)
    own = MatrixCell(plan, "run", ())
    return replace(own, sentence=next((cell.sentence for cell in cells if cell.id == own.id), sentence))


def gathered(run_dir: Path, sentence: str, cells: Sequence[MatrixCell]) -> CellRecord:
    """The record of one finished run."""
    run, verdict = Record(run_dir), validate(run_dir)
    manifest, seconds = run.manifest, step_seconds(run)
    cell = cell_of(run.plan, sentence, cells)
    return record(
        cell,
        verdict.digest,
        verdict.passed,
        tokens=verdict.tokens_compared,
        mismatches=verdict.mismatching_tokens,
        seconds=round(sum(seconds), 1),
        revision=in_one_word(manifest.repository),
        memory=memory(manifest),
        errors=verdict.errors[:ERRORS],
        step_seconds=seconds,
        detail=CellDetail(
            sentence=cell.sentence,
            device=device(manifest),
            **planned(run.plan),
            **left(str(run_dir)),
        ),
    )


def device(manifest: Manifest) -> str:
    """The GPUs of the train ranks, and how many of them share each."""
    ranks = Counter(rank.gpu.partition(" GPU-")[0] if rank.gpu else "CPU" for rank in manifest.readback.train)
    gpus = len({rank.gpu for rank in manifest.readback.train})
    return f"{gpus} x {', '.join(ranks)}; {len(manifest.readback.train) // gpus} train ranks on each"


@click.command(help=__doc__)
@click.option("--command", required=True, help="the command that made the runs")
@click.option("--sentence", default="", help="what runs show that are cells of no list")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="the evidence file")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
def main(command: str, sentence: str, output: Path, runs: tuple[Path, ...]) -> None:
    """See the module."""
    lists = [file for file in sorted((ROOT / "matrices").glob("*.yaml")) if "rlk.cells/1" in file.read_text("utf-8")]
    cells = [cell for file in lists for cell in listed(file, ROOT)]
    own, natives = list[CellRecord](), dict[str, NativeArm]()
    for run_dir in runs:
        plan, one = Record(run_dir).plan, gathered(run_dir, sentence, cells)
        if plan.config.mode == "native":
            ordinary = plan.config.model_copy(update={"mode": "consistency"})
            natives[cell_id(ordinary, plan.train, plan.rollout)] = NativeArm(
                tokens=one.tokens, mismatches=one.mismatches, step_seconds=one.step_seconds
            )
        else:
            own.append(one)
    versions = Record(runs[0]).manifest.versions
    devices = "; ".join(dict.fromkeys(one.detail.device for one in own if one.detail))
    found = tuple(one.model_copy(update={"native": natives.get(one.id)}) for one in own)
    evidence = MatrixEvidence(command=command, device=devices, versions=versions, cells=found)
    output.write_text(evidence.to_json(indent=1) + "\n", encoding="utf-8")
    bad = [one.id for one in own if not one.passed]
    click.echo(f"{len(own)} runs, {sum(one.tokens for one in own)} tokens compared, failed: {', '.join(bad) or 'none'}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
