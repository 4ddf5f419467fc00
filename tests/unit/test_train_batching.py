"""Micro-batches hold whole consecutive samples, and the ranks of a group cover every token of them exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from rlk.plan.sampling import Sampling
from rlk.plan.topology import DEGREES
from rlk.train.batching import MicroBatch, Sample, build, micro_batches
from tests.unit import training
from tests.unit.ranks import on_ranks

SAMPLES = training.make_samples()


def sized(*lengths: int) -> list[Sample]:
    return [Sample(i, tuple(range(n)), 1, Sampling(1.0)) for i, n in enumerate(lengths)]


def ids(groups: list[list[Sample]]) -> list[list[int]]:
    return [[s.sample_id for s in group] for group in groups]


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [
        ((4, 4, 4, 4), 8, [[0, 1], [2, 3]]),
        ((4, 4, 4, 4), 7, [[0], [1], [2], [3]]),
        ((3, 6, 2, 2, 5), 9, [[0, 1], [2, 3, 4]]),
        ((2, 20, 2, 2), 8, [[0], [1], [2, 3]]),
        ((20, 2), 8, [[0], [1]]),
        ((5,), 1, [[0]]),
        ((), 8, []),
    ],
    ids=["full", "one_too_small", "uneven", "over_budget_alone", "over_budget_first", "tiny_budget", "none"],
)
def test_samples_fill_the_budget_in_order(lengths: tuple[int, ...], budget: int, expected: list[list[int]]) -> None:
    assert ids(micro_batches(sized(*lengths), budget)) == expected


@pytest.mark.parametrize("order", [(1, 0), (0, 0)], ids=["unsorted", "twice"])
def test_ids_out_of_order_are_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sorted by id, each once"):
        micro_batches([sized(3, 3)[i] for i in order], 8)


@pytest.mark.parametrize("prompt_len", [0, 3, 4])
def test_a_sample_needs_prompt_and_response(prompt_len: int) -> None:
    with pytest.raises(ValueError, match=f"sample 9: prompt of {prompt_len} of 3 tokens; both need one"):
        Sample(9, (1, 2, 3), prompt_len, Sampling(1.0))


def parts(cp: int) -> list[MicroBatch]:
    return on_ranks(1, cp, lambda context: build(SAMPLES, context))


@pytest.mark.parametrize("cp", DEGREES)
def test_every_token_is_one_rows_somewhere(cp: int) -> None:
    rows: Counter[tuple[int, int]] = Counter()
    for part in parts(cp):
        owner = torch.repeat_interleave(torch.arange(len(SAMPLES)), part.first.diff())
        assert part.ids.tolist() == [SAMPLES[i].tokens[p] for i, p in zip(owner, part.positions, strict=True)]
        rows.update(zip(owner.tolist(), part.positions.tolist(), strict=True))
    assert rows == Counter((i, p) for i, s in enumerate(SAMPLES) for p in range(len(s.tokens)))


@pytest.mark.parametrize("cp", DEGREES)
def test_every_response_token_is_predicted_once(cp: int) -> None:
    predicted: Counter[tuple[int, int, int]] = Counter()
    for part in parts(cp):
        for row, target, i, index in zip(part.rows, part.target, part.owner, part.index, strict=True):
            assert SAMPLES[i].prompt_len + index == part.positions[row] + 1, "the row before the token"
            predicted[int(i), int(index), int(target)] += 1
    expected = ((i, j, s.tokens[s.prompt_len + j]) for i, s in enumerate(SAMPLES) for j in range(s.response_len))
    assert predicted == Counter(expected)


@pytest.mark.parametrize("cp", DEGREES)
def test_slices_are_adjacent_rows_of_their_sample(cp: int) -> None:
    for part in parts(cp):
        edges = [edge for sample in part.slices for edge in sample]
        assert [a for a, _ in edges] == [0, *(z for _, z in edges[:-1])]
        assert [sample[0][0] for sample in part.slices] == part.first[:-1].tolist()
        assert all(len(sample) == 8 // cp for sample in part.slices)
        for a, z in edges:
            assert part.positions[a:z].tolist() == sorted(part.positions[a:z].tolist())


@pytest.mark.parametrize("cp", DEGREES)
def test_gathered_keys_are_in_position_order(cp: int) -> None:
    batches = parts(cp)
    padded = torch.full((cp, batches[0].padded), -1)
    for row, part in zip(padded, batches, strict=True):
        row[: part.ids.numel()] = part.ids
    for part in batches:
        gathered = padded.flatten()[part.gather].tolist()
        assert gathered == [token for s in SAMPLES for token in s.tokens]
        assert part.key_first.diff().tolist() == [len(s.tokens) for s in SAMPLES]


def test_an_empty_rank_is_legal() -> None:
    batches = on_ranks(1, 8, lambda context: build(sized(2), context))
    assert sum(part.ids.numel() for part in batches) == 2
    assert sum(part.rows.numel() for part in batches) == 1
    assert any(part.ids.numel() == 0 for part in batches)
