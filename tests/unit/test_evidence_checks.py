"""The list of checks is complete: each can fail, each counts what it looks at, each is documented."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlk.evidence.checks.registry import RUN_CHECKS, STEP_CHECKS, VERIFY_CHECKS
from rlk.evidence.checks.tally import Tally
from tests.unit import (
    test_evidence_coverage,
    test_evidence_logprobs,
    test_evidence_metrics,
    test_evidence_oracle,
    test_evidence_partition,
    test_evidence_settings,
    test_evidence_structure,
    test_evidence_weights,
)
from tests.unit.evidence_builder import build

DOCUMENT = Path(__file__).parents[2] / "docs" / "evidence.md"
NAMES = [check.name for check in (*RUN_CHECKS, *VERIFY_CHECKS, *STEP_CHECKS)]
THEMES = (
    test_evidence_coverage,
    test_evidence_logprobs,
    test_evidence_metrics,
    test_evidence_oracle,
    test_evidence_partition,
    test_evidence_settings,
    test_evidence_structure,
    test_evidence_weights,
)
FAULTS = [fault for theme in THEMES for fault in theme.FAULTS]

# Others must be red with these: they read the same columns or file, or (two_steps) no such plan can be made.
NEVER_ALONE = {"schemas", "lengths", "two_steps"}


@pytest.mark.parametrize("name", NAMES)
def test_every_check_has_a_record_that_fails_it(name: str) -> None:
    reds = [fault.reds for fault in FAULTS if name in fault.reds]
    assert reds
    assert name in NEVER_ALONE or {name} in reds


def test_names_of_checks_are_distinct() -> None:
    assert len(NAMES) == len(set(NAMES))


def test_check_that_compared_nothing_is_red() -> None:
    result = Tally("empty", "tokens").result()
    assert (result.passed, result.count) == (False, 0)
    assert result.message == "compared no tokens, so it shows nothing"


def test_first_failure_is_kept_and_all_are_counted() -> None:
    tally = Tally("some", "tokens")
    tally.add(10)
    tally.fail("first", number=2)
    tally.fail("second")
    result = tally.result()
    assert (result.passed, result.failures) == (False, 3)
    assert result.message == "first [3 of 10 tokens]"


def test_equal_values_of_other_types_are_different() -> None:
    tally = Tally("flags", "flags")
    tally.equal("file", "flag", 1, True)
    assert tally.failures == 1


def test_green_verdict_has_every_check_with_a_count(tmp_path: Path) -> None:
    _, validation = build(tmp_path)
    assert [check.name for check in validation.checks if check.name not in ("verdict", "seal")] == NAMES
    assert all(check.count > 0 for check in validation.checks)
    assert (validation.steps, validation.tokens_compared, validation.mismatching_tokens) == (2, 36, 0)
    assert validation.errors == ()


@pytest.mark.parametrize("name", [*NAMES, "verdict", "seal"])
def test_every_check_is_documented(name: str) -> None:
    assert f"| `{name}` |" in DOCUMENT.read_text(encoding="utf-8")


def test_validation_needs_no_torch_ray_or_vllm() -> None:
    code = (
        "import sys, rlk.evidence.writer, rlk.evidence.validate\n"
        "found = {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(found)}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
