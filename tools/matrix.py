"""Runs the matrix and writes its evidence: `make matrix`. Cells that passed in an earlier sitting are not run again."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import click

from rlk.driver.errors import RunError
from rlk.driver.gpus import visible_gpus
from rlk.driver.pool import Pool
from rlk.driver.processes import interruptible, time_limit
from rlk.driver.provenance import revision, versions
from rlk.driver.refusals import refuse
from rlk.driver.run import Outcome
from rlk.evidence.matrix import CellRecord, MatrixEvidence, NativeArm, composed, problems, record
from rlk.evidence.record import Record
from rlk.plan.derive import Plan, derive
from rlk.plan.errors import ConfigErrors
from rlk.plan.matrix import Matrix, MatrixCell, listed
from tools import matrix_page

ROOT = Path(__file__).parents[1]


def _run(pool: Pool, cell: MatrixCell, native: bool, before: CellRecord | None) -> CellRecord:
    """One cell from the initial state, with the time that its move to the topology took; then its native arm, where
    that is asked for. A cell that passed `before` lacks that arm alone."""
    began, code = time.monotonic(), revision()
    one = before
    if one is None:
        outcome = _arm(pool, cell.plan, cell.limit_s)
        one = _record(cell, outcome, code, round(time.monotonic() - began, 1))
        if native:
            one = one.model_copy(update={"step_seconds": _step_seconds(outcome), "memory": _memory(outcome)})
    if native and one.passed:
        config = cell.plan.config.model_copy(update={"mode": "native"})
        ordinary = _arm(pool, derive(config, cell.plan.profile, cell.plan.shape), cell.limit_s)
        if ordinary.steps:
            arm = NativeArm(
                tokens=ordinary.tokens_compared,
                mismatches=ordinary.mismatching_tokens,
                step_seconds=_step_seconds(ordinary),
            )
            one = one.model_copy(update={"native": arm})
    return one


def _arm(pool: Pool, plan: Plan, limit_s: int | None) -> Outcome:
    """One run. A run that could not even begin is a failed cell and does not end the sitting."""
    try:
        with time_limit(limit_s, plan.cell):
            return pool.run(plan, sys.stderr)[1]
    except (RunError, TimeoutError) as error:
        pool.stop()
        return Outcome(False, "", 0, 0, 0, None, 0.0, (str(error),))


def _step_seconds(outcome: Outcome) -> tuple[float, ...]:
    return tuple(round(one.seconds.total, 2) for one in Record(Path(outcome.run_dir)).metrics) if outcome.steps else ()


def _memory(outcome: Outcome) -> dict[str, int]:
    """Bytes that rank 0 of the trainer and of the first engine hold, by what they are of."""
    if not outcome.steps:
        return {}
    readback = Record(Path(outcome.run_dir)).manifest.readback
    train, engine = readback.train[0], readback.engines[0][0]
    held = {f"{one.name} ({one.during_rollout})": one.bytes for one in train.holdings}
    return {**held, "given back by the last offload": train.freed_bytes, "kv cache": engine.kv_cache_bytes}


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
    gpus = visible_gpus(os.environ)
    return "; ".join(gpu.name for gpu in gpus[: plan.profile.gpus_of(len(gpus))])


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
@click.option("--cells", "flat", default="", help="a flat list of cells, in place of the two files")
@click.option("--profile", default="", help="with --cells: run them on this profile instead of their own")
@click.option("--native", is_flag=True, help="run each cell once more with ordinary operators, for its cost and errors")
@click.option("--topologies", default=str(ROOT / "matrices" / "topologies.yaml"), help="both sides' topologies")
@click.option("--sampling", default=str(ROOT / "matrices" / "sampling.yaml"), help="sampling settings and their steps")
@click.option("--output", default=str(ROOT / "docs" / "evidence" / "matrix-cpu.json"), help="the evidence file")
@click.option("--page", default=str(ROOT / "docs" / "matrix.md"), help="the page with its table; '' for none")
@click.option("--runs", default=str(ROOT / "runs" / "matrix"), help="folder of the run directories")
@click.option("--only", default="", help="run only cells whose id contains this; the rest waits for another sitting")
@click.option("--minutes", default=0.0, help="begin no cell after so many minutes; 0 is no limit")
def main(
    flat: str,
    profile: str,
    native: bool,
    topologies: str,
    sampling: str,
    output: str,
    page: str,
    runs: str,
    only: str,
    minutes: float,
) -> None:
    """Runs every cell that has not passed yet, then says what is missing. Exit code 0 if nothing is."""
    if flat:
        cells = listed(Path(flat), ROOT, profile or None, only if profile else "")
    else:
        cells = list(Matrix.load(Path(topologies), Path(sampling), ROOT).cells())
    file, began = Path(output), time.monotonic()
    command = shlex.join(["python", "-m", "tools.matrix", *sys.argv[1:]])
    known = MatrixEvidence.from_json(file.read_text(encoding="utf-8"), str(file)) if file.exists() else None
    old = known.cells if known else ()
    done = {one.id: one for one in old if one.how == "run" and one.passed}
    failed = {one.id for one in old if not one.passed}
    ready = [cell for cell in cells if cell.how == "run" and not cell.plan.unbuilt and only in cell.id]
    wanted = [cell for cell in ready if cell.id not in done or (native and done[cell.id].native is None)]
    wanted.sort(key=lambda cell: cell.id in failed)  # what failed is tried again after what was not tried yet
    if wanted:
        try:
            refuse(wanted[0].plan, os.environ)
        except ConfigErrors as error:
            raise click.UsageError(str(error)) from error
    pool = Pool(Path(runs))
    with interruptible(), ExitStack() as ending:
        ending.callback(pool.stop)
        for i, cell in enumerate(wanted):
            if minutes and time.monotonic() - began > 60 * minutes:
                break
            click.echo(f"{datetime.now():%H:%M:%S} {i + 1}/{len(wanted)} {cell.id}", err=True)
            done[cell.id] = one = _run(pool, cell, native, done.get(cell.id))
            _write(file, cells, done.values(), command)
            click.echo(f"{'PASS' if one.passed else 'FAIL'} {one.tokens} tokens {one.digest} {one.seconds} s", err=True)
    # With nothing left to run, the file stays what its own command made; only the page is written anew.
    evidence = known if known and not wanted else _write(file, cells, done.values(), command)
    if page and flat:
        matrix_page.write_costs(Path(page), cells, evidence, file.name)
    elif page:
        matrix_page.write(Path(page), cells, evidence)
    missing = problems(cells, evidence)
    for line in missing:
        click.echo(line)
    tokens = sum(one.tokens for one in evidence.cells)
    click.echo(f"{len(evidence.cells)} of {len(cells)} cells, {tokens} tokens compared, {len(missing)} problems")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
