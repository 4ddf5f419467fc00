"""Records that must fail: what was changed, which checks go red for it (and no other), and what is said."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlk.evidence.checks.registry import STEP_CHECKS
from tests.unit.evidence_builder import Change, Draft, build, red

ALL_STEP_CHECKS = {check.name for check in STEP_CHECKS}
# What reads the merged samples of a step, and what reads the scored tokens.
READ_SAMPLES = ALL_STEP_CHECKS - {"lengths", "generated_counts", "support", "tp_replicas", "optimizer_states"}
_LOGPROBS = {name for name in ALL_STEP_CHECKS if name.startswith("logprobs_")}
READ_SCORED = {"token_coverage", "support", "oracle"} | _LOGPROBS


@dataclass(frozen=True)
class Fault:
    """One broken record. `reds` are the failing checks, `says` a pattern in the error of the first of them by name."""

    name: str
    reds: set[str]
    says: str
    before: Change | None = None
    after: Change | None = None
    disk: Callable[[Path], None] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def parameters(faults: Sequence[Fault]) -> pytest.MarkDecorator:
    """Parametrise a test over faults, with their names as ids."""
    return pytest.mark.parametrize("fault", faults, ids=[fault.name for fault in faults])


def assert_caught(fault: Fault, root: Path) -> None:
    """Only the stated checks are red, and the error says where."""
    _, validation = build(root, before=fault.before, after=fault.after, disk=fault.disk, **fault.options)
    assert red(validation) == fault.reds
    assert not validation.passed
    errors = "\n".join(validation.errors)
    assert re.search(fault.says, errors), errors


def on_metrics(step: int, **values: Any) -> Change:
    """Change fields of one line of the metrics."""

    def change(draft: Draft) -> None:
        draft.metrics[step] = draft.metrics[step].model_copy(update=values)

    return change


def on_manifest(**values: Any) -> Change:
    """Change fields of the manifest."""
    return lambda draft: draft.manifest.update(values)


def on_sample(step: int, sample: int, **values: Any) -> Change:
    """Change per-sample columns of one sample, in the engine that generated it."""

    def change(draft: Draft) -> None:
        for columns in draft.steps[step].rollouts:
            for row in np.flatnonzero(columns["sample_id"] == sample):
                for name, value in values.items():
                    columns[name][row] = value

    return change


def on_token(step: int, sample: int, index: int, **values: Any) -> Change:
    """Change one response token: columns of the rollout, and of every train rank that scored it."""

    def change(draft: Draft) -> None:
        for columns in draft.steps[step].rollouts:
            starts = np.cumsum(columns["response_len"]) - columns["response_len"]
            for row in np.flatnonzero(columns["sample_id"] == sample):
                for name in values.keys() & columns.keys():
                    columns[name][starts[row] + index] = values[name]
        for columns in draft.steps[step].trains:
            rows = (columns["sample_id"] == sample) & (columns["index"] == index)
            for name in values.keys() & columns.keys():
                columns[name][rows] = values[name]

    return change


def one_ulp(step: int, rank: int, column: str) -> Change:
    """Flip the lowest bit of the first value of a train rank's column."""

    def change(draft: Draft) -> None:
        draft.steps[step].trains[rank][column][:1].view(np.uint32)[0] ^= 1

    return change


def everywhere(value: float) -> dict[str, np.float32]:
    """One log-prob for the rollout, the policy and the update alike: what equality alone cannot see."""
    return dict.fromkeys(("logprobs", "logprob", "update_logprob"), np.float32(value))


def keep_rows(columns: dict[str, np.ndarray], rows: np.ndarray) -> None:
    """Keep the given rows of all columns of a train rank or batch, in that order."""
    for name in columns:
        columns[name] = columns[name][rows]


def drop_sample(columns: dict[str, np.ndarray], row: int) -> None:
    """Take one sample out of a rollout, with its prompt and response."""
    spans = dict.fromkeys(("tokens", "mask", "logprobs"), "response_len") | {"prompt_tokens": "prompt_len"}
    kept = np.arange(len(columns["sample_id"])) != row
    lengths = {name: columns[name].copy() for name in ("prompt_len", "response_len")}
    for name in columns:
        mask = np.repeat(kept, lengths[spans[name]]) if name in spans else kept
        columns[name] = columns[name][mask]


def then(*changes: Change) -> Change:
    """Several changes, one after the other."""

    def change(draft: Draft) -> None:
        for one in changes:
            one(draft)

    return change
