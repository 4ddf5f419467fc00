"""Checks on the metrics, and the four that only a verify has; each fault is in one line of the file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rlk.evidence.schemas import Seconds
from tests.unit.evidence_builder import Draft, build, make_draft, red, write
from tests.unit.evidence_faults import Fault, assert_caught, on_manifest, on_metrics, parameters, then


def _no_advantages(draft: Draft) -> None:
    for step in draft.steps:
        step.batch["advantage"][:] = 0.0


def _one_step_called_verify(draft: Draft) -> None:
    draft.plan_text = draft.plan.to_json().replace('"command": "run"', '"command": "verify"')
    on_manifest(command="verify")(draft)


COUNTED: dict[str, Any] = {
    "samples": 5,
    "response_tokens": 19,
    "nonzero_advantages": 3,
    "truncated_share": 0.5,
    "reward_mean": 0.25,
    "reward_std": 0.25,
    "advantage_abs_max": 1.0,
}

FAULTS = [
    Fault(
        "a_loss_that_is_no_number",
        {"metrics_finite"},
        r"metrics\.jsonl: step 1: loss is nan",
        after=on_metrics(1, loss=math.nan),
    ),
    Fault(
        "a_time_that_is_infinite",
        {"metrics_finite"},
        r"step 0: seconds\.sync is inf",
        after=on_metrics(0, seconds=Seconds(rollout=1.0, score=1.0, train=1.0, sync=math.inf, total=4.0)),
    ),
    Fault(
        "rollout_logprobs_were_used",
        {"logprob_reuse"},
        r"step 0: rollout_logprobs_reused is True, expected False",
        after=on_metrics(0, rollout_logprobs_reused=True),
    ),
    Fault(
        "rollout_logprobs_were_asked_for",
        {"logprob_reuse"},
        r"plan\.json: use_rollout_logprobs is True",
        options={"mode": "native", "use_rollout_logprobs": True},
    ),
    Fault(
        "ranks_of_an_engine_disagree",
        {"engine_ranks_agree"},
        r"step 1: engine_ranks_agree is \(True, False\), expected \(True, True\)",
        after=on_metrics(1, engine_ranks_agree=(True, False)),
    ),
    Fault(
        "an_engine_whose_ranks_were_not_compared",
        {"engine_ranks_agree"},
        r"step 1: engine_ranks_agree is \(True,\)",
        after=on_metrics(1, engine_ranks_agree=(True,)),
    ),
    Fault(
        "one_step_is_no_verify",
        {"two_steps", "plan"},
        r"two_steps: metrics\.jsonl: 1 steps, a verify needs 2 or more",
        after=_one_step_called_verify,
        options={"command": "run", "steps": 1},
    ),
    Fault(
        "a_zero_gradient",
        {"gradient_nonzero"},
        r"step 1: zero gradient, grad_norm is 0\.0",
        after=on_metrics(1, grad_norm=0.0),
    ),
    Fault(
        "a_gradient_that_is_no_number",
        {"gradient_nonzero", "metrics_finite"},
        r"step 1: zero gradient, grad_norm is nan",
        after=on_metrics(1, grad_norm=math.nan),
    ),
    Fault(
        "a_gradient_without_a_source",
        {"gradient_nonzero"},
        r"step 0: grad_norm is 0\.75, but all advantages are zero and there is no KL term",
        before=_no_advantages,
        options={"kl_coef": 0.0},
    ),
    Fault(
        "equal_rewards_without_kl",
        {"gradient_nonzero"},
        r"step 0: zero gradient",
        before=_no_advantages,
        after=then(on_metrics(0, grad_norm=0.0), on_metrics(1, grad_norm=0.0)),
        options={"kl_coef": 0.0},
    ),
    Fault(
        "a_learning_rate_of_zero",
        {"learning_rate"},
        r"step 1: learning rate is 0\.0, a verify needs > 0",
        after=on_metrics(1, lr=0.0),
    ),
    *(
        Fault(
            f"{name}_that_the_arrays_do_not_give",
            {"metrics_counts"},
            rf"step 1 metrics: {name} is {value}, expected",
            after=on_metrics(1, **{name: value}),
        )
        for name, value in COUNTED.items()
    ),
]


@parameters(FAULTS)
def test_each_fault_reddens_only_its_checks(fault: Fault, tmp_path: Path) -> None:
    assert_caught(fault, tmp_path)


def test_gradient_from_kl_alone_passes_and_is_said(tmp_path: Path) -> None:
    _, validation = build(tmp_path, before=_no_advantages)
    assert validation.passed
    assert "step 1: all advantages were zero, so the gradient came from the KL term alone" in validation.notes


def test_all_truncated_passes_by_kl_alone_and_says_both(tmp_path: Path) -> None:
    """Nothing ended, so nothing was rewarded: green only because of the KL term, which a reader must learn."""
    _, validation = write(tmp_path, make_draft(lengths=(6,)), before=_no_advantages)
    assert validation.passed
    for step in (0, 1):
        assert f"step {step}: 100 % of the responses were truncated" in validation.notes
        assert f"step {step}: all advantages were zero, so the gradient came from the KL term alone" in validation.notes


def test_all_truncated_without_kl_is_red(tmp_path: Path) -> None:
    no_gradient = then(on_metrics(0, grad_norm=0.0), on_metrics(1, grad_norm=0.0))
    draft = make_draft(lengths=(6,), kl_coef=0.0)
    _, validation = write(tmp_path, draft, before=_no_advantages, after=no_gradient)
    assert red(validation) == {"gradient_nonzero"}


def test_none_truncated_is_not_mentioned(tmp_path: Path) -> None:
    _, validation = write(tmp_path, make_draft(lengths=(5, 3, 4, 5)))
    assert validation.passed
    assert not any("truncated" in note for note in validation.notes)


def test_share_of_truncated_responses_is_said(tmp_path: Path) -> None:
    _, validation = build(tmp_path)
    assert "step 0: 25 % of the responses were truncated" in validation.notes


@pytest.mark.parametrize("change", [on_metrics(1, lr=0.0), on_metrics(1, grad_norm=0.0)], ids=["lr", "gradient"])
def test_plain_run_may_train_nothing(change: Any, tmp_path: Path) -> None:
    _, validation = build(tmp_path, after=change, command="run", steps=2)
    assert validation.passed
    assert "learning_rate" not in {check.name for check in validation.checks}


def test_native_mode_is_judged_like_any_other(tmp_path: Path) -> None:
    _, validation = build(tmp_path, mode="native")
    assert (validation.mode, red(validation)) == ("native", set())
