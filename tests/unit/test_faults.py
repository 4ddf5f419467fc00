"""Every fault that needs no live engines is caught by the checks that the registry names; the twin is a clean run.

What each fault needs to show is stated where it differs from the usual small step: order faults need many tokens,
because a last bit of an fp32 sum rarely survives the rounding to bf16; ties need low logits, where bf16 is coarse
against the distance of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlk.driver.record_faults import apply, reported
from rlk.evidence.verdict import Validation
from rlk.plan.derive import derive
from rlk.plan.errors import ConfigErrors
from rlk.plan.faults import BY_NAME, FAULTS, Fault, Injection, injection
from rlk.plan.resolve import resolve
from tests import faults_table
from tests.unit import one_process
from tests.unit.evidence_builder import Draft, build, red
from tests.unit.tiny import SHAPE, profile

Report = Callable[[Fault, str, Validation], None]
MANY: dict[str, Any] = {"mix": "3,4", "max_response_len": 48, "samples": 4}
SMALL = {"ranks": 2, "rollout_tp": 1}
NEEDS: dict[str, dict[str, Any]] = {
    "left-to-right": {**MANY, "seed": 6},
    "split-k": MANY,
    "wrong-key": MANY,
    "no-truncation-both": {"mix": "1/0.5,1.3/0.6"},
    "ties-kept": {"mix": "2/1/20,2/1/40,3/1/60"},
    "top-p-first": {"mix": "2/0.9/6,1.5/0.8/4"},
}


def _named(proof: str) -> pytest.MarkDecorator:
    found = [fault for fault in FAULTS if fault.proof == proof]
    return pytest.mark.parametrize("fault", found, ids=[fault.name for fault in found])


@_named("one process")
def test_fault_of_one_process_is_caught(fault: Fault, tmp_path: Path, fault_report: Report) -> None:
    small = SMALL if fault.acts == "policy" else {}
    verdict, _ = one_process.run(tmp_path, fault.name, **small, **NEEDS.get(fault.name, {}))
    assert not verdict.passed
    assert set(fault.caught_by) <= red(verdict)
    fault_report(fault, "one process", verdict)


@pytest.mark.parametrize("options", [{}, MANY, SMALL | NEEDS["ties-kept"]], ids=str)
def test_same_step_without_a_fault_passes(options: dict[str, Any], tmp_path: Path) -> None:
    verdict, _ = one_process.run(tmp_path, **options)
    assert verdict.errors == ()
    assert verdict.tokens_compared > 30


@_named("recorded run")
def test_fault_of_a_record_is_caught(fault: Fault, tmp_path: Path, fault_report: Report) -> None:
    put = Injection(fault, None)

    def job(draft: Draft) -> None:
        draft.ray = reported(draft.ray, put)

    _, verdict = build(tmp_path, before=job, disk=lambda run: apply(run, put))
    assert set(fault.caught_by) <= red(verdict)
    fault_report(fault, "recorded run", verdict)


def test_fault_in_another_step_does_nothing(tmp_path: Path) -> None:
    late, _ = one_process.run(tmp_path, "temperature-twice@1", steps=2)
    assert late.mismatching_tokens == 0 < late.tokens_compared
    assert "injected" in red(late)


def test_verdict_names_the_fault_that_nothing_else_sees(tmp_path: Path) -> None:
    _, verdict = build(tmp_path, inject="stale-weights@1", confirm_inject=True)
    assert red(verdict) == {"injected"}
    assert verdict.errors == (
        "injected: fault stale-weights was injected on purpose in step 1: engine 0 keeps its old weights "
        "[1 of 1 plans]",
    )


def test_names_of_faults_are_distinct() -> None:
    assert len(BY_NAME) == len(FAULTS) >= 40


def test_injection_reads_name_and_step() -> None:
    assert injection("lr-zero") == Injection(BY_NAME["lr-zero"], None)
    assert injection("lr-zero@3") == Injection(BY_NAME["lr-zero"], 3)
    assert [injection("lr-zero@3").acts(step) for step in (2, 3)] == [False, True]
    assert injection("lr-zero").acts(7)


REFUSED = [
    ({"--inject": "lr-zero"}, False, "profile tiny is no test profile: a fault makes the run worthless; --confirm"),
    ({"--inject": "no-such"}, True, "--inject no-such: allowed is one of ranks-swapped, "),
    ({"--inject": "lr-zero@2"}, True, "--inject lr-zero@2: allowed are steps 0 to 1: they count from 0"),
    ({"--inject": "lr-zero@"}, True, "--inject lr-zero@: allowed is NAME or NAME@STEP"),
    ({"--inject": "lr-zero", "--mode": "native"}, True, "native mode is expected to mismatch without a fault"),
]


@pytest.mark.parametrize(("said", "test", "says"), REFUSED, ids=[" ".join(said.values()) for said, _, _ in REFUSED])
def test_fault_that_cannot_act_is_refused(said: dict[str, str], test: bool, says: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        resolve(said, {}, profile(test=test), SHAPE)
    (line,) = caught.value.errors
    assert says in line


def test_confirmed_fault_is_in_notes_and_command() -> None:
    config = resolve({"--inject": "lr-zero@1", "--confirm-inject": True}, {}, profile(), SHAPE)
    plan = derive(config, profile(), SHAPE)
    assert "--inject lr-zero@1 --confirm-inject" in plan.commands[0]
    assert any(note.startswith("Fault lr-zero was injected on purpose in step 1") for note in plan.notes)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_every_fault_has_a_row_that_caught_it(fault: Fault) -> None:
    rows = [row for row in faults_table.read() if row.name == fault.name and row.proof == fault.proof]
    assert len(rows) == 1, "run `make faults`"
    assert set(fault.caught_by) <= set(rows[0].caught_by)
    assert rows[0].located


def test_nine_of_ten_faults_that_ranks_can_see_are_located_to_op_and_rank() -> None:
    rows = [row for row in faults_table.read() if faults_table.one_sided(row)]
    names = {row.name for row in rows}
    assert len(names) > 25
    assert 10 * len({row.name for row in rows if faults_table.by_probe(row)}) >= 9 * len(names)


def test_page_is_what_the_rows_give() -> None:
    assert faults_table.DOCUMENT.read_text(encoding="utf-8") == faults_table.page(faults_table.read())
