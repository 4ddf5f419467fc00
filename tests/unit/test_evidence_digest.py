"""The digest moves with every part of a step and with nothing else: not with engines, ranks or the order of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rlk.evidence.arrays import BatchArrays, RolloutArrays
from rlk.evidence.digest import START, trajectory_line
from rlk.evidence.samples import merge
from rlk.evidence.schemas import Fingerprints, TrajectoryLine
from tests.unit.evidence_builder import Step, build, make_draft


def _line(step: Step, weights: Fingerprints, previous: str = START) -> TrajectoryLine:
    samples = merge([RolloutArrays(**columns) for columns in step.rollouts])
    return trajectory_line(0, samples, BatchArrays(**step.batch), weights, previous)


def _base() -> tuple[Step, Fingerprints]:
    draft = make_draft()
    return draft.steps[0], draft.fingerprints[1]


def _add(column: str, at: int = 1) -> Callable[[Step], None]:
    return lambda step: step.rollouts[0][column].__setitem__(at, step.rollouts[0][column][at] + 1)


def _flip_reward(step: Step) -> None:
    step.batch["reward"][2] += 1e-300


def _flip_logprob(step: Step) -> None:
    step.rollouts[1]["logprobs"].view(np.uint32)[4] ^= 1


def _move_a_token(step: Step) -> None:
    # The last token of sample 0 becomes the first of sample 2: the same bytes in a row, cut elsewhere.
    step.rollouts[0]["response_len"][:] += np.array([1, -1], np.int32)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (_add("tokens"), "tokens"),
        (_add("prompt_tokens"), "tokens"),
        (_move_a_token, "tokens"),
        (_flip_logprob, "logprobs"),
        (_flip_reward, "rewards"),
    ],
    ids=["token", "prompt", "boundary", "logprob", "reward"],
)
def test_each_change_moves_its_part_and_the_digest(change: Callable[[Step], None], part: str) -> None:
    step, weights = _base()
    before = _line(step, weights)
    change(step)
    after = _line(step, weights)
    assert getattr(before, part) != getattr(after, part)
    assert before.digest != after.digest


def test_changed_weights_and_history_move_the_digest() -> None:
    step, weights = _base()
    name = next(iter(weights.trainer))
    changed = weights.model_copy(update={"trainer": {**weights.trainer, name: "0" * 16 + ":" + "0" * 16}})
    lines = [_line(step, weights), _line(step, changed), _line(step, weights, previous="1" * 64)]
    assert len({line.digest for line in lines}) == 3
    assert lines[0].weights != lines[1].weights
    assert lines[0].weights == lines[2].weights


def test_engines_and_file_order_do_not_move_the_digest() -> None:
    step, weights = _base()
    before = _line(step, weights)
    step.rollouts.reverse()
    for name in step.batch:
        step.batch[name] = step.batch[name][::-1].copy()
    single = Step([{n: np.concatenate([r[n] for r in step.rollouts]) for n in step.rollouts[0]}], [], step.batch)
    assert _line(step, weights) == _line(single, weights) == before


def test_digest_of_the_verdict_is_the_last_line(tmp_path: Path) -> None:
    run_dir, validation = build(tmp_path)
    last = (run_dir / "trajectory.jsonl").read_text().splitlines()[-1]
    assert validation.digest == TrajectoryLine.from_json(last, "last").digest
