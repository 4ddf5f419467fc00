"""One expensive run a cell, shared by many small asserts; all cells of a profile share a session."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

import pytest

from rlk.driver.pool import Pool
from rlk.driver.processes import time_limit
from rlk.driver.run import Outcome
from rlk.evidence.record import Record
from rlk.evidence.validate import validate
from rlk.evidence.verdict import Validation
from rlk.plan.cells import Cell
from rlk.plan.derive import Plan
from tests import engine_evidence
from tests.gpus import lease_for
from tests.plugin import ROOT, cells

OUTPUT = "RLK_TEST_OUTPUT"


@dataclass(frozen=True)
class CellRun:
    """A finished run of one cell and its evidence."""

    cell: Cell
    plan: Plan
    outcome: Outcome

    @property
    def run_dir(self) -> Path:
        """Where the evidence is; it is never deleted."""
        return Path(self.outcome.run_dir)

    @cached_property
    def record(self) -> Record:
        """The evidence, read."""
        return Record(self.run_dir)

    @cached_property
    def verdict(self) -> Validation:
        """The validator's verdict on the evidence."""
        return validate(self.run_dir)


class Sessions:
    """Runs cells in one session after the other, see rlk.driver.pool."""

    def __init__(self, output: Path) -> None:
        self.pool = Pool(output, lease=lambda profile: lease_for(profile, os.environ))

    def run(self, cell: Cell, plan: Plan) -> CellRun:
        """A run of the plan from the initial state, red once the cell's time is over."""
        with time_limit(cell.timeout_s, cell.id):
            return CellRun(cell, *self.pool.run(plan, sys.stderr))

    def stop(self) -> None:
        """Ends the session's processes, and gives its GPUs back after that."""
        self.pool.stop()


@pytest.fixture(scope="session")
def sessions() -> Iterator[Sessions]:
    """Runs of cells; the folder of their evidence is chosen by one variable and reported by every test."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    pool = Sessions(Path(os.environ.get(OUTPUT) or ROOT / "runs" / f"tests-{stamp}-{secrets.token_hex(2)}"))
    yield pool
    pool.stop()


@pytest.fixture(scope="session", params=cells("smoke"), ids=lambda cell: cell.id)
def smoke(request: pytest.FixtureRequest, sessions: Sessions) -> CellRun:
    """The run of each smoke cell, made once."""
    cell: Cell = request.param
    return sessions.run(cell, cell.plan(ROOT))


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Callable[[CellRun], None]:
    """Leaves a cell's id, manifest, digest and counts in the JUnit report of a test."""

    def leave(run: CellRun) -> None:
        record_property("cell", run.cell.id)
        record_property("manifest", str(run.run_dir / "manifest.json"))
        record_property("digest", run.outcome.digest)
        record_property("tokens_compared", run.outcome.tokens_compared)
        record_property("mismatching_tokens", run.outcome.mismatching_tokens)

    return leave


@pytest.fixture(scope="session")
def engine_report(request: pytest.FixtureRequest) -> Iterator[Callable[[engine_evidence.Row], None]]:
    """Notes what a line of matrices/engine.yaml gave; written at the end where that was asked for."""
    rows: list[engine_evidence.Row] = []
    yield rows.append
    if rows and request.config.getoption("--write-engines"):
        engine_evidence.write(rows)
