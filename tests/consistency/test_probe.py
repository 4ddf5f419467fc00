"""A probed run computes the same bits as one that is not, and every rank's rows of every op agree.

Runs of one session, with tensor parallelism in the trainer (2) and in the engines (4, and 2 with 2 context-parallel
ranks), so that ops are cut in shards and have replicas; prefix cache and chunks are on, so that some rows are computed
by nobody and others by several, and context-parallel ranks share out those of a prompt. A fault of one engine's
operators is then located to op, token and the rank that computed it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlk.evidence.compare import compare
from rlk.evidence.probe import Probe
from rlk.evidence.program import forward
from rlk.evidence.validate import validate
from rlk.plan.cells import Cell
from rlk.plan.topology import VIRTUAL
from tests.consistency.conftest import CellRun, Sessions
from tests.plugin import ROOT

pytestmark = pytest.mark.cpu

FAULT = "split-k"
SPLIT = "tp2_rtp2-cp4-rcp2-t0.7-p0.95-koff"
"""The cell whose engines have context-parallel ranks."""
ENGINES = {"tp2_rtp4-cp4-t0.7-p0.95-koff": (4, 1), SPLIT: (2, 2)}
FLIPPED = {"tp2_rtp4-cp4-t0.7-p0.95-koff": 5, SPLIT: 1}
"""The second shard that rank 2 of an engine has."""
Runs = tuple[CellRun, CellRun]


def run_of(sessions: Sessions, name: str, **changes: object) -> CellRun:
    """A run of this cell, with changes of its config that are no part of its name."""
    rollout_tp, rollout_cp = ENGINES[name]
    topology = {"tp": 2, "rollout_tp": rollout_tp, "rollout_cp": rollout_cp}
    cell = Cell(
        id=name,
        sentence="Made by a test, once with a probe and once without.",
        config={**topology, "temperature": 0.7, "top_p": 0.95},
        timeout_s=300,
    )
    plain = cell.plan(ROOT)
    return sessions.run(cell, replace(plain, config=plain.config.model_copy(update=changes)))


@pytest.fixture(scope="module", params=ENGINES)
def runs(request: pytest.FixtureRequest, sessions: Sessions) -> Runs:
    """Without and with a probe."""
    return run_of(sessions, request.param), run_of(sessions, request.param, probe=True)


@pytest.fixture(scope="module")
def faulty(sessions: Sessions) -> CellRun:
    """A probed run of context-parallel engines, of which the first sums its products in two halves."""
    return run_of(sessions, SPLIT, probe=True, inject=FAULT)


def rows_of(probe: Probe) -> set[tuple[int, int]]:
    """Sample and position of the rows that a rank of an engine computed."""
    samples, positions, _ = probe.rows("rollout", forward(1)[0])
    return set(zip(samples.tolist(), positions.tolist(), strict=True))


def test_probed_run_passes_and_compares_rows(runs: Runs) -> None:
    _, probed = runs
    assert probed.outcome.errors == ()
    layers, tokens = probed.plan.shape.layers, probed.outcome.tokens_compared
    assert probed.verdict.check("probe").count > len(forward(layers)) * tokens


def test_probe_changes_no_bit_of_the_trajectory(runs: Runs, record_property: Callable[[str, object], None]) -> None:
    plain, probed = runs
    assert plain.record.trajectory == probed.record.trajectory
    assert compare(plain.run_dir, probed.run_dir).equal
    seconds = [sum(m.seconds.total for m in run.record.metrics) for run in runs]
    record_property("seconds_without_and_with_probe", seconds)


def test_cached_rows_are_recorded_by_nobody(runs: Runs) -> None:
    """The event behind missing rows: without a cache hit the check would not have met one."""
    _, probed = runs
    samples = probed.record.step(0).samples
    recorded = set().union(*(rows_of(p) for p in probed.record.probes(0) if p.role.startswith("engine-")))
    fed = int((samples.prompt_len + samples.response_len - 1).sum())
    assert int(samples.cached_tokens.sum()) > 0
    assert len(recorded) == fed - int(samples.cached_tokens.sum())


def test_context_parallel_ranks_record_what_they_computed(runs: Runs) -> None:
    """Rows of prompts by their owner alone, those of a step that only decodes by all: ranks 0 and 2 hold one shard."""
    _, probed = runs
    first, other = (rows_of(p) for p in probed.record.probes(0) if p.role in ("engine-00-00", "engine-00-02"))
    assert first & other
    assert bool(first - other) == bool(other - first) == (probed.plan.rollout.cp > 1)


def test_one_flipped_word_names_op_and_rank(runs: Runs, tmp_path: Path) -> None:
    """The twin: one wrong bit in one fingerprint of one rank is red, and located."""
    _, probed = runs
    copy = tmp_path / "flipped"
    shutil.copytree(probed.run_dir, copy)
    probe = next(p for p in probed.record.probes(1) if p.role == "engine-01-02")
    words = probe.arrays["rollout/layers.1.qkv"].copy()
    words[0, 1] ^= np.uint64(1)
    changed = replace(probe, arrays={**probe.arrays, "rollout/layers.1.qkv": words})
    (copy / "steps/000001/probe-engine-01-02.safetensors").write_bytes(changed.to_bytes(1))
    check = validate(copy).check("probe")
    assert not check.passed
    assert check.message.startswith(f"step 1 layers.1.qkv shard {FLIPPED[probed.cell.id]} sample ")
    assert "rollout engine-01-02" in check.message


def test_fault_in_an_engine_is_located_to_op_token_and_ranks(faulty: CellRun) -> None:
    """The ranks are all that computed this row with this shard of the op, and no other."""
    check, shard = faulty.verdict.check("probe"), 4
    assert not faulty.verdict.check("logprobs_policy").passed
    assert not check.passed
    failure = check.failure
    assert failure is not None
    assert failure.right is not None
    assert failure.where == f"layers.0.qkv shard {shard} position 20"
    assert (failure.step, failure.sample, failure.token_index) == (0, 0, 7)
    engine = [p for p in faulty.record.probes(0) if p.role.startswith("engine-00-")]
    held = range(VIRTUAL // faulty.plan.rollout.tp)
    computed = [p.role for p in engine if (0, 20) in rows_of(p) and shard - p.shard0 in held]
    assert failure.right.source == ", ".join(f"rollout {role}" for role in sorted(computed))
    assert failure.right.source == "rollout engine-00-01, rollout engine-00-03"
