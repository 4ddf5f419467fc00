"""Runs the matrix and writes its evidence: `make matrix`. Cells that passed in an earlier sitting are not run again."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import click

from rlk.driver.pool import Pool
from rlk.driver.provenance import revision, versions
from rlk.driver.run import Outcome
from rlk.evidence.matrix import CellRecord, MatrixEvidence, composed, problems, record
from rlk.plan.derive import Plan
from rlk.plan.matrix import Matrix, MatrixCell
from tools import matrix_page

ROOT = Path(__file__).parents[1]


def _run(pool: Pool, cell: MatrixCell) -> CellRecord:
    """One cell from the initial state, with the time that its move to the topology took."""
    began, code = time.monotonic(), revision()
    _, outcome = pool.run(cell.plan, sys.stderr)
    return _record(cell, outcome, code, round(time.monotonic() - began, 1))


def _record(cell: MatrixCell, outcome: Outcome, code: str | None, seconds: float) -> CellRecord:
    return record(
        cell,
        outcome.digest,
        outcome.passed,
        tokens=outcome.tokens_compared,
        mismatches=outcome.mismatching_tokens,
        steps=outcome.steps,
        seconds=seconds,
        revision=code,
        errors=outcome.errors,
    )


def _device(plan: Plan) -> str:
    if plan.profile.device == "cpu":
        return f"{platform.processor() or platform.machine()}, CPU"
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return "; ".join(subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines())


def _write(output: Path, cells: list[MatrixCell], ran: Iterable[CellRecord], command: str) -> MatrixEvidence:
    """Everything that was run, and everything that is composed of it, in the order of the matrix."""
    known = {one.id: one for one in ran}
    known |= {one.id: one for one in composed(cells, known)}
    evidence = MatrixEvidence(
        command=command,
        device=_device(cells[0].plan),
        versions=versions(),
        cells=tuple(known[cell.id] for cell in cells if cell.id in known),
    )
    partial = output.with_suffix(".partial")
    partial.write_text(evidence.to_json(indent=1) + "\n", encoding="utf-8")
    partial.rename(output)  # a reader never sees half of it
    return evidence


@click.command()
@click.option("--topologies", default=str(ROOT / "matrices" / "topologies.yaml"), help="both sides' topologies")
@click.option("--sampling", default=str(ROOT / "matrices" / "sampling.yaml"), help="sampling settings and their steps")
@click.option("--output", default=str(ROOT / "docs" / "evidence" / "matrix-cpu.json"), help="the evidence file")
@click.option("--page", default=str(ROOT / "docs" / "matrix.md"), help="the page with its table; '' for none")
@click.option("--runs", default=str(ROOT / "runs" / "matrix"), help="folder of the run directories")
@click.option("--only", default="", help="run only cells whose id contains this; the rest waits for another sitting")
@click.option("--minutes", default=0.0, help="begin no cell after so many minutes; 0 is no limit")
def main(topologies: str, sampling: str, output: str, page: str, runs: str, only: str, minutes: float) -> None:
    """Runs every cell that has not passed yet, then says what is missing. Exit code 0 if nothing is."""
    matrix = Matrix.load(Path(topologies), Path(sampling), ROOT)
    cells, file, began = list(matrix.cells()), Path(output), time.monotonic()
    command = shlex.join(["python", "-m", "tools.matrix", *sys.argv[1:]])
    old = MatrixEvidence.from_json(file.read_text(encoding="utf-8"), str(file)).cells if file.exists() else ()
    done = {one.id: one for one in old if one.how == "run" and one.passed}
    ready = [cell for cell in cells if cell.how == "run" and not cell.plan.unbuilt]
    wanted = [cell for cell in ready if cell.id not in done and only in cell.id]
    pool = Pool(Path(runs))
    try:
        for i, cell in enumerate(wanted):
            if minutes and time.monotonic() - began > 60 * minutes:
                break
            click.echo(f"{datetime.now():%H:%M:%S} {i + 1}/{len(wanted)} {cell.id}", err=True)
            done[cell.id] = one = _run(pool, cell)
            _write(file, cells, done.values(), command)
            click.echo(f"{'PASS' if one.passed else 'FAIL'} {one.tokens} tokens {one.digest} {one.seconds} s", err=True)
    finally:
        pool.stop()
    evidence = _write(file, cells, done.values(), command)
    if page:
        matrix_page.write(Path(page), cells, evidence)
    missing = problems(cells, evidence)
    for line in missing:
        click.echo(line)
    tokens = sum(one.tokens for one in evidence.cells)
    click.echo(f"{len(evidence.cells)} of {len(cells)} cells, {tokens} tokens compared, {len(missing)} problems")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
