"""Every smoke cell: two real training steps, real vLLM rollouts, and bytes that agree.

Eight cells cover every train TP x CP of eight ranks, rollout TP 1, 2, 4 and 8, and greedy, nucleus, nucleus with top-k
and mixed batches. Two steps, since only a second step can show that updated weights reached the engines.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rlk.evidence.validate import validate
from tests.consistency.conftest import CellRun

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _leave_properties(smoke: CellRun, report: Callable[[CellRun], None]) -> None:
    report(smoke)


def test_every_check_of_the_run_passes(smoke: CellRun) -> None:
    assert smoke.outcome.passed, "\n".join(smoke.outcome.errors)
    assert all(check.count > 0 for check in smoke.verdict.checks)


def test_rollout_and_policy_logprobs_are_equal_words(smoke: CellRun) -> None:
    compared = 0
    for step in range(smoke.plan.config.steps):
        found = smoke.record.step(step)
        left, right = found.matched
        rollout = found.samples.logprobs[left].view(np.int32)
        policy = found.scored[0].logprob[right].view(np.int32)
        assert len(rollout) == len(found.samples.tokens), "a token was not scored"
        assert np.array_equal(rollout, policy), (
            f"step {step}: {(rollout != policy).sum()} of {len(rollout)} words differ"
        )
        compared += len(rollout)
    assert compared == smoke.outcome.tokens_compared > 0


def test_every_step_learns_from_rewards(smoke: CellRun) -> None:
    for metrics in smoke.record.metrics:
        assert metrics.nonzero_advantages > 0, f"step {metrics.step}: all rewards of every group were equal"
        assert metrics.grad_norm > 0


def test_responses_differ_in_length(smoke: CellRun) -> None:
    lengths = np.concatenate([smoke.record.step(s).samples.response_len for s in range(smoke.plan.config.steps)])
    assert len(set(lengths.tolist())) > 1


def test_both_sides_hold_new_weights_after_every_step(smoke: CellRun) -> None:
    versions = smoke.record.fingerprints
    for before, after in pairwise(versions):
        assert before.trainer != after.trainer
        assert all(engine == after.trainer for engine in after.engines)


def test_prompts_were_cut_and_cached(smoke: CellRun) -> None:
    """The events that could have changed a bit: prompts prefilled in chunks, and pages taken from the prefix cache."""
    events = [one for metrics in smoke.record.metrics for one in metrics.generated]
    assert sum(one.chunks for one in events) > 0, "no prompt was prefilled in more than one chunk"
    assert sum(one.cached_tokens for one in events) > 0 or smoke.plan.samples_per_prompt == 1, (
        "the prefix cache was never hit"
    )


def test_copied_evidence_gets_the_same_verdict(smoke: CellRun, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(smoke.run_dir, copy)
    assert validate(copy) == smoke.verdict


def test_one_flipped_bit_of_a_logprob_is_red(smoke: CellRun, tmp_path: Path) -> None:
    """The twin of the equality above: the same run with one wrong bit must fail, and by the seal."""
    copy = tmp_path / "flipped"
    shutil.copytree(smoke.run_dir, copy)
    file = copy / "steps" / "000001" / "rollout-00.safetensors"
    content = bytearray(file.read_bytes())
    content[-8] ^= 1
    file.write_bytes(content)
    verdict = validate(copy)
    assert not verdict.passed
    assert not verdict.check("seal").passed
