"""A probed run computes the same bits as one that is not, and every rank's rows of every op agree.

Two runs in one session, with tensor parallelism on both sides (2 and 4), so that ops are cut in shards and have
replicas; prefix cache and chunks are on, so that some rows are computed by nobody and others by several.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlk.evidence.compare import compare
from rlk.evidence.program import forward
from rlk.evidence.validate import validate
from rlk.plan.cells import Cell
from tests.consistency.conftest import CellRun, Sessions
from tests.plugin import ROOT

pytestmark = pytest.mark.cpu

CELL = Cell(
    id="tp2_rtp4-cp4-t0.7-p0.95-koff",
    sentence="Made by a test, once with a probe and once without.",
    config={"tp": 2, "rollout_tp": 4, "temperature": 0.7, "top_p": 0.95},
    timeout_s=300,
)


@pytest.fixture(scope="module")
def runs(sessions: Sessions) -> tuple[CellRun, CellRun]:
    """Without and with a probe."""
    plain = CELL.plan(ROOT)
    probed = replace(plain, config=plain.config.model_copy(update={"probe": True}))
    return sessions.run(CELL, plain), sessions.run(CELL, probed)


def test_probed_run_passes_and_compares_rows(runs: tuple[CellRun, CellRun]) -> None:
    _, probed = runs
    assert probed.outcome.errors == ()
    layers, tokens = probed.plan.shape.layers, probed.outcome.tokens_compared
    assert probed.verdict.check("probe").count > len(forward(layers)) * tokens


def test_probe_changes_no_bit_of_the_trajectory(
    runs: tuple[CellRun, CellRun], record_property: Callable[[str, object], None]
) -> None:
    plain, probed = runs
    assert plain.record.trajectory == probed.record.trajectory
    assert compare(plain.run_dir, probed.run_dir).equal
    seconds = [sum(m.seconds.total for m in run.record.metrics) for run in runs]
    record_property("seconds_without_and_with_probe", seconds)


def test_cached_rows_are_recorded_by_nobody(runs: tuple[CellRun, CellRun]) -> None:
    """The event behind missing rows: without a cache hit the check would not have met one."""
    _, probed = runs
    engines = [p for p in probed.record.probes(0) if p.role.startswith("engine-") and p.role.endswith("-00")]
    samples = probed.record.step(0).samples
    recorded = {(s, p) for e in engines for s, p in zip(*e.rows("rollout", forward(1)[0])[:2], strict=True)}
    fed = int((samples.prompt_len + samples.response_len - 1).sum())
    assert int(samples.cached_tokens.sum()) > 0
    assert len(recorded) == fed - int(samples.cached_tokens.sum())


def test_one_flipped_word_names_op_and_rank(runs: tuple[CellRun, CellRun], tmp_path: Path) -> None:
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
    assert check.message.startswith("step 1 layers.1.qkv shard 5 sample ")
    assert "rollout engine-01-02" in check.message
