"""Faults that need live engines: of the synchronisation, the cache, the optimizer step; and two of the sampler.

One session of four trainer ranks and two engines of two, reset between runs; two steps, four prompts that come back in
the second step, so that a prefix cache which outlives its weights is hit. Each fault acts in engine 0, in one rank or
in the optimizer of all; `temperature-twice-both` in both engines alike, where only the oracle can see it. The twin of
all of them is the first run: the same plan without a fault passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlk.evidence.verdict import Validation
from rlk.plan.cells import Cell
from rlk.plan.config import RunConfig
from rlk.plan.derive import derive
from rlk.plan.faults import BY_NAME, FAULTS, Fault
from rlk.plan.profile import load_profile
from rlk.plan.shape import read_shape
from tests.consistency.conftest import CellRun, Sessions
from tests.plugin import ROOT

pytestmark = pytest.mark.cpu

PROMPTS, TP = 4, 2
PAGES = 12  # of 16 tokens in an engine: fewer than its eight samples fill, so that some are preempted
RATE = 1e-2  # at which also a norm gain near 1 moves by an ulp of bf16 in one step
STOPS = BY_NAME["nan-on-one-rank"]
LIVE = [fault for fault in FAULTS if fault.proof == "live engines" and fault is not STOPS]
ALSO = [BY_NAME[name] for name in ("logit-ulp", "temperature-twice-both")]
Runs = Callable[[str | None], CellRun]


@pytest.fixture(scope="module")
def run(sessions: Sessions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """A run with a fault, or without one."""
    profile = load_profile("tiny-cpu", ROOT)
    lines = Path(profile.prompts).read_text(encoding="utf-8").splitlines()
    prompts = tmp_path_factory.mktemp("prompts") / "four.jsonl"
    prompts.write_text("\n".join(sorted(lines, key=len)[-PROMPTS:]) + "\n", encoding="utf-8")
    shape = read_shape(Path(profile.model))
    page = profile.engine.block_size * shape.kv_bytes(TP, 1)
    profile = profile.model_copy(update={"prompts": str(prompts), "ranks": 4, "prompts_per_step": PROMPTS})
    profile = profile.limited({"kv_cache_bytes": PAGES * page})

    def make(inject: str | None) -> CellRun:
        options = {"tp": TP, "rollout_tp": TP, "mix": "0.7/0.95,2,1.3/0.99/20,0", "max_response_len": 24, "lr": RATE}
        options |= {"probe": True}
        plan = derive(RunConfig(**options, inject=inject), profile, shape)
        cell = Cell(id=plan.cell, sentence="A run with a fault on purpose.", config=options, timeout_s=300)
        return sessions.run(cell, plan)

    yield make
    sessions.stop()


@pytest.fixture(scope="module")
def clean(run: Runs) -> CellRun:
    """The plan of all these runs, without a fault."""
    return run(None)


def test_same_plan_without_a_fault_passes(clean: CellRun) -> None:
    assert clean.outcome.errors == ()
    assert clean.record.step(1).samples.cached_tokens.max() > 0
    assert clean.record.metrics[0].generated[0].preemptions > 0


@pytest.mark.parametrize("name", ["lm_head", "model.norm", "model.layers.0.self_attn.q_norm", "model.embed_tokens"])
def test_tensor_that_may_be_left_out_changes(clean: CellRun, name: str) -> None:
    before, after = clean.record.fingerprints[:2]
    assert before.trainer[f"{name}.weight"] != after.trainer[f"{name}.weight"]


def _assert_caught(fault: Fault, broken: CellRun) -> None:
    """The registry's checks are red, and verdict and manifest name the fault."""
    verdict = broken.verdict
    red = {check.name for check in verdict.checks if not check.passed}
    assert not broken.outcome.passed
    assert set(fault.caught_by) <= red
    assert "injected" in red
    assert any(fault.sentence in error for error in verdict.errors)
    assert any(fault.sentence in note for note in broken.record.manifest.notes)


@pytest.mark.parametrize("fault", [*LIVE, *ALSO], ids=[fault.name for fault in (*LIVE, *ALSO)])
def test_fault_in_live_processes_is_caught(
    fault: Fault, clean: CellRun, run: Runs, fault_report: Callable[[Fault, str, Validation], None]
) -> None:
    broken = run(fault.name)
    _assert_caught(fault, broken)
    fault_report(fault, "live engines", broken.verdict)


def test_session_after_the_faults_is_clean(clean: CellRun, run: Runs) -> None:
    again = run(None)
    assert again.outcome.errors == ()
    assert again.outcome.digest == clean.outcome.digest


def test_fault_that_stops_the_run_is_caught(
    clean: CellRun, run: Runs, fault_report: Callable[[Fault, str, Validation], None]
) -> None:
    """In the second step, after one that is good; the last of the module, since a session does not outlive it."""
    broken = run(f"{STOPS.name}@1")
    _assert_caught(STOPS, broken)
    assert [line.step for line in broken.record.metrics] == [0]
    assert "NaN" in str(broken.record.manifest.error)
    fault_report(STOPS, "live engines", broken.verdict)
