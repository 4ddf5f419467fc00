"""Where a response begins, how short it is, and a rank without a token change no bit of a step under any TP x CP.

Prompts and responses of 1, 7, 8 and 9 tokens in every pair: 16 half-slices are more than most of them have tokens. And
sequences of 64 tokens, whose half-slices have 4: the response begins one token before position 16, on it and behind
it, where CP 2, 4 and 8 all have an edge between two ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlk.model import slices
from rlk.plan.sampling import Sampling
from rlk.train.batching import MicroBatch, Sample, build
from tests.unit import training
from tests.unit.probes import assert_same, moved
from tests.unit.ranks import on_ranks
from tests.unit.tiny import TRAIN
from tests.unit.training import MIX, Step

SHORT = (1, 7, 8, 9)
EDGE, LENGTH = 16, 64
BEGINS = (EDGE - 1, EDGE, EDGE + 1)
LENGTHS = [*((p, r) for p in SHORT for r in SHORT), *((p, LENGTH - p) for p in BEGINS)]


def sample(index: int, prompt: int, response: int, sampling: Sampling) -> Sample:
    return Sample(index, tuple((31 * j + 7 * index) % 300 for j in range(prompt + response)), prompt, sampling)


SAMPLES = [sample(i, p, r, MIX[i % len(MIX)]) for i, (p, r) in enumerate(LENGTHS)]
SINGLE = SAMPLES[0]


def parts(cp: int, samples: list[Sample]) -> list[MicroBatch]:
    return on_ranks(1, cp, lambda context: build(samples, context))


def rank_of(position: int, cp: int) -> int:
    """The rank that holds a position of a sequence of LENGTH tokens."""
    (rank,) = [c for c, part in enumerate(parts(cp, [SAMPLES[-1]])) if position in part.positions.tolist()]
    return rank


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Step:
    (step,) = training.run(training.make_plan(checkpoint), 1, 1, SAMPLES, steps=1)
    return step


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_edge_lies_between_two_ranks(cp: int) -> None:
    assert rank_of(EDGE - 1, cp) == rank_of(EDGE - 2, cp) != rank_of(EDGE, cp) == rank_of(EDGE + 1, cp)


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize(("begin", "predicted_by"), zip(BEGINS, (EDGE - 2, EDGE - 1, EDGE), strict=True))
def test_first_response_token_is_predicted_across_the_edge(cp: int, begin: int, predicted_by: int) -> None:
    batches = parts(cp, [sample(0, begin, LENGTH - begin, Sampling(1.0))])
    first = [(c, int(b.positions[row])) for c, b in enumerate(batches) for row in b.rows[b.index == 0]]
    assert first == [(rank_of(predicted_by, cp), predicted_by)]
    assert sum(len(b.rows) for b in batches) == LENGTH - begin


def test_single_token_leaves_ranks_without_a_row() -> None:
    batches = parts(8, [SINGLE])
    assert SINGLE.response_len == 1
    assert sorted(b.ids.numel() for b in batches) == [0] * 6 + [1, 1]
    assert sum(b.rows.numel() for b in batches) == 1


CASES = {**{f"tp{tp}_cp{cp}": (tp, cp, 1024) for tp, cp in TRAIN}, "each_sample_alone": (1, 8, 1)}


@pytest.mark.parametrize(("tp", "cp", "budget"), CASES.values(), ids=list(CASES))
def test_no_bit_of_a_step_depends_on_topology(checkpoint: Path, reference: Step, tp: int, cp: int, budget: int) -> None:
    (found,) = training.run(training.make_plan(checkpoint, budget=budget), tp, cp, SAMPLES, steps=1)
    assert len(found.logprobs) == sum(response for _, response in LENGTHS)
    assert found.logprobs == reference.logprobs
    assert found.seen == reference.seen
    for kind in training.KINDS:
        for name, tensor in reference.tensors[kind].items():
            assert_same(found.tensors[kind][name], tensor, f"{kind} of {name}")


def test_edges_one_token_later_would_show(checkpoint: Path, reference: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: slices of other tokens add the same products in another order."""

    def rounded_up(h: int, length: int) -> range:
        return range(-(-h * length // 16), -(-(h + 1) * length // 16))

    monkeypatch.setattr(slices, "half_slice", rounded_up)
    (found,) = training.run(training.make_plan(checkpoint), 1, 1, SAMPLES, steps=1)
    assert found.logprobs == reference.logprobs, "no sum over tokens stands before a log-probability"
    assert sum(moved(found.gradients[name], grad) > 0 for name, grad in reference.gradients.items()) >= 15, "of 19"


def test_single_token_is_learned_from(checkpoint: Path) -> None:
    """One row that sees itself alone teaches queries and keys nothing, and everything else something."""
    plan = training.make_plan(checkpoint)
    (alone,) = training.run(plan, 1, 1, [SINGLE], steps=1)
    (spread,) = training.run(plan, 1, 8, [SINGLE], steps=1)
    still = {name for name, grad in alone.gradients.items() if not grad.any()}
    assert still == {name for name in alone.gradients if name.endswith(("q_norm", "k_norm"))}
    for name, grad in alone.gradients.items():
        assert_same(spread.gradients[name], grad, name)
