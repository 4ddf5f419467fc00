"""The evidence of a matrix: one record a cell, what is composed of what was run, and everything that is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from rlk.evidence.documents import Count, Document, Part
from rlk.evidence.matrix_detail import CellDetail
from rlk.plan.matrix import How, MatrixCell


class NativeArm(Part):
    """The same cell with ordinary operators: what it cost, and by how many tokens it was wrong."""

    tokens: Count
    mismatches: Count
    step_seconds: tuple[float, ...]


class CellRecord(Part):
    """One cell. A composed one compared no token and took no time; `sources` are the two that it follows from."""

    id: str
    train_tp: int
    train_cp: int
    rollout_tp: int
    rollout_cp: int
    sampling: str
    steps: Count
    tokens: Count
    """Response tokens whose log-probabilities were compared."""
    mismatches: Count
    seconds: float
    digest: str | None
    """The chained hash of the last step: equal where every part of every step is."""
    passed: bool
    how: How
    sources: tuple[str, ...]
    revision: str | None
    """Of the code that ran; ends with + and a hash where files were changed."""
    memory: dict[str, int]
    """Bytes by what they are of; empty where none were measured."""
    errors: tuple[str, ...]
    step_seconds: tuple[float, ...] = ()
    """Of each step, where they were asked for: what one costs beside the native arm's."""
    native: NativeArm | None = None
    """Where it was asked for."""
    detail: CellDetail | None = None
    """Of a cell of a flat list: what its run left beside the counts."""


class MatrixEvidence(Document):
    """What is known of a matrix. `command` made the last of it; it may have taken several sittings."""

    SCHEMA: ClassVar[str] = "rlk.matrix/1"

    command: str
    device: str
    versions: dict[str, str]
    cells: tuple[CellRecord, ...]


def record(cell: MatrixCell, digest: str | None, passed: bool, **facts: Any) -> CellRecord:
    """The record of a cell that was run, or composed; `facts` are the fields that say more than the plan does."""
    train, rollout = cell.plan.train, cell.plan.rollout
    unsaid: dict[str, Any] = {
        "tokens": 0,
        "mismatches": 0,
        "seconds": 0.0,
        "revision": None,
        "memory": {},
        "errors": (),
    }
    degrees = {"train_tp": train.tp, "train_cp": train.cp, "rollout_tp": rollout.tp, "rollout_cp": rollout.cp}
    planned = {"id": cell.id, "sampling": cell.sampling, "how": cell.how, "sources": cell.sources}
    steps = {"steps": cell.plan.config.steps}
    return CellRecord(digest=digest, passed=passed, **{**planned, **degrees, **steps, **unsaid, **facts})


def composed(cells: Iterable[MatrixCell], ran: Mapping[str, CellRecord]) -> Iterator[CellRecord]:
    """The records of the composed cells whose two sources were run.

    In the first source the cell's rollout topology made the tokens, in the second its train topology made the update.
    Digests are chained over every part of every step, so where the two are equal, each step of both had equal tokens
    and log-probabilities from equal weights, and equal weights from equal tokens: the pair, step by step, has them too.
    """
    for cell in cells:
        sources = [ran[name] for name in cell.sources if name in ran]
        if len(sources) == 2:  # a cell that is run has none
            row, column = sources
            equal = row.digest == column.digest and row.steps == column.steps == cell.plan.config.steps
            passed = equal and row.passed and column.passed
            yield record(cell, row.digest if equal else None, passed, revision=row.revision)


def problems(cells: Sequence[MatrixCell], evidence: MatrixEvidence) -> list[str]:
    """One line for everything that keeps the matrix from standing; none if it does."""
    lines, found = [], {one.id: one for one in evidence.cells}
    if len(found) != len(evidence.cells):
        lines.append("a cell stands twice")
    lines += [f"{one.id}: is no cell of the matrix" for one in evidence.cells if one.id not in {c.id for c in cells}]
    digests: dict[str, set[str | None]] = {}
    for cell in cells:
        one = found.get(cell.id)
        if one is None:
            lines.append(f"{cell.id}: {'was not run' if cell.how == 'run' else 'its sources were not run'}")
            continue
        digests.setdefault(one.sampling, set()).add(one.digest)
        if not one.passed or one.mismatches:
            lines.append(f"{cell.id}: failed: {'; '.join(one.errors) or 'its sources failed or differ'}")
        if (one.how, one.sources, one.steps) != (cell.how, cell.sources, cell.plan.config.steps):
            lines.append(
                f"{cell.id}: {one.how} with {one.steps} steps: the matrix has it {cell.how} with another number"
            )
        if one.how == "run" and not one.tokens:
            lines.append(f"{cell.id}: compared no token")
    lines += [f"{name}: {len(found)} digests over its topologies" for name, found in digests.items() if len(found) > 1]
    return lines
