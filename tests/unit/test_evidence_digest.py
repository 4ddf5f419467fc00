"""The digest moves with every part of a step and with nothing else: not with engines, ranks or the order of files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlk.evidence.arrays import BatchArrays, RolloutArrays
from rlk.evidence.digest import START, Made, trajectory_line
from rlk.evidence.documents import canonical
from rlk.evidence.samples import merge
from rlk.evidence.schemas import TrajectoryLine, Update
from tests.unit.evidence_builder import build, make_draft
from tests.unit.evidence_steps import Step


def _line(step: Step, made: Made, previous: str = START) -> TrajectoryLine:
    samples = merge([RolloutArrays(**columns) for columns in step.rollouts])
    return trajectory_line(0, samples, BatchArrays(**step.batch), made, previous)


def _base() -> tuple[Step, Made]:
    draft = make_draft()
    return draft.steps[0], draft.made(0)


def _add(column: str, at: int = 1) -> Callable[[Step], None]:
    return lambda step: step.rollouts[0][column].__setitem__(at, step.rollouts[0][column][at] + 1)


def _flip_reward(step: Step) -> None:
    step.batch["reward"][2] += 1e-300


def _flip_advantage(step: Step) -> None:
    step.batch["advantage"][2] += 1e-12


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
        (_flip_advantage, "advantages"),
    ],
    ids=["token", "prompt", "boundary", "logprob", "reward", "advantage"],
)
def test_each_change_moves_its_part_and_the_digest(change: Callable[[Step], None], part: str) -> None:
    step, made = _base()
    before = _line(step, made)
    change(step)
    after = _line(step, made)
    assert getattr(before, part) != getattr(after, part)
    assert before.digest != after.digest


def test_changed_weights_and_history_move_the_digest() -> None:
    step, made = _base()
    name = next(iter(made.weights.trainer))
    weights = made.weights.model_copy(update={"trainer": {**made.weights.trainer, name: "0" * 16 + ":" + "0" * 16}})
    lines = [_line(step, made), _line(step, replace(made, weights=weights)), _line(step, made, previous="1" * 64)]
    assert len({line.digest for line in lines}) == 3
    assert lines[0].weights != lines[1].weights
    assert lines[0].weights == lines[2].weights


@pytest.mark.parametrize(
    ("field", "part"),
    [
        ("gradients", "gradients"),
        ("masters", "masters"),
        ("first_moments", "moments"),
        ("second_moments", "moments"),
    ],
)
def test_each_state_of_the_optimizer_moves_its_part(field: str, part: str) -> None:
    step, made = _base()
    hashes = {**getattr(made.update, field), "norm": "0" * 16 + ":" + "0" * 16}
    changed = Update(**{**made.update.model_dump(), field: hashes})
    before, after = _line(step, made), _line(step, replace(made, update=changed))
    moved = {name for name in TrajectoryLine.model_fields if getattr(before, name) != getattr(after, name)}
    assert moved == {part, "digest"}


def test_another_seed_moves_the_random_state() -> None:
    step, made = _base()
    before, after = _line(step, made), _line(step, replace(made, seed=made.seed + 1))
    moved = {name for name in TrajectoryLine.model_fields if getattr(before, name) != getattr(after, name)}
    assert moved == {"random", "digest"}


def test_digest_is_the_hash_of_the_parts_chained_to_the_digest_before() -> None:
    """Whoever reads docs/evidence.md can make it again; the first step is chained to 64 zeros."""
    step, made = _base()
    line = _line(step, made)
    parts = [getattr(line, name) for name in TrajectoryLine.model_fields if name not in ("step", "digest")]
    assert len(parts) == 9
    for previous in ("0" * 64, "1" * 64):
        text = "\n".join((previous, *parts))
        assert _line(step, made, previous).digest == hashlib.sha256(text.encode()).hexdigest()
    assert line == _line(step, made, "0" * 64)


def _hash(value: object) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def test_random_state_is_the_seed_and_the_sample_that_comes_next() -> None:
    """By sample id and not by number; a step without samples begins with none."""
    step, made = _base()
    batch = BatchArrays(**{**step.batch, "sample_id": step.batch["sample_id"] + 40})
    found = trajectory_line(0, step.samples, batch, made, START)
    assert found.random == _hash({"seed": made.seed, "next_sample": 44})
    none = BatchArrays(**{name: column[:0] for name, column in step.batch.items()})
    assert trajectory_line(0, step.samples, none, made, START).random == _hash({"seed": made.seed, "next_sample": 0})


def test_engines_and_file_order_do_not_move_the_digest() -> None:
    step, made = _base()
    before = _line(step, made)
    step.rollouts.reverse()
    for name in step.batch:
        step.batch[name] = step.batch[name][::-1].copy()
    single = Step([{n: np.concatenate([r[n] for r in step.rollouts]) for n in step.rollouts[0]}], [], step.batch)
    assert _line(step, made) == _line(single, made) == before


def test_digest_of_the_verdict_is_the_last_line(tmp_path: Path) -> None:
    run_dir, validation = build(tmp_path)
    last = (run_dir / "trajectory.jsonl").read_text().splitlines()[-1]
    assert validation.digest == TrajectoryLine.from_json(last, "last").digest
