"""Hardware that a selection needs, cells as parameters, and the properties that a cell leaves in a JUnit report."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlk.evidence.verdict import Validation
from rlk.plan.cells import Cell, load_cells
from rlk.plan.faults import Fault
from tests import faults_table
from tests.faults_table import Row

ROOT = Path(__file__).parents[1]
NEEDED = {"gpu": 1, "h100": 8}
HOPPER = ("H100", "H200", "H800", "H20")


def hopper_gpus() -> list[str]:
    """Names of the Hopper GPUs of this machine, as the driver lists them; no library is initialised for it."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return []
    names = done.stdout.splitlines() if done.returncode == 0 else []
    return [name.strip() for name in names if any(word in name.split() for word in HOPPER)]


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selecting tests for hardware that is not there is an error: rows of skips would look like a pass."""
    for marker, count in NEEDED.items():
        asked = any(word == marker for word in config.option.markexpr.replace("(", " ").replace(")", " ").split())
        excluded = f"not {marker}" in config.option.markexpr
        if asked and not excluded and len(found := hopper_gpus()) < count:
            raise pytest.UsageError(
                f"-m {marker} needs {count} Hopper GPUs, this machine has {len(found)}: run it on one that has"
            )


def cells(matrix: str) -> list[Cell]:
    """The cells of matrices/NAME.yaml, those of one topology side by side, so that they can share a session."""
    found = load_cells(ROOT / "matrices" / f"{matrix}.yaml")
    places = {cell.id.split("-")[0]: place for place, cell in reversed(list(enumerate(found)))}
    return sorted(found, key=lambda cell: places[cell.id.split("-")[0]])
