"""A trainer rank trains on each token's own coefficient, scores its reference apart, and starts again byte for byte."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from rlk.model.parallel import ParallelContext
from rlk.train.worker import TrainWorker
from tests.unit import checkpoints, training
from tests.unit.probes import assert_moved, assert_same

SAMPLES = training.make_samples()
COEFFICIENTS = training.coefficients(SAMPLES)


def make_worker(checkpoint: Path, budget: int = 100, reference: Path | None = None) -> TrainWorker:
    plan = training.make_plan(checkpoint, budget=budget)
    profile = plan.profile.model_copy(update={"reference": str(reference) if reference else None})
    worker = TrainWorker(dataclasses.replace(plan, profile=profile), ParallelContext())
    worker.begin(SAMPLES)
    return worker


def gradients(worker: TrainWorker, only: tuple[int, int] | None = None) -> dict[str, torch.Tensor]:
    """Of one update with all coefficients, or with those of one token alone."""
    coefficients = {s: np.zeros_like(c) if only else c for s, c in COEFFICIENTS.items()}
    if only:
        coefficients[only[0]][only[1]] = 0.25
    worker.update(coefficients)
    return worker.sums.gradients()


@pytest.mark.parametrize("place", [0, 37, 69])
def test_a_coefficient_belongs_to_its_token(checkpoint: Path, place: int) -> None:
    """One token's gradient is the same with its sample in company and alone: zeros add nothing to a chain."""
    (sample,) = (s for s in SAMPLES if s.response_len == 70)
    packed = gradients(make_worker(checkpoint), only=(sample.sample_id, place))
    worker = make_worker(checkpoint)
    worker.begin([sample])
    for name, grad in gradients(worker, only=(sample.sample_id, place)).items():
        assert_same(packed[name] + 0.0, grad + 0.0, name)
    neighbour = gradients(make_worker(checkpoint), only=(sample.sample_id, (place + 1) % 70))
    assert_moved(neighbour["head"], packed["head"], "the next token's coefficient")


def test_a_reset_is_the_beginning(checkpoint: Path) -> None:
    worker, fresh = make_worker(checkpoint), make_worker(checkpoint)
    start = worker.fingerprints()
    gradients(worker)
    assert worker.fingerprints() != start
    worker.reset()
    assert worker.fingerprints() == start
    worker.begin(SAMPLES)
    assert (worker.score().logprob == fresh.score().logprob).all()
    again = gradients(worker)
    for name, grad in gradients(fresh).items():
        assert_same(again[name], grad, name)


def test_the_reference_has_weights_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    other = checkpoints.write(tmp_path / "reference", seed=1)
    worker = make_worker(checkpoint, reference=other)
    policy = worker.score().logprob
    assert (worker.score_reference() != make_worker(checkpoint).score_reference()).any()
    assert worker.score().logprob.tobytes() == policy.tobytes(), "scoring the reference leaves the policy alone"


def test_gradients_start_at_zero_every_step(checkpoint: Path) -> None:
    worker = make_worker(checkpoint)
    zero = {s: np.zeros_like(c) for s, c in COEFFICIENTS.items()}
    worker.update(COEFFICIENTS)
    _, report = worker.update(zero)
    assert report.grad_norm == 0.0
    assert report.step == 2
