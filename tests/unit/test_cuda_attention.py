"""Attention as Triton programs, interpreted: a row depends on itself and its own keys, and gradients on whole slices.

Lengths 1, 63, 64, 65 and 130 lie on both sides of the block of 64 keys and reach a third one; 4 query heads over 2
key heads make tiles of 64 rows hold 32 tokens, so that longer sequences have several tiles and short ones share none.
"""

from __future__ import annotations

import torch

from rlk.model.slices import slice_positions
from tests.unit.interpreted import interpreted
from tests.unit.probes import assert_moved, assert_same, spread

LENGTHS = (1, 63, 64, 65, 130)
H, HK, D = 4, 2, 16
TOTAL = sum(LENGTHS)
FIRST = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])
Q = spread(TOTAL, H, D, seed=1, factor=1.0) * 0.5
K, V = spread(2, TOTAL, HK, D, seed=2, factor=1.0) * 0.5


def near(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    assert error <= bound, f"relative error {error:.3g}, allowed is {bound:.3g}"


@interpreted
def test_packed_rows_agree_with_the_cpu_form() -> None:
    from rlk.kernels.cpu import attention as cpu
    from rlk.kernels.cuda import attention

    out, lse = attention.packed(Q, K, V, POSITIONS, FIRST, FIRST)
    expected, expected_lse = cpu.packed(Q, K, V, POSITIONS, FIRST, FIRST)
    near(out, expected, 2**-9)
    near(lse, expected_lse, 1e-6)


@interpreted
def test_a_row_is_the_same_alone_and_packed() -> None:
    from rlk.kernels.cuda import attention

    out, lse = attention.packed(Q, K, V, POSITIONS, FIRST, FIRST)
    keys = slice(int(FIRST[-2]), TOTAL)
    for rows in (torch.tensor([129]), torch.tensor([2, 64, 65, 100])):
        at = keys.start + rows
        ends = (torch.tensor([0, rows.numel()]), torch.tensor([0, LENGTHS[-1]]))
        alone = attention.packed(Q[at], K[keys], V[keys], rows, *ends)
        assert_same(alone[0], out[at])
        assert_same(alone[1], lse[at])
    assert_moved(attention.packed(Q, K.flip(0), V.flip(0), POSITIONS, FIRST, FIRST)[0], out, "keys in reverse")


@interpreted
def test_runs_of_adjacent_positions_are_found_for_the_library() -> None:
    """Two virtual slices of two sequences, of which the first has a row alone, and one in between without rows."""
    from rlk.kernels.cuda.flash import Segments

    positions = torch.tensor([0, 1, 2, 6, 8, 9, 3, 4])
    runs = Segments.of(positions, torch.tensor([0, 6, 6, 8]), torch.tensor([0, 10, 15, 25]))
    assert runs.first.tolist() == [0, 3, 4, 6, 8]
    assert runs.keys.tolist() == [0, 0, 0, 15, 25]
    assert runs.lengths.tolist() == [3, 7, 10, 5]
    joined = Segments.of(torch.tensor([4, 5, 6, 7]), torch.tensor([0, 2, 4]), torch.tensor([0, 6, 14]))
    assert joined.first.tolist() == [0, 2, 4], "positions that go on in another sequence are another run"
    assert Segments.of(positions[:0], torch.tensor([0, 0]), torch.tensor([0, 4])).first.tolist() == [0]


@interpreted
def test_pages_chunks_and_decode_are_the_packed_rows() -> None:
    from rlk.kernels.cuda import attention

    out, _ = attention.packed(Q, K, V, POSITIONS, FIRST, FIRST)
    page, pages = 16, [-(-n // 16) for n in LENGTHS]
    table = torch.zeros(len(LENGTHS), max(pages) + 1, dtype=torch.int32)[
        :, 1:
    ]  # rows of a wider table, as an engine has
    names = iter(range(sum(pages), 0, -1))
    for i, n in enumerate(pages):
        table[i, :n] = torch.tensor([next(names) for _ in range(n)])
    cache = torch.full((sum(pages) + 1, HK, page, 2 * D), float("nan"), dtype=torch.bfloat16)
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    slots = table[owner, POSITIONS // page].long() * page + POSITIONS % page
    hidden = torch.cat([slots, torch.tensor([-1])])
    attention.write_pages(torch.cat([K, K[:1]]), torch.cat([V, V[:1]]), cache, hidden)
    assert int(cache[0].isnan().sum()) == cache[0].numel(), "padding went nowhere"
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    assert_same(attention.paged(Q, cache, table, FIRST.int(), lengths), out, "prefill")
    last = FIRST[1:] - 1
    each = torch.arange(len(LENGTHS) + 1, dtype=torch.int32)
    assert_same(attention.paged(Q[last], cache, table, each, lengths), out[last], "decode")
    chunk = torch.cat([torch.arange(int(z) - (n + 1) // 2, int(z)) for z, n in zip(FIRST[1:], LENGTHS, strict=True)])
    ends = torch.tensor([0, *torch.tensor([(n + 1) // 2 for n in LENGTHS]).cumsum(0).tolist()], dtype=torch.int32)
    assert_same(attention.paged(Q[chunk], cache, table, ends, lengths), out[chunk], "chunk")


@interpreted
def test_gradients_agree_with_the_cpu_form() -> None:
    from rlk.kernels.cpu import attention as cpu
    from rlk.kernels.cuda import attention

    out, lse = cpu.packed(Q, K, V, POSITIONS, FIRST, FIRST)
    rows, slices = [], []
    for i, n in enumerate(LENGTHS):
        ranges = []
        for j in range(8):
            here = [int(FIRST[i]) + p for p in slice_positions(j, n)]
            ranges.append((len(rows), len(rows) + len(here)))
            rows += here
        slices.append(ranges)
    at = torch.tensor(rows)
    held = (spread(TOTAL, H, D, seed=3, factor=1.0), Q[at], K, V, out[at], lse[at], POSITIONS[at], FIRST)
    args = (*held, FIRST.tolist(), slices)
    for found, expected in zip(attention.packed_gradients(*args), cpu.packed_gradients(*args), strict=True):
        near(found, expected, 2**-8)


@interpreted
def test_one_slice_adds_to_the_leaf_it_is_given() -> None:
    from rlk.kernels.cpu import attention as cpu
    from rlk.kernels.cuda import attention

    n, a, z = 65, 10, 40
    keys, ends = slice(int(FIRST[3]), int(FIRST[4])), torch.tensor([0, n])
    out, lse = cpu.packed(Q[keys], K[keys], V[keys], torch.arange(n), ends, ends)
    dout = Q[keys].flip(0)
    rows = (dout[a:z], Q[keys][a:z], K[keys], V[keys], out[a:z], lse[a:z], torch.arange(a, z))
    results = []
    for form in (attention, cpu):
        dq, leaf = torch.empty(z - a, H, D, dtype=torch.bfloat16), torch.ones(2, n, HK, D)
        form.packed_backward(*rows, dq, leaf[0], leaf[1])
        results.append((dq, leaf))
    for found, expected in zip(*results, strict=True):
        near(found, expected, 2**-8)
    assert_same(results[0][1][:, z:], torch.ones(2, n - z, HK, D), "keys that no row sees")
