"""One cell of a matrix: its run, its native arm, and the record of both. Whatever goes wrong is that cell's result."""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path

from rlk.driver.errors import RunError
from rlk.driver.gpus import visible_gpus
from rlk.driver.pool import Pool
from rlk.driver.processes import time_limit
from rlk.driver.provenance import revision
from rlk.driver.run import Outcome
from rlk.evidence.matrix import CellRecord, NativeArm, record
from rlk.evidence.matrix_detail import CellDetail, left, memory, planned
from rlk.evidence.record import Record
from rlk.evidence.validate import validate
from rlk.plan.derive import Plan, derive
from rlk.plan.matrix import MatrixCell

ERRORS = 8
"""Lines that a record keeps of a run that failed."""


def run(pool: Pool, cell: MatrixCell, *, native: bool, detailed: bool, before: CellRecord | None) -> CellRecord:
    """One cell from the initial state, with the time that its move to the topology took; then its native arm, where
    that is asked for. A cell that passed `before` lacks that arm alone."""
    one = before or _canonical(pool, cell, detailed)
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


def step_seconds(run: Record) -> tuple[float, ...]:
    """Of each step of a run."""
    return tuple(round(one.seconds.total, 2) for one in run.metrics)


def same_cell(one: CellRecord, cell: MatrixCell) -> bool:
    """Whether a record with this cell's id is of the same profile and options; one without a detail only has its id."""
    now = planned(cell.plan)
    return one.detail is None or {name: getattr(one.detail, name) for name in now} == now


def device(plan: Plan) -> str:
    """The CPU, or the GPUs that the ranks of this plan are spread over, with their memory and how many share each."""
    if plan.profile.device == "cpu":
        return f"{platform.processor() or platform.machine()}, CPU"
    found = visible_gpus(os.environ)
    used = found[: plan.profile.gpus_of(len(found))]
    names = "; ".join(f"{gpu.name} {gpu.memory >> 20} MiB" for gpu in used)
    return f"{names}; {plan.ranks // max(1, len(used))} of {plan.ranks} ranks of either side on each"


def _canonical(pool: Pool, cell: MatrixCell, detailed: bool) -> CellRecord:
    began, code = time.monotonic(), revision()
    outcome = _arm(pool, cell.plan, cell.limit_s)
    one = record(
        cell,
        outcome.digest,
        outcome.passed,
        tokens=outcome.tokens_compared,
        mismatches=outcome.mismatching_tokens,
        steps=outcome.steps,
        seconds=round(time.monotonic() - began, 1),
        revision=code,
        errors=outcome.errors,
    )
    if not detailed:
        return one
    try:
        more = {"step_seconds": _step_seconds(outcome), "memory": _memory(outcome), "detail": _detail(cell, outcome)}
    except Exception as error:  # a run that failed may hold anything, and the next cell must still run
        return one.model_copy(update={"passed": False, "errors": (*one.errors, f"its record: {_line(error)}")})
    return one.model_copy(update=more)


def _arm(pool: Pool, plan: Plan, limit_s: int | None) -> Outcome:
    """One run. A run that could not even begin is a failed cell and does not end the sitting."""
    try:
        with time_limit(limit_s, plan.cell):
            outcome = pool.run(plan, sys.stderr)[1]
    except Exception as error:
        outcome = _broken_off(pool, error)
    if outcome.passed or not outcome.run_dir:
        return outcome
    return replace(outcome, errors=tuple(dict.fromkeys((*outcome.errors, *_verdict_errors(outcome))))[:ERRORS])


def _broken_off(pool: Pool, error: Exception) -> Outcome:
    """The outcome of a run that returned none: what its directory says, if it came to have one."""
    lines, run_dir = [_line(error)], pool.run_dir
    try:
        pool.stop()
    except Exception as failure:
        lines.append(f"its session did not end well: {_line(failure)}")
    nothing = Outcome(False, "", 0, 0, 0, None, 0.0, tuple(lines))
    if run_dir is None or not run_dir.is_dir():
        return nothing
    try:
        found = validate(run_dir)
    except Exception as failure:
        return replace(nothing, run_dir=str(run_dir), errors=(*lines, f"{run_dir.name}: {_line(failure)}"))
    counts = (found.steps, found.tokens_compared, found.mismatching_tokens, found.digest)
    return Outcome(False, str(run_dir), *counts, 0.0, tuple(lines))


def _verdict_errors(outcome: Outcome) -> tuple[str, ...]:
    try:
        return validate(Path(outcome.run_dir)).errors
    except Exception as failure:
        return (f"{Path(outcome.run_dir).name}: {_line(failure)}",)


def _line(error: Exception) -> str:
    kind = "" if isinstance(error, RunError | TimeoutError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())[:500]


def _step_seconds(outcome: Outcome) -> tuple[float, ...]:
    return step_seconds(Record(Path(outcome.run_dir))) if outcome.steps else ()


def _memory(outcome: Outcome) -> dict[str, int]:
    return memory(Record(Path(outcome.run_dir)).manifest) if outcome.steps else {}


def _detail(cell: MatrixCell, outcome: Outcome) -> CellDetail:
    own = {"sentence": cell.sentence, "device": device(cell.plan)}
    return CellDetail(**own, **planned(cell.plan), **left(outcome.run_dir))
