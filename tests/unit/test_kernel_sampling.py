"""A sampled token is a function of its logits and its key (seed, sample id, position), and follows the distribution.

2^20 equal logits make the token the first 20 random bits; 20,000 draws over 16 tokens leave a wrong temperature no
room under the bound. Known answers of Philox4x32-10 are those published with Random123.
"""

from __future__ import annotations

import pytest
import torch

from rlk.kernels.policy import RowParams, sample_rows, score_rows
from tests.unit.exact_policy import WORD, exact, philox
from tests.unit.probes import assert_same, normal, spread

Setting = tuple[float, float, int]
MIX: list[Setting] = [(0.7, 0.95, -1), (1.3, 0.99, 20), (0.0, 1.0, -1), (1.0, 1.0, -1), (2.0, 0.5, 100)]
V = 300


def sampled(
    rows: torch.Tensor, settings: list[Setting], seed: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return sample_rows(rows, RowParams.build(settings, rows.shape[1]), seed, ids, positions)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD, WORD, WORD, WORD), (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_the_reference_generator_gives_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert philox(counter, key) == words


def test_the_kernel_draws_the_known_answer() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    token, _ = sampled(torch.zeros(1, 1 << 20, dtype=torch.bfloat16), [(1.0, 1.0, -1)], zero, zero, zero)
    assert token.tolist() == [0x6627E8D5 >> 12]


def test_every_word_of_the_key_is_used() -> None:
    """Rows differ in one word each: both of the seed, both of the sample id, and the position."""
    seeds = [0, 1, 1 << 32, 0, 0, 0, -1, (1 << 63) - 1]
    ids = [0, 0, 0, 1, 1 << 32, 0, -1, 1 << 40]
    positions = [0, 0, 0, 0, 0, 1, 0xFFFFFFFF, 4096]
    rows = torch.zeros(len(ids), 1 << 16, dtype=torch.bfloat16)
    tokens, _ = sampled(rows, [(1.0, 1.0, -1)] * len(ids), *(torch.tensor(x) for x in (seeds, ids, positions)))
    row = exact(rows[0], 1.0)
    assert tokens.tolist() == [row.draw(*key) for key in zip(seeds, ids, positions, strict=True)]
    assert len(set(tokens.tolist())) == len(ids)


@pytest.mark.parametrize("setting", MIX, ids=str)
def test_draws_equal_the_integer_reference(setting: Setting) -> None:
    row, n = spread(V, seed=1, factor=0.5), 300
    ids, positions, seed = torch.arange(n) * 7 + (1 << 33), torch.arange(n) % 50, torch.full((n,), 12345678901)
    tokens, logprobs = sampled(row.expand(n, V).contiguous(), [setting] * n, seed, ids, positions)
    reference = exact(row, *setting)
    if setting[0] == 0:
        expected = [int(row.float().argmax())] * n
    else:
        expected = [reference.draw(12345678901, int(i), int(p)) for i, p in zip(ids, positions, strict=True)]
    assert tokens.tolist() == expected
    assert_same(logprobs, torch.tensor([reference.logprob(t) for t in expected], dtype=torch.float64).float())


def test_draws_ignore_batch_and_order() -> None:
    n = 60
    rows, settings = normal(n, V, seed=2, scale=2), [MIX[i % len(MIX)] for i in range(n)]
    seed, ids, positions = torch.full((n,), 3), torch.arange(n), torch.arange(n) * 3
    tokens, logprobs = sampled(rows, settings, seed, ids, positions)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    shuffled = sampled(rows[order], [settings[i] for i in order], seed, ids[order], positions[order])
    assert_same(shuffled[0], tokens[order])
    assert_same(shuffled[1], logprobs[order])
    for i in (0, 17, 59):
        one = slice(i, i + 1)
        assert_same(sampled(rows[one], settings[one], seed[one], ids[one], positions[one])[0], tokens[one], f"row {i}")
    others, _ = sampled(rows, settings, seed, ids + n, positions)
    assert (others != tokens).sum() > n // 4, "another sample id draws other tokens"


def test_scoring_gives_the_sampled_bits() -> None:
    n = 200
    rows, params = normal(n, V, seed=3, scale=3), RowParams.build([MIX[i % len(MIX)] for i in range(n)], V)
    tokens, logprobs = sample_rows(rows, params, torch.full((n,), 5), torch.arange(n), torch.arange(n) + 20)
    again, inside, _ = score_rows(rows, params, tokens)
    assert_same(again, logprobs)
    assert inside.all()


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    row = torch.zeros(1, V, dtype=torch.bfloat16)
    row[0, [250, 31, 299]] = 2.0
    key = torch.zeros(1, dtype=torch.int64)
    assert sampled(row, [(0.0, 0.1, 1)], key, key, key)[0].tolist() == [31]


def test_greedy_rows_leave_their_neighbours_alone() -> None:
    rows, key = normal(3, V, seed=4, scale=2), torch.arange(3)
    mixed = sampled(rows, [(0.7, 0.9, -1), (0.0, 1.0, -1), (0.7, 0.9, -1)], key, key, key)
    tempered = sampled(rows, [(0.7, 0.9, -1)] * 3, key, key, key)
    for found, expected in zip(mixed, tempered, strict=True):
        assert_same(found[[0, 2]], expected[[0, 2]])


def chi_square(row: torch.Tensor, drawn: torch.Tensor, setting: Setting) -> float:
    """Pearson's statistic against the distribution of `setting`; infinite where a token outside it was drawn."""
    reference, counts = exact(row, *setting), drawn.bincount(minlength=row.numel()).tolist()
    if any(n and i not in reference.kept for i, n in enumerate(counts)):
        return float("inf")
    expected = {i: drawn.numel() * reference.mass[i] / reference.total for i in reference.kept}
    return float(sum((counts[i] - e) ** 2 / e for i, e in expected.items()))


@pytest.mark.parametrize("setting", [(1.0, 1.0, -1), (0.7, 0.95, -1), (1.3, 1.0, 6)], ids=str)
def test_frequencies_follow_the_distribution(setting: Setting) -> None:
    row, n = torch.linspace(-2, 1, 16).to(torch.bfloat16), 20_000
    zeros = torch.zeros(n, dtype=torch.int64)
    drawn, _ = sampled(row.expand(n, 16).contiguous(), [setting] * n, zeros, torch.arange(n), zeros + 7)
    bound = 50.0  # one fair run in 10^5 exceeds it with 15 degrees of freedom
    assert chi_square(row, drawn, setting) < bound
    assert chi_square(row, drawn, (setting[0] * 1.3, *setting[1:])) > bound
