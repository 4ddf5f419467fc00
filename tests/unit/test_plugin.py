"""The suite's own pytest plugin in a sandbox: selection, ids, refusals, and what a cell leaves in a JUnit report.

The sandbox runs the real plugin over small stand-in tests, with and without xdist, since properties and parameter order
are what xdist is known to lose.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from tests import plugin
from tests.plugin import ROOT, cells, hopper_gpus

STAND_IN = """
import pytest
from tests.plugin import cells

@pytest.fixture(scope="session", params=cells("smoke"), ids=lambda cell: cell.id)
def cell(request):
    return request.param

@pytest.mark.cpu
def test_cell_leaves_properties(cell, record_property):
    record_property("cell", cell.id)
    record_property("digest", "0" * 64)
"""


def run(folder: Path, *arguments: str, seed: str = "0", body: str = STAND_IN) -> subprocess.CompletedProcess[str]:
    (folder / "test_stand_in.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-p", "tests.plugin", "-c", str(ROOT / "pytest.ini"), "--rootdir", "."]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
    return subprocess.run(
        [*command, *arguments, "test_stand_in.py"], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("workers", ["0", "2"])
def test_every_cell_leaves_its_properties_in_junit(tmp_path: Path, workers: str) -> None:
    done = run(tmp_path, "-n", workers, "--junitxml=report.xml", "-W", "error::pytest.PytestWarning")
    assert done.returncode == 0, done.stdout
    properties = Counter(
        (entry.get("name"), entry.get("value"))
        for case in ElementTree.parse(tmp_path / "report.xml").iter("testcase")
        for entry in case.iter("property")
    )
    assert properties == Counter(
        [("cell", cell.id) for cell in cells("smoke")] + [("digest", "0" * 64) for _ in cells("smoke")]
    )


def test_collected_ids_ignore_the_hash_seed(tmp_path: Path) -> None:
    listings = {run(tmp_path, "--collect-only", "-q", seed=seed).stdout for seed in ("0", "1", "2", "3", "4")}
    (listing,) = {"\n".join(line for line in text.splitlines() if "::" in line) for text in listings}
    assert listing.count("\n") + 1 == len(cells("smoke"))


def test_tensor_degrees_name_one_cell_each() -> None:
    ids = [cell.id for cell in cells("smoke")]
    for degrees in (name.split("-")[0] for name in ids):
        assert sum(degrees in name for name in ids) == 1, degrees


def test_selection_by_degrees_runs_that_cell(tmp_path: Path) -> None:
    done = run(tmp_path, "-q", "-k", "tp2_rtp4")
    assert "1 passed" in done.stdout


HARDWARE = """
import pytest

@pytest.mark.gpu
def test_needs_one():
    pass

@pytest.mark.h100
def test_needs_eight():
    pass

def test_needs_none():
    pass
"""


@pytest.mark.parametrize(
    ("expression", "marker", "count", "workers"),
    [("h100", "h100", 8, "2"), ("not full", "gpu", 1, "0"), ("not full", "gpu", 1, "2")],
)
def test_hopper_tests_are_an_error_without_hopper(
    tmp_path: Path, expression: str, marker: str, count: int, workers: str
) -> None:
    done = run(tmp_path, "-n", workers, "-m", expression, body=HARDWARE)
    if len(hopper_gpus()) >= count:
        pytest.fail("this machine has Hopper GPUs: hide them with CUDA_VISIBLE_DEVICES= to run the unit tests")
    assert done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert f"-m {marker} needs {count} Hopper GPUs, this machine has" in done.stderr + done.stdout
    assert "skipped" not in done.stdout


def test_hopper_tests_that_are_not_selected_are_no_error(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "not (gpu or h100)", body=HARDWARE)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 2 deselected" in done.stdout


@pytest.mark.parametrize(
    ("expression", "refused"),
    [
        ("gpu", True),
        ("cpu or h100", True),
        ("gpu and not h100", True),
        ("not gpu and not h100 and not full", False),
        ("not (gpu or h100)", False),
        ("not h100", False),
        ("full and cpu", False),
        ("", False),
    ],
)
def test_expression_that_asks_for_hardware_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, expression: str, refused: bool
) -> None:
    monkeypatch.setattr(plugin, "hopper_gpus", lambda: [])
    config = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
    with pytest.raises(pytest.UsageError, match="Hopper GPUs, this machine has 0") if refused else nullcontext():
        plugin.pytest_configure(config)  # type: ignore[arg-type]


def test_unknown_markers_are_refused(tmp_path: Path) -> None:
    done = run(tmp_path, body="import pytest\n@pytest.mark.gpuu\ndef test_misspelt():\n    pass\n")
    assert done.returncode != 0
    assert "'gpuu' not found in" in done.stdout
