"""Runs cells of a matrix on the GPUs of this machine, one session for all, and writes what each came to.

    python tools/gpu_cells.py --out docs/evidence/gpu-1.json [--matrix matrices/gpu.yaml] [--steps 2] [CELL ...]

The file is written anew after every cell, so what ran before a failure is kept. The exit code is 1 if any cell failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click

from rlk.driver.gpus import visible_gpus
from rlk.driver.pool import Pool
from rlk.driver.provenance import repository, versions
from rlk.driver.run import Outcome
from rlk.evidence.record import Record
from rlk.plan.cells import Cell, load_cells
from rlk.plan.derive import Plan, derive
from rlk.plan.profile import load_profile

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "rlk.gpu-cells/1"


def planned(cell: Cell, profile: str | None, changes: dict[str, Any]) -> Plan:
    """The cell's plan, under another profile or with other option values where those are given."""
    plan = cell.plan(ROOT)
    machine = load_profile(profile, ROOT) if profile else plan.profile
    return derive(plan.config.model_copy(update=changes), machine, plan.shape)


def run(pool: Pool, cell: Cell, plan: Plan) -> dict[str, Any]:
    """One cell; whatever goes wrong is its result, and the next one must still run."""
    try:
        return told(cell, *pool.run(plan, sys.stderr))
    except Exception as error:
        pool.stop()
        return {"id": plan.cell, "passed": False, "errors": [f"{type(error).__name__}: {error}"]}


def told(cell: Cell, plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """What a finished run says of itself; events and times step by step."""
    said: dict[str, Any] = {
        "id": plan.cell,
        "sentence": cell.sentence,
        "passed": outcome.passed,
        "tokens": outcome.tokens_compared,
        "mismatches": outcome.mismatching_tokens,
        "digest": outcome.digest,
        "seconds": outcome.seconds,
        "errors": list(outcome.errors)[:8],
        "transport": plan.transport,
        "graph_sizes": plan.graph_sizes,
        "offload": plan.offload,
    }
    try:
        record = Record(Path(outcome.run_dir))
        manifest = record.manifest
        said["steps"] = [
            {
                "seconds": m.seconds.model_dump(),
                "grad_norm": m.grad_norm,
                "nonzero_advantages": m.nonzero_advantages,
                "response_tokens": m.response_tokens,
                "events": [g.model_dump() for g in m.generated],
            }
            for m in record.metrics
        ]
        before, after = record.fingerprints[0].trainer, record.fingerprints[-1].trainer
        said["tensors_changed"] = f"{sum(before[n] != after[n] for n in before)} of {len(before)}"
        said["kernels"] = [k.model_dump() for k in manifest.kernels]
        said["train"] = [r.model_dump(include={"gpu", "holdings", "freed_bytes"}) for r in manifest.readback.train]
        said["engines"] = [[r.gpu for r in ranks] for ranks in manifest.readback.engines]
    except Exception as error:  # a failed run may hold none of this, and the next cell must still run
        said["incomplete"] = f"{type(error).__name__}: {error}"[:300]
    return said


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--matrix", type=click.Path(path_type=Path), default=ROOT / "matrices" / "gpu.yaml")
@click.option("--profile", help="A profile in the place of the cells' own.")
@click.option("--steps", type=int)
@click.option("--runs", default="runs", help="Folder of the run directories.")
@click.option("--limit", type=float, default=1e9, help="Seconds after which no further cell is begun.")
@click.option("--set", "changes", multiple=True, help="OPTION=JSON, by field name.")
@click.argument("ids", nargs=-1)
def main(
    out: Path, matrix: Path, profile: str | None, steps: int | None, runs: str, limit: float,
    changes: tuple[str, ...], ids: tuple[str, ...],
) -> None:  # fmt: skip
    """See the module."""
    start = time.monotonic()
    options = {name: json.loads(value) for name, _, value in (change.partition("=") for change in changes)}
    options |= {"steps": steps} if steps else {}
    known = {cell.id: cell for cell in load_cells(matrix)}
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "command": sys.argv,
        "gpus": [f"{gpu.name} {gpu.memory >> 20} MiB {gpu.uuid}" for gpu in visible_gpus(os.environ)],
        "versions": versions(),
        "repository": repository().model_dump(),
        "cells": [],
    }
    pool = Pool(Path(runs))
    for cell in [known[name] for name in ids] or known.values():
        if time.monotonic() - start > limit:
            report["not_run"] = [*report.get("not_run", []), cell.id]
            continue
        report["cells"].append(run(pool, cell, planned(cell, profile, options)))
        out.write_text(json.dumps(report, indent=1) + "\n")
    pool.stop()
    sys.exit(not all(one["passed"] for one in report["cells"]))


if __name__ == "__main__":
    main()
