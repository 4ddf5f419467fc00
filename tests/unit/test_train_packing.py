"""A packed sample equals itself alone, and no token of a neighbour reaches it.

A has 5 tokens, B the least that has a response (2), C 130, in one micro-batch; with CP 4 the ranks' shares are unequal
and padded. Every token of every sample is a response token but the first, so each row is looked at.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rlk.plan.sampling import Sampling
from rlk.train.batching import Sample
from tests.unit import training
from tests.unit.training import Words

A, B, C = (
    Sample(i, tuple((7 * i + 31 * j) % 300 for j in range(n)), 1, Sampling(0.7, 0.95))
    for i, n in ((1, 5), (2, 2), (3, 130))
)
TOPOLOGIES = ((1, 1), (2, 4), (1, 8))


def scores(checkpoint: Path, topology: tuple[int, int], samples: list[Sample], budget: int = 1024) -> Words:
    return training.score(training.make_plan(checkpoint, budget=budget), *topology, samples)


def of(words: Words, *samples: Sample) -> Words:
    return {key: word for key, word in words.items() if key[0] in {s.sample_id for s in samples}}


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"tp{t[0]}_cp{t[1]}")
def test_a_packed_sample_equals_itself_alone(checkpoint: Path, topology: tuple[int, int]) -> None:
    packed = scores(checkpoint, topology, [A, B, C])
    assert len(packed) == 4 + 1 + 129
    for sample in (A, B, C):
        assert of(packed, sample) == scores(checkpoint, topology, [sample]), f"sample {sample.sample_id}"
    assert scores(checkpoint, topology, [A, B, C], budget=7) == packed, "A and B together, C alone"


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"tp{t[0]}_cp{t[1]}")
@pytest.mark.parametrize("place", range(5))
def test_a_token_of_one_reaches_no_other(checkpoint: Path, topology: tuple[int, int], place: int) -> None:
    tokens = tuple((t + 1) % 300 if i == place else t for i, t in enumerate(A.tokens))
    before = scores(checkpoint, topology, [A, B, C])
    after = scores(checkpoint, topology, [dataclasses.replace(A, tokens=tokens), B, C])
    assert of(after, B, C) == of(before, B, C)
    changed = [i for i in range(4) if after[1, i] != before[1, i]]
    assert changed == list(range(max(place - 1, 0), 4)), "its own sample, from that token on"


def test_batches_with_unequal_places_of_a_sample_agree(checkpoint: Path) -> None:
    """The needle is never first: C behind A and B, behind B, and before a copy of itself."""
    expected = of(scores(checkpoint, (2, 4), [C]), C)
    twin = dataclasses.replace(C, sample_id=9)
    for company in ([B, C], [A, B, C], [C, twin]):
        assert of(scores(checkpoint, (2, 4), company), C) == expected
