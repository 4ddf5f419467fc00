"""Runs the matrix and writes its evidence: `make matrix`. Cells that passed in an earlier sitting are not run again.

With --cells FILE a flat list instead, such as matrices/gpu.yaml: each record then also holds what its run left.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from rlk.driver.pool import Pool
from rlk.driver.processes import interruptible
from rlk.driver.provenance import versions
from rlk.driver.refusals import refuse
from rlk.evidence.matrix import CellRecord, MatrixEvidence, composed, problems
from rlk.plan.errors import ConfigErrors
from rlk.plan.matrix import Matrix, MatrixCell, listed
from tools import matrix_page, matrix_run

ROOT = Path(__file__).parents[1]


class Sheet:
    """The evidence file of this command's cells: what was run of them is kept, and so are records of other cells."""

    def __init__(self, file: Path, cells: Sequence[MatrixCell]) -> None:
        self.file, self.cells = file, cells
        self.command = shlex.join(["python", "-m", "tools.matrix", *sys.argv[1:]])
        self.known = MatrixEvidence.from_json(file.read_text(encoding="utf-8"), str(file)) if file.exists() else None
        own, found = {cell.id: cell for cell in cells}, self.known.cells if self.known else ()
        self.others = tuple(one for one in found if one.id not in own)
        mine = [one for one in found if one.id in own and one.how == "run"]
        self.kept = {one.id: one for one in mine if matrix_run.same_cell(one, own[one.id])}

    def passed(self) -> dict[str, CellRecord]:
        """Cells that need not run again."""
        return {name: one for name, one in self.kept.items() if one.passed}

    def write(self) -> MatrixEvidence:
        """Everything that was run, and everything that is composed of it, in the order of the matrix."""
        found = self.kept | {one.id: one for one in composed(self.cells, self.kept)}
        own = tuple(found[cell.id] for cell in self.cells if cell.id in found)
        evidence = MatrixEvidence(
            command=self.command,
            device=matrix_run.device(self.cells[0].plan),
            versions=versions(),
            cells=(*own, *self.others),
        )
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".partial")
        partial.write_text(evidence.to_json(indent=1) + "\n", encoding="utf-8")
        partial.rename(self.file)  # a reader never sees half of it
        return evidence


def _changes(pairs: Sequence[str], steps: int | None) -> dict[str, Any]:
    """Option values by field name, from OPTION=JSON."""
    changes: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            changes[name] = json.loads(value)
        except ValueError as error:
            raise click.UsageError(f"--set {pair}: allowed is OPTION=JSON, a text in quotes") from error
    return {**changes, **({"steps": steps} if steps is not None else {})}


@click.command()
@click.option("--cells", "flat", default="", help="a flat list of cells, in place of the two files")
@click.option("--cell", "ids", multiple=True, help="with --cells: run this one; may be said again, in the order to run")
@click.option("--profile", default="", help="with --cells: run them on this profile instead of their own")
@click.option("--set", "pairs", multiple=True, help="with --cells: OPTION=JSON, by field name; null takes one away")
@click.option("--steps", type=int, help="with --cells: updates of each run")
@click.option("--native", is_flag=True, help="run each cell once more with ordinary operators, for its cost and errors")
@click.option("--topologies", default=str(ROOT / "matrices" / "topologies.yaml"), help="both sides' topologies")
@click.option("--sampling", default=str(ROOT / "matrices" / "sampling.yaml"), help="sampling settings and their steps")
@click.option("--output", help="the evidence file; docs/evidence/matrix-cpu.json, to be named with --cells")
@click.option("--page", help="the page with its table, '' for none; docs/matrix.md, none with --cells")
@click.option("--runs", default=str(ROOT / "runs" / "matrix"), help="folder of the run directories")
@click.option("--only", default="", help="run only cells whose id contains this; the rest waits for another sitting")
@click.option("--minutes", default=0.0, help="begin no cell after so many minutes; 0 is no limit")
def main(
    flat: str,
    ids: tuple[str, ...],
    profile: str,
    pairs: tuple[str, ...],
    steps: int | None,
    native: bool,
    topologies: str,
    sampling: str,
    output: str | None,
    page: str | None,
    runs: str,
    only: str,
    minutes: float,
) -> None:
    """Runs every cell that has not passed yet, then says what is missing. Exit code 0 if nothing is."""
    changes = _changes(pairs, steps)
    if flat and output is None:
        raise click.UsageError("--cells needs --output: the file for its evidence")
    if not flat and (ids or profile or changes):
        raise click.UsageError("--cell, --profile, --set and --steps choose and change cells of a list: give --cells")
    # Ids change with the options, and on another profile cells that are not asked for may not fit: choose before that.
    early, late = (only, "") if profile or changes else ("", only)
    try:
        if flat:
            # A file below this folder, or an embedded name.
            named = str(Path(profile).resolve()) if Path(profile).is_file() else profile or None
            cells = listed(Path(flat), ROOT, profile=named, only=early, ids=ids, changes=changes)
        else:
            cells = list(Matrix.load(Path(topologies), Path(sampling), ROOT).cells())
    except ConfigErrors as error:
        raise click.UsageError(str(error)) from error
    sheet = Sheet(Path(output or ROOT / "docs" / "evidence" / "matrix-cpu.json"), cells)
    done = sheet.passed()
    ready = [cell for cell in cells if cell.how == "run" and not cell.plan.unbuilt and late in cell.id]
    wanted = [cell for cell in ready if cell.id not in done or (native and done[cell.id].native is None)]
    if not ids:
        wanted.sort(key=lambda cell: cell.id in sheet.kept)  # what failed comes after what was not tried yet
    evidence = _sitting(sheet, wanted, Path(runs), minutes, native=native, detailed=bool(flat))
    if flat and page:
        matrix_page.write_costs(Path(page), cells, evidence, sheet.file.name)
    elif not flat and page != "":
        matrix_page.write(Path(page or ROOT / "docs" / "matrix.md"), cells, evidence)
    _say(sheet, evidence)


def _sitting(
    sheet: Sheet, wanted: Sequence[MatrixCell], runs: Path, minutes: float, *, native: bool, detailed: bool
) -> MatrixEvidence:
    """Runs what is wanted in one session after the other; the file is written after every cell."""
    if not wanted and sheet.known:
        return sheet.known  # the file stays what its own command made
    if wanted:
        try:
            refuse(wanted[0].plan, os.environ)
        except ConfigErrors as error:
            raise click.UsageError(str(error)) from error
    pool, began = Pool(runs), time.monotonic()
    with interruptible(), ExitStack() as ending:
        ending.callback(pool.stop)
        for i, cell in enumerate(wanted):
            if minutes and time.monotonic() - began > 60 * minutes:
                break
            click.echo(f"{datetime.now():%H:%M:%S} {i + 1}/{len(wanted)} {cell.id}", err=True)
            before = sheet.passed().get(cell.id)
            one = sheet.kept[cell.id] = matrix_run.run(pool, cell, native=native, detailed=detailed, before=before)
            sheet.write()
            click.echo(f"{'PASS' if one.passed else 'FAIL'} {one.tokens} tokens {one.digest} {one.seconds} s", err=True)
            for line in one.errors:
                click.echo(f"  {line}", err=True)
    return sheet.write()


def _say(sheet: Sheet, evidence: MatrixEvidence) -> None:
    """What is missing of this command's cells; ends with exit code 1 if anything is."""
    beside = {one.id for one in sheet.others}
    own = evidence.model_copy(update={"cells": tuple(one for one in evidence.cells if one.id not in beside)})
    missing = problems(sheet.cells, own)
    for line in missing:
        click.echo(line)
    tokens = sum(one.tokens for one in own.cells)
    click.echo(f"{len(own.cells)} of {len(sheet.cells)} cells, {tokens} tokens compared, {len(missing)} problems")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
