"""Hardware that a selection needs, cells as parameters, and the properties that a cell leaves in a JUnit report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression  # what -m means; pytest shows no public name of it

from rlk.driver.gpus import Gpu, visible_gpus
from rlk.evidence.verdict import Validation
from rlk.plan.cells import Cell, load_cells
from rlk.plan.faults import Fault
from tests import faults_table
from tests.faults_table import Row

ROOT = Path(__file__).parents[1]
NEEDED = {"gpu": 1, "h100": 8}


def hopper_gpus() -> list[Gpu]:
    """The Hopper GPUs that this process may use."""
    return [gpu for gpu in visible_gpus(os.environ) if gpu.hopper]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--write-faults`, `--write-engines`: write the evidence that this run makes into docs."""
    parser.addoption(
        "--write-faults", action="store_true", help="write the rows of docs/faults.md that this run proves"
    )
    parser.addoption(
        "--write-engines", action="store_true", help="write the rows of docs/evidence/engine-cpu.json of this run"
    )


@pytest.fixture(scope="session")
def fault_rows(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    """The rows of this run; written at its end where that was asked for."""
    rows: list[Row] = []
    yield rows
    if rows and request.config.getoption("--write-faults"):
        faults_table.write(rows)


@pytest.fixture
def fault_report(fault_rows: list[Row]) -> Callable[[Fault, str, Validation], None]:
    """Notes that a fault was caught, and where."""

    def note(fault: Fault, proof: str, verdict: Validation) -> None:
        fault_rows.append(faults_table.row(fault, proof, verdict))

    return note


def pytest_configure(config: pytest.Config) -> None:
    """`-m gpu` and `-m h100` where the hardware is not there end here, before any worker is started."""
    chosen = Expression.compile(config.option.markexpr or "cpu")
    for marker in NEEDED:
        if marker in config.option.markexpr and chosen.evaluate(lambda name, **_: name == marker):  # noqa: B023
            _need(marker)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selecting tests for hardware that is not there is an error: rows of skips would look like a pass."""
    if not hasattr(config, "workerinput"):  # an error in the collection of one of xdist's workers is lost on the way
        for marker in NEEDED:
            if any(item.get_closest_marker(marker) for item in items):
                _need(marker)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that came as far as this without its hardware fails."""
    for marker in NEEDED:
        if item.get_closest_marker(marker):
            _need(marker)


def _need(marker: str) -> None:
    found = hopper_gpus()
    if len(found) < NEEDED[marker]:
        raise pytest.UsageError(
            f"-m {marker} needs {NEEDED[marker]} Hopper GPUs, this machine has {len(found)}: run it on one that has, "
            f"or leave such tests out with -m 'not {marker}'"
        )


def cells(matrix: str) -> list[Cell]:
    """The cells of matrices/NAME.yaml, those of one topology side by side, so that they can share a session."""
    found = load_cells(ROOT / "matrices" / f"{matrix}.yaml")
    places = {cell.id.split("-")[0]: place for place, cell in reversed(list(enumerate(found)))}
    return sorted(found, key=lambda cell: places[cell.id.split("-")[0]])
