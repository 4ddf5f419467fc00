"""TP, CP, token budget and order of arrival change no bit of a step: log-probabilities, gradients, masters, moments.

All four topologies of eight ranks, and one rank alone as the reference. Two steps, so that a difference in the first
update would show in the second's log-probabilities. See tests.unit.training for the samples' lengths.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rlk.kernels.collectives import base
from rlk.kernels.cpu import attention, gemm
from rlk.train import backward
from tests.unit import training
from tests.unit.probes import assert_same, left_to_right, moved
from tests.unit.tiny import TRAIN
from tests.unit.training import Step

SAMPLES = training.make_samples()
Steps = list[Step]

# What may be chosen freely: topology, logical token budget, order in which the samples arrive.
CASES = {
    **{f"tp{tp}_cp{cp}": (tp, cp, 1024, 0) for tp, cp in TRAIN},
    "each_sample_alone": (2, 4, 1, 0),
    "small_budget": (4, 2, 40, 0),
    "shuffled": (2, 4, 100, 1),
}


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Steps:
    return training.run(training.make_plan(checkpoint), 1, 1, SAMPLES)


@pytest.fixture(scope="module", params=list(CASES.values()), ids=list(CASES))
def found(request: pytest.FixtureRequest, checkpoint: Path) -> Steps:
    tp, cp, budget, shuffled = request.param
    samples = random.Random(0).sample(SAMPLES, len(SAMPLES)) if shuffled else SAMPLES
    return training.run(training.make_plan(checkpoint, budget=budget), tp, cp, samples)


def test_every_token_is_scored_with_the_same_bits(found: Steps, reference: Steps) -> None:
    for step, expected in zip(found, reference, strict=True):
        assert len(step.logprobs) == sum(response for _, response in training.LENGTHS)
        assert step.logprobs == expected.logprobs
        assert step.reference == expected.reference


def test_the_update_differentiates_what_was_scored(found: Steps) -> None:
    for step in found:
        assert step.seen == step.logprobs


@pytest.mark.parametrize("kind", training.KINDS)
def test_every_tensor_has_the_same_bits(found: Steps, reference: Steps, kind: str) -> None:
    for i, (step, expected) in enumerate(zip(found, reference, strict=True)):
        for name, tensor in expected.tensors[kind].items():
            assert_same(step.tensors[kind][name], tensor, f"step {i}, {kind} of {name}")


def test_norms_and_fingerprints_are_equal(found: Steps, reference: Steps) -> None:
    for step, expected in zip(found, reference, strict=True):
        assert step.grad_norm.hex() == expected.grad_norm.hex()
        assert step.fingerprints == expected.fingerprints


def test_every_tensor_moves_in_every_step(reference: Steps) -> None:
    first, second = reference
    assert all(bool(g.any()) for g in first.gradients.values())
    assert all(moved(second.tensors["exports"][name], w) for name, w in first.tensors["exports"].items())
    assert second.logprobs != first.logprobs
    words = [{key: word.logprob for key, word in step.reference.items()} for step in (first, second)]
    assert words[0] == words[1], "the reference is the checkpoint"


def test_a_tied_model_is_the_same_everywhere(tied_checkpoint: Path) -> None:
    plan = training.make_plan(tied_checkpoint)
    (expected,) = training.run(plan, 1, 1, SAMPLES, steps=1)
    for tp, cp in ((8, 1), (2, 4)):
        (step,) = training.run(plan, tp, cp, SAMPLES, steps=1)
        assert step.logprobs == expected.logprobs
        for name, tensor in expected.gradients.items():
            assert_same(step.gradients[name], tensor, f"tp {tp}: {name}")


def test_ordinary_operators_differ_between_topologies(checkpoint: Path) -> None:
    plan = training.make_plan(checkpoint, "native")
    (wide,), (tall,) = (training.run(plan, tp, cp, SAMPLES, steps=1) for tp, cp in ((1, 8), (8, 1)))
    assert sum(wide.logprobs[key] != word for key, word in tall.logprobs.items()) > 0
    assert sum(moved(wide.gradients[name], grad) > 0 for name, grad in tall.gradients.items()) >= 15, "of 19"


def test_ordinary_operators_differ_from_canonical_ones(checkpoint: Path, reference: Steps) -> None:
    (native,) = training.run(training.make_plan(checkpoint, "native"), 1, 1, SAMPLES, steps=1)
    assert sum(native.logprobs[key] != word for key, word in reference[0].logprobs.items()) > 60


@pytest.fixture
def _left_to_right(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (base, attention, gemm, backward):
        monkeypatch.setattr(module, "tree_sum", left_to_right)


@pytest.mark.usefixtures("_left_to_right")
def test_a_loop_over_partials_differs_between_topologies(checkpoint: Path) -> None:
    """TP 2 joins 4 + 4 leaves and TP 8 all 8 in a row: only whole subtrees make that the same.

    Gradients stay fp32 and show it at once. A log-probability stands behind bf16 roundings, which hide a last bit of
    fp32 from so few tokens: its sums are looked at before their rounding in test_collectives.
    """
    plan = training.make_plan(checkpoint)
    (two,), (eight,) = (training.run(plan, tp, cp, SAMPLES, steps=1) for tp, cp in ((2, 4), (8, 1)))
    assert sum(moved(two.gradients[name], grad) > 0 for name, grad in eight.gradients.items()) >= 15, "of 19"
