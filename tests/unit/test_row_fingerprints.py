"""Row fingerprints do not depend on who holds a shard or which rows lie beside it, and every bit of an element counts.

Eight virtual shards of five columns: an odd width, so that nothing passes by being a power of two.
"""

from __future__ import annotations

import pytest
import torch

from rlk.kernels import state

ROWS, SHARDS, COLS = 3, 8, 5


def _random(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(ROWS, SHARDS * COLS, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_owners_of_shards_do_not_matter(size: int, dtype: torch.dtype) -> None:
    x = _random(dtype)
    whole = state.row_fingerprints(x, SHARDS)
    n = SHARDS // size
    parts = [
        state.row_fingerprints(x[:, r * n * COLS : (r + 1) * n * COLS].contiguous(), n, r * n) for r in range(size)
    ]
    assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shards_add_up_to_the_whole_row(dtype: torch.dtype) -> None:
    x = _random(dtype)
    assert torch.equal(state.row_fingerprints(x, SHARDS).sum(1), state.row_fingerprints(x)[:, 0])


def test_other_rows_do_not_matter() -> None:
    x = _random(torch.bfloat16)
    assert torch.equal(state.row_fingerprints(x[1:2].contiguous(), SHARDS), state.row_fingerprints(x, SHARDS)[1:2])


@pytest.mark.parametrize("bit", [0, 1, 15])
def test_one_bit_moves_its_row_and_shard_alone(bit: int) -> None:
    x = _random(torch.bfloat16)
    before = state.row_fingerprints(x, SHARDS)
    x.view(torch.int16)[1, 3 * COLS + 2] ^= -0x8000 if bit == 15 else 1 << bit
    moved = (state.row_fingerprints(x, SHARDS) != before).nonzero().tolist()
    assert moved == [[1, 3]]


def test_swapped_columns_are_seen() -> None:
    x = _random(torch.float32)
    swapped = x.clone()
    swapped[:, [1, 2]] = x[:, [2, 1]]
    assert not torch.equal(state.row_fingerprints(x), state.row_fingerprints(swapped))


def test_part_of_the_matrix_fingerprint_is_the_sum_of_rows() -> None:
    """The first row of a matrix has the indices of a row alone, so the two kernels share their mix."""
    x = _random(torch.bfloat16)[:1].contiguous()
    first = int(state.row_fingerprints(x)[0, 0]) & state.MASK
    assert first == state.fingerprint(x)[0]


def test_rows_of_other_layouts_are_refused() -> None:
    with pytest.raises(TypeError, match="contiguous"):
        state.row_fingerprints(_random(torch.bfloat16)[:, ::2])
