"""Norms, rotary embedding, SwiGLU and additions: a declared order within a row, one rounding, and no neighbours.

N 144 is nine rounds of a norm's 16 lanes, so the order of a row's sum shows; five rows at unlike places of memory show
whether an element depends on where it lies. Errors are RMS over all elements.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from rlk.kernels import pointwise
from rlk.kernels.tree import tree_sum
from tests.unit.probes import (
    Record,
    assert_as_accurate,
    assert_moved,
    assert_same,
    left_to_right,
    moved,
    normal,
    spread,
)

EPS = 1e-6
ROWS, N = 5, 144
X, DY, RES = (spread(ROWS, N, seed=s) for s in (1, 2, 3))
GAIN = spread(N, seed=4, factor=0.5)


def lanes(terms: torch.Tensor) -> torch.Tensor:
    """The declared order of a row's sum, fp32 [R, N] to [R]: 16 interleaved chains, then a tree over them."""
    return tree_sum(torch.stack([left_to_right(terms[:, i::16].t()) for i in range(16)]))


def test_a_norm_reduces_in_sixteen_lanes() -> None:
    squares = X.float() * X.float()
    _, rstd = pointwise.rmsnorm(X, GAIN, EPS)
    mean = lanes(squares) / torch.tensor(float(N)) + torch.tensor(EPS)
    # torch's own fp32 root is not correctly rounded everywhere; through float64 it is
    assert_same(rstd, 1.0 / mean.double().sqrt().float())
    assert_moved(left_to_right(squares.t()), lanes(squares), "left to right")


def test_a_norm_multiplies_in_the_declared_order() -> None:
    y, rstd = pointwise.rmsnorm(X, GAIN, EPS)
    x, w = X.float(), GAIN.float()
    assert_same(y, ((x * rstd[:, None]) * w).to(torch.bfloat16) + 0.0)
    assert_moved((x * rstd[:, None]).to(torch.bfloat16) * GAIN, y, "rounding before the gain")


def test_a_normed_row_is_the_same_alone() -> None:
    y, rstd = pointwise.rmsnorm(X, GAIN, EPS)
    dx = pointwise.rmsnorm_backward(DY, X, GAIN, rstd, RES)
    for r in range(ROWS):
        row = slice(r, r + 1)
        assert_same(pointwise.rmsnorm(X[row], GAIN, EPS)[0], y[row], f"row {r}")
        assert_same(pointwise.rmsnorm_backward(DY[row], X[row], GAIN, rstd[row], RES[row]), dx[row], f"row {r}")


def norm_gradient(order: str) -> torch.Tensor:
    _, rstd = pointwise.rmsnorm(X, GAIN, EPS)
    g, xhat = DY.float() * GAIN.float(), X.float() * rstd[:, None]
    total = lanes(g * xhat) if order == "lanes" else left_to_right((g * xhat).t())
    return rstd[:, None] * (g - xhat * (total / torch.tensor(float(N)))[:, None])


def test_a_norm_gradient_follows_the_declared_order() -> None:
    _, rstd = pointwise.rmsnorm(X, GAIN, EPS)
    assert_same(pointwise.rmsnorm_backward(DY, X, GAIN, rstd), norm_gradient("lanes").to(torch.bfloat16) + 0.0)
    assert_moved(norm_gradient("left to right"), norm_gradient("lanes"), "left to right")


def test_a_residual_gradient_joins_before_the_rounding() -> None:
    _, rstd = pointwise.rmsnorm(X, GAIN, EPS)
    joined = pointwise.rmsnorm_backward(DY, X, GAIN, rstd, RES)
    assert_same(joined, (RES.float() + norm_gradient("lanes")).to(torch.bfloat16) + 0.0)
    assert_moved(pointwise.add(RES, pointwise.rmsnorm_backward(DY, X, GAIN, rstd)), joined, "two roundings")


def test_a_gain_gradient_is_a_chain_over_rows() -> None:
    dy, x = spread(12, N, seed=5), spread(12, N, seed=6)
    _, rstd = pointwise.rmsnorm(x, GAIN, EPS)
    terms = dy.float() * (x.float() * rstd[:, None])
    expected = left_to_right(torch.cat([torch.zeros(1, N), terms]))
    assert_same(pointwise.rmsnorm_gain(dy, x, rstd), expected)
    assert_moved(terms[:8].sum(0) + left_to_right(terms[8:]), expected, "rows in two groups")


def test_a_residual_sum_is_rounded_once() -> None:
    assert_same(pointwise.add(X, RES), (X.float() + RES.float()).to(torch.bfloat16) + 0.0)
    assert_same(pointwise.add(-X.new_zeros(3), -X.new_zeros(3)), X.new_zeros(3), "the sum of two negative zeros")


def test_rotary_depends_on_position_not_place() -> None:
    cos, sin = pointwise.rope_tables(1e6, 16, 300)
    x, positions = spread(6, 3, 16, seed=7), torch.tensor([0, 1, 255, 256, 257, 299])
    whole = pointwise.rope(x, cos, sin, positions)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    assert_same(pointwise.rope(x[order], cos, sin, positions[order]), whole[order])
    assert_moved(pointwise.rope(x, cos, sin, positions + 1 - 2 * (positions == 299)), whole, "another position")


def test_rotary_is_fp32_and_rounded_once() -> None:
    cos, sin = pointwise.rope_tables(1e6, 16, 300)
    x, positions = spread(6, 3, 16, seed=7), torch.tensor([0, 1, 255, 256, 257, 299])
    c, s, (a, b) = cos[positions][:, None], sin[positions][:, None], x.float().chunk(2, -1)
    expected = torch.cat([a * c - b * s, b * c + a * s], -1).to(torch.bfloat16) + 0.0
    assert_same(pointwise.rope(x, cos, sin, positions), expected)
    back = torch.cat([a * c + b * s, b * c - a * s], -1).to(torch.bfloat16) + 0.0
    assert_same(pointwise.rope(x, cos, sin, positions, backward=True), back, "backward")


def test_swiglu_depends_on_no_neighbour() -> None:
    gate_up = spread(7, 2, 2 * 37, seed=8, factor=1.0)
    whole = pointwise.swiglu(gate_up)
    dy = spread(7, 2, 37, seed=9)
    back = pointwise.swiglu_backward(dy, gate_up)
    for i in range(37):
        one = gate_up[:, :, [i, 37 + i]].contiguous()
        assert_same(pointwise.swiglu(one), whole[:, :, i : i + 1], f"column {i}")
        grads = pointwise.swiglu_backward(dy[:, :, i : i + 1].contiguous(), one)
        assert_same(grads, back[:, :, [i, 37 + i]], f"gradient of column {i}")


def test_swiglu_is_rounded_once() -> None:
    gate_up = spread(64, 2, 2 * 64, seed=8, factor=1.0)
    gate, up = gate_up.double().chunk(2, -1)
    exact = (functional.silu(gate) * up).to(torch.bfloat16) + 0.0
    found = pointwise.swiglu(gate_up)
    # fp32 steps may turn a tie of the exact value; a second rounding moves many more
    twice = functional.silu(gate.to(torch.bfloat16)) * gate_up.chunk(2, -1)[1]
    assert moved(found, exact) * 100 < moved(twice, exact)


def test_swiglu_holds_at_extreme_gates() -> None:
    gate = torch.tensor([-3e38, -200.0, -100.0, 0.0, 100.0, 200.0], dtype=torch.bfloat16)
    found = pointwise.swiglu(torch.cat([gate, torch.ones_like(gate)]).view(1, 1, -1))
    assert found.isfinite().all()
    assert found.flatten().tolist()[3:] == [0.0, 100.0, 200.0]


def test_an_embedding_gradient_is_a_chain_over_tokens() -> None:
    dx, rows = spread(9, N, seed=10, factor=4.0), torch.tensor([2, 0, 2, -1, 2, 5, 2, 2, 4])
    found = pointwise.embedding_leaf(dx, rows, 5)
    expected = torch.zeros(5, N)
    for value, row in zip(dx.float(), rows.tolist(), strict=True):
        if 0 <= row < 5:
            expected[row] = expected[row] + value
    assert_same(found, expected)
    assert_moved(pointwise.embedding_leaf(dx.flip(0), rows.flip(0), 5), expected, "tokens in reverse")


def test_a_norm_is_as_accurate_as_torch(record_property: Record) -> None:
    x, w = normal(64, 1024, seed=11, scale=3), normal(1024, seed=12)
    exact = functional.rms_norm(x.double(), (1024,), w.double(), EPS)
    ordinary = functional.rms_norm(x, (1024,), w, EPS)
    assert_as_accurate(pointwise.rmsnorm(x, w, EPS)[0], ordinary, exact, record_property)


def test_a_norm_gradient_is_as_accurate_as_torch(record_property: Record) -> None:
    x, w, dy = normal(64, 1024, seed=11, scale=3), normal(1024, seed=12), normal(64, 1024, seed=13)
    exact, ordinary = (gradient_of_norm(x.to(t), w.to(t), dy.to(t)) for t in (torch.float64, torch.bfloat16))
    _, rstd = pointwise.rmsnorm(x, w, EPS)
    assert_as_accurate(pointwise.rmsnorm_backward(dy, x, w, rstd), ordinary, exact, record_property)


def gradient_of_norm(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(functional.rms_norm(x, (x.shape[-1],), w, EPS), x, dy)
    return grad


def test_swiglu_is_as_accurate_as_torch(record_property: Record) -> None:
    gate_up = normal(64, 1, 1024, seed=14, scale=2)
    (gate, up), (gate64, up64) = gate_up.chunk(2, -1), gate_up.double().chunk(2, -1)
    exact, ordinary = functional.silu(gate64) * up64, functional.silu(gate) * up
    assert_as_accurate(pointwise.swiglu(gate_up), ordinary, exact, record_property)


def test_a_swiglu_gradient_is_as_accurate_as_torch(record_property: Record) -> None:
    gate_up, dy = normal(64, 1, 1024, seed=14, scale=2), normal(64, 1, 512, seed=15)
    exact, ordinary = (gradient_of_swiglu(gate_up.to(t), dy.to(t)) for t in (torch.float64, torch.bfloat16))
    assert_as_accurate(pointwise.swiglu_backward(dy, gate_up), ordinary, exact, record_property)


def gradient_of_swiglu(gate_up: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    x = gate_up.detach().requires_grad_()
    gate, up = x.chunk(2, -1)
    (grad,) = torch.autograd.grad(functional.silu(gate) * up, x, dy)
    return grad


def test_rotary_is_as_accurate_as_torch(record_property: Record) -> None:
    """The ordinary op multiplies bf16 by fp32 tables and rounds once; its tables come from fp32 angles."""
    x, positions = normal(300, 4, 16, seed=16), torch.arange(300)
    inverse = 1e6 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    angles = positions.double()[:, None] * inverse
    coarse = positions.float()[:, None] * inverse.float()

    def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        c, s, (a, b) = angles.cos()[:, None], angles.sin()[:, None], x.chunk(2, -1)
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    exact, ordinary = turned(x.double(), angles), turned(x.float(), coarse).to(torch.bfloat16)
    found = pointwise.rope(x, *pointwise.rope_tables(1e6, 16, 300), positions)
    assert_as_accurate(found, ordinary, exact, record_property)
