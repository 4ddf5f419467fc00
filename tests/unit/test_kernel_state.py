"""What is done to whole tensors: one AdamW kernel, sums of squares in index order, fingerprints that need no gathering.

1,003 elements end no vector of any width; five steps let a wrong bias correction or decay show. Shards are cut as
tensor parallelism cuts them: by rows and by columns, with a remainder.
"""

from __future__ import annotations

import random

import pytest
import torch

from rlk.kernels import state
from rlk.kernels.state import AdamStep
from tests.unit.probes import Record, assert_as_accurate, assert_moved, assert_same, bits, spread

N, LR, BETAS, EPS, DECAY, CLIP = 1003, 1e-2, (0.9, 0.98), 1e-8, 0.1, 0.37
MASK = (1 << 64) - 1


def adam_step(t: int, decay: float = DECAY) -> AdamStep:
    return AdamStep.at(t, lr=LR, betas=BETAS, eps=EPS, decay=decay, clip=CLIP)


def gradients(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [spread(N, seed=t).to(dtype) * 0.01 for t in range(1, 6)]


def run_kernel(pieces: int = 1, decay: float = DECAY) -> tuple[torch.Tensor, ...]:
    """Master and moments after five steps, with the elements cut in `pieces` calls."""
    tensors = [spread(N, seed=0).float(), torch.zeros(N), torch.zeros(N)]
    for t, grad in enumerate(gradients(), 1):
        for p, m, v, g in zip(*(x.tensor_split(pieces) for x in (*tensors, grad)), strict=True):
            state.adamw(p, m, v, g, adam_step(t, decay))
    return tuple(tensors)


def run_torch(dtype: torch.dtype, decay: float = DECAY) -> torch.Tensor:
    p = torch.nn.Parameter(spread(N, seed=0).to(dtype))
    optimizer = torch.optim.AdamW([p], lr=LR, betas=BETAS, eps=EPS, weight_decay=decay)
    for grad in gradients(dtype):
        p.grad = grad * CLIP
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("pieces", [2, 7, 64, N])
def test_an_element_is_updated_alike_in_any_piece(pieces: int) -> None:
    for found, expected in zip(run_kernel(pieces), run_kernel(), strict=True):
        assert_same(found, expected)


def test_an_update_is_the_listed_operations() -> None:
    p, m, v = run_kernel()
    e, n, w = spread(N, seed=0).float(), torch.zeros(N), torch.zeros(N)
    for t, grad in enumerate(gradients(), 1):
        s = adam_step(t)
        fp32 = {name: torch.tensor(getattr(s, name)).float() for name in s.__dataclass_fields__}
        g, e = grad * fp32["clip"], e * fp32["keep"]
        n = fp32["beta1"] * n + fp32["rest1"] * g
        w = fp32["beta2"] * w + fp32["rest2"] * (g * g)
        root = w.double().sqrt().float()  # torch's fp32 root is not correctly rounded everywhere
        e = e - fp32["step"] * (n / (root / fp32["correction"] + fp32["eps"]))
    for found, expected in ((p, e), (m, n), (v, w)):
        assert_same(found, expected)


@pytest.mark.parametrize("decay", [DECAY, 0.0])
def test_adamw_is_as_accurate_as_torch(decay: float, record_property: Record) -> None:
    ordinary, exact = run_torch(torch.float32, decay), run_torch(torch.float64, decay)
    assert_as_accurate(run_kernel(decay=decay)[0], ordinary, exact, record_property)


def test_decay_moves_the_master_before_the_step() -> None:
    assert_moved(run_kernel(decay=0.0)[0], run_kernel()[0], "no decay")


def test_squares_are_summed_in_index_order() -> None:
    x = spread(N, seed=3, factor=4.0).float()
    total = torch.zeros((), dtype=torch.float64)
    for value in x.double():
        total = total + value * value
    assert state.sum_squares(x) == total.item()
    assert state.sum_squares(x.flip(0)) != total.item()


def mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def test_a_fingerprint_equals_its_definition() -> None:
    x = spread(3, 5, seed=4)
    words = [int(b) & 0xFFFF for b in bits(x).flatten()]
    first = sum(mix(mix((i * 0x9E3779B97F4A7C15 + 1) & MASK) ^ b) for i, b in enumerate(words))
    second = sum(
        mix((mix((i * 0xD1B54A32D192ED03 + 2) & MASK) + b * 0x8CB92BA72F3D8DD7) & MASK) for i, b in enumerate(words)
    )
    assert state.fingerprint(x) == (first & MASK, second & MASK)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_parts_of_a_tensor_add_up(parts: int, dtype: torch.dtype) -> None:
    x = spread(37, 41, seed=5).to(dtype)
    whole, by_rows, by_cols = state.fingerprint(x), [], []
    for held in torch.arange(37).tensor_split(parts):
        by_rows.append(state.fingerprint(x[held], row0=int(held[0])))
    for held in torch.arange(41).tensor_split(parts):
        a, z = int(held[0]), int(held[-1]) + 1
        by_cols.append(state.fingerprint(x[:, a:z], col0=a, width=41))
    random.Random(0).shuffle(by_rows)
    assert state.combine(by_rows) == whole
    assert state.combine(by_cols) == whole
    assert state.combine([state.fingerprint(part) for part in x.tensor_split(parts)]) != whole, "places forgotten"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_any_flipped_bit_changes_both_sums(dtype: torch.dtype) -> None:
    x = spread(4, 9, seed=6).to(dtype)
    whole = state.fingerprint(x)
    for bit in range(8 * x.element_size()):
        words = bits(x).clone()
        words[2, 3] ^= torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(words.dtype)
        found = state.fingerprint(words.view(dtype))
        assert found[0] != whole[0]
        assert found[1] != whole[1]


def test_swapped_elements_change_a_fingerprint() -> None:
    x = spread(4, 9, seed=6)
    y = x.clone()
    y[1, 2], y[3, 3] = x[3, 3], x[1, 2]
    assert sorted(x.flatten().tolist()) == sorted(y.flatten().tolist())
    assert state.fingerprint(y) != state.fingerprint(x)


def test_a_zero_and_its_negative_differ() -> None:
    assert state.fingerprint(torch.zeros(1, 2)) != state.fingerprint(-torch.zeros(1, 2))


def test_hex_shows_all_128_bits() -> None:
    assert state.as_hex((1, MASK)) == "0000000000000001:ffffffffffffffff"


def test_a_transposed_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="rows of contiguous elements"):
        state.fingerprint(spread(4, 9, seed=6).t())
