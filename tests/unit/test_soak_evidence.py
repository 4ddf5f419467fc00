"""The committed evidence of a run of 200 steps: it compared equal throughout, and every process stayed flat."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlk.evidence.resources import SoakEvidence, growth

ROOT = Path(__file__).parents[2]
STEPS = 200


@pytest.fixture(scope="module")
def soak() -> SoakEvidence:
    file = ROOT / "docs" / "evidence" / "soak-cpu.json"
    return SoakEvidence.from_json(file.read_text(encoding="utf-8"), str(file))


def test_the_long_run_passed(soak: SoakEvidence) -> None:
    assert (soak.passed, soak.length, soak.mismatches, soak.errors) == (True, STEPS, 0, ())
    assert soak.tokens > 0


def test_every_process_of_the_long_run_stayed_flat(soak: SoakEvidence) -> None:
    assert "driver" in soak.processes
    assert sum(role.startswith("train-") for role in soak.processes) == 8
    assert sum(role.startswith("engine-") for role in soak.processes) > 0
    assert list(growth(soak.processes)) == []
