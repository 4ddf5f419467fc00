"""One expensive run a cell, shared by many small asserts; all cells of a profile share a session."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path

import pytest

from rlk.driver.progress import LiveView
from rlk.driver.run import Outcome, execute_in
from rlk.driver.session import Session
from rlk.evidence.record import Record
from rlk.evidence.validate import validate
from rlk.evidence.verdict import Validation
from rlk.plan.cells import Cell
from rlk.plan.derive import Plan
from rlk.plan.naming import new_run_id
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
    """The one session that is alive; a plan of another profile ends it and starts its own."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self._session: Session | None = None

    def run(self, cell: Cell, plan: Plan) -> CellRun:
        """A run of the plan from the initial state."""
        run_id = new_run_id(plan.cell, datetime.now(), secrets.token_hex(2))
        config = plan.config.model_copy(update={"output_root": str(self.output)})
        plan = replace(plan, config=config).with_run_id(run_id)
        with LiveView(sys.stderr, plan.config.steps) as watch:
            if self._session is None or self._session.plan.profile != plan.profile:
                self.stop()
                self._session = Session(plan)
                self._session.start(watch)
            return CellRun(cell, plan, execute_in(self._session, plan, watch))

    def stop(self) -> None:
        """Ends the session's processes."""
        if self._session is not None:
            session, self._session = self._session, None
            session.stop()


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
