"""Makes one evidence file of run directories that exist: of those that `pytest -m gpu` made, or `rlk run`.

    python -m tools.gather --command "pytest -m gpu" --output docs/evidence/gpu-1.json RUN_DIR ...

Each directory is validated anew. A run with ordinary operators becomes the native arm of the run of the same cell.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import click

from rlk.evidence.matrix import CellRecord, MatrixEvidence, NativeArm, record
from rlk.evidence.matrix_detail import CellDetail, left, memory, planned
from rlk.evidence.record import Record
from rlk.evidence.schemas import Manifest
from rlk.evidence.validate import validate
from rlk.plan.cells import load_cells
from rlk.plan.matrix import MatrixCell
from rlk.plan.naming import cell_id

ROOT = Path(__file__).parents[1]


def gathered(run_dir: Path, sentence: str, sentences: dict[str, str]) -> CellRecord:
    """The record of one finished run."""
    run, verdict = Record(run_dir), validate(run_dir)
    manifest, seconds = run.manifest, tuple(round(one.seconds.total, 2) for one in run.metrics)
    cell = MatrixCell(run.plan, "run", ())
    return record(
        cell,
        verdict.digest,
        verdict.passed,
        tokens=verdict.tokens_compared,
        mismatches=verdict.mismatching_tokens,
        seconds=round(sum(seconds), 1),
        revision=revision(manifest),
        memory=memory(manifest),
        errors=verdict.errors[:8],
        step_seconds=seconds,
        detail=CellDetail(
            sentence=sentences.get(cell.id, sentence),
            device=device(manifest),
            **planned(run.plan),
            **left(str(run_dir)),
        ),
    )


def revision(manifest: Manifest) -> str | None:
    """As rlk.driver.provenance says it."""
    found = manifest.repository
    return f"{found.revision}+{found.patch_sha256[:12]}" if found.patch_sha256 else found.revision


def device(manifest: Manifest) -> str:
    """The GPUs of the train ranks, and how many of them share each."""
    ranks = Counter(rank.gpu.partition(" GPU-")[0] if rank.gpu else "CPU" for rank in manifest.readback.train)
    gpus = len({rank.gpu for rank in manifest.readback.train})
    return f"{gpus} x {', '.join(ranks)}; {len(manifest.readback.train) // gpus} train ranks on each"


def with_native_arms(records: list[CellRecord], natives: dict[str, CellRecord]) -> list[CellRecord]:
    """The records, each with the run of ordinary operators of its cell, where there is one."""
    out = []
    for one in records:
        if arm := natives.get(one.id):
            native = NativeArm(tokens=arm.tokens, mismatches=arm.mismatches, step_seconds=arm.step_seconds)
            one = one.model_copy(update={"native": native})
        out.append(one)
    return out


@click.command(help=__doc__)
@click.option("--command", required=True, help="the command that made the runs")
@click.option("--sentence", default="", help="what runs show that are cells of no list")
@click.option("--output", required=True, type=click.Path(path_type=Path), help="the evidence file")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
def main(command: str, sentence: str, output: Path, runs: tuple[Path, ...]) -> None:
    """See the module."""
    lists = [file for file in sorted((ROOT / "matrices").glob("*.yaml")) if "rlk.cells/1" in file.read_text("utf-8")]
    sentences = {cell.id: cell.sentence for file in lists for cell in load_cells(file)}
    own, natives = list[CellRecord](), dict[str, CellRecord]()
    for run_dir in runs:
        plan, one = Record(run_dir).plan, gathered(run_dir, sentence, sentences)
        if plan.config.mode == "native":
            ordinary = plan.config.model_copy(update={"mode": "consistency"})
            natives[cell_id(ordinary, plan.train, plan.rollout)] = one
        else:
            own.append(one)
    versions = Record(runs[0]).manifest.versions
    devices = "; ".join(dict.fromkeys(one.detail.device for one in own if one.detail))
    evidence = MatrixEvidence(
        command=command, device=devices, versions=versions, cells=tuple(with_native_arms(own, natives))
    )
    output.write_text(evidence.to_json(indent=1) + "\n", encoding="utf-8")
    bad = [one.id for one in own if not one.passed]
    click.echo(f"{len(own)} runs, {sum(one.tokens for one in own)} tokens compared, failed: {', '.join(bad) or 'none'}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
