"""Ops made of single additions, products, divisions and roots share every bit with the CPU form."""

from __future__ import annotations

import torch

from rlk.kernels import pointwise, state
from rlk.kernels.cuda import gemm as cuda_gemm
from rlk.kernels.pointwise import rope_tables
from rlk.kernels.state import AdamStep
from tools.gpu.data import DEVICE, equal, spread
from tools.gpu.report import Report


def run(report: Report) -> None:
    """Needs a C++ compiler for the CPU form; without one this step is one failed entry that says so."""
    for part in (_norms, _gains, _elementwise, _embedding, _rounding, _adamw, _fingerprints, _squares):
        report.check(part.__name__[1:], part)


def _host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.cpu() for t in tensors]


def _norms() -> str:
    for n, rows in ((128, 1000), (1024, 50), (4096, 70)):
        x, dy, residual = (spread(rows, n, seed=s) for s in (1, 2, 3))
        w = spread(n, seed=4)
        y, rstd = pointwise.rmsnorm(x, w, 1e-6)
        expected = pointwise.rmsnorm(*_host(x, w), 1e-6)
        equal(y.cpu(), expected[0], f"norm of {n}")
        equal(rstd.cpu(), expected[1], f"reciprocal deviation of {n}")
        for joined in (None, residual):
            found = pointwise.rmsnorm_backward(dy, x, w, rstd, joined)
            theirs = pointwise.rmsnorm_backward(*_host(dy, x, w, rstd), None if joined is None else joined.cpu())
            equal(found.cpu(), theirs, f"norm backward of {n}")
    return "rows of 128, 1,024 and 4,096"


def _gains() -> str:
    dy, x = (spread(300, 8, 4, 128, seed=s) for s in (5, 6))
    rstd, ranges = torch.rand(300 * 32, device=DEVICE), [(0, 100), (100, 100), (100, 300)]
    found = pointwise.rmsnorm_gains(dy, x, rstd, ranges)
    equal(found.cpu(), pointwise.rmsnorm_gains(*_host(dy, x, rstd), ranges), "gains")
    return "three ranges, eight groups"


def _elementwise() -> str:
    a, b = spread(333, 4096, seed=7), spread(333, 4096, seed=8)
    equal(pointwise.add(a, b).cpu(), pointwise.add(*_host(a, b)), "sum")
    cos, sin = rope_tables(1e6, 128, 5000)
    x, positions = spread(200, 32, 128, seed=9), torch.arange(200) * 25
    for backward in (False, True):
        found = pointwise.rope(x, cos.to(DEVICE), sin.to(DEVICE), positions.to(DEVICE), backward=backward)
        equal(found.cpu(), pointwise.rope(x.cpu(), cos, sin, positions, backward=backward), "rotation")
    return "sums and rotations"


def _embedding() -> str:
    dx, rows = spread(900, 1024, seed=10), torch.arange(900) * 7 % 300 - 2
    found = pointwise.embedding_leaf(dx, rows.to(DEVICE), 290)
    equal(found.cpu(), pointwise.embedding_leaf(dx.cpu(), rows, 290), "embedding leaf")
    return "900 tokens of 300 ids"


def _rounding() -> str:
    words = torch.arange(-(1 << 31), 1 << 31, 0x1003, dtype=torch.int64).to(torch.int32)
    x = words.view(torch.float32)
    x = x[~x.isnan()]
    from rlk.kernels.cpu import gemm as cpu

    equal(cuda_gemm.round_bf16(x.to(DEVICE)).cpu(), cpu.round_bf16(x), "rounding")
    return f"{x.numel()} words"


def _adamw() -> str:
    generator = torch.Generator().manual_seed(11)
    tensors = [torch.randn(100_001, generator=generator).abs() for _ in range(4)]
    tensors[0] *= torch.randn(100_001, generator=generator)
    ours = [t.to(DEVICE) for t in tensors]
    step = AdamStep.at(3, lr=1e-3, betas=(0.9, 0.98), eps=1e-8, decay=0.1, clip=0.7)
    state.adamw(*ours, step)
    state.adamw(*tensors, step)
    for name, a, b in zip(("master", "m", "v"), ours, tensors, strict=False):
        equal(a.cpu(), b, name)
    return "100,001 elements"


def _fingerprints() -> str:
    for x in (spread(333, 5000, seed=12)[:, :4097], spread(70, 1000, seed=13).float(), spread(1, 99, seed=14)):
        found, expected = (state.fingerprint(t, row0=3, col0=5, width=9000) for t in (x, x.cpu()))
        if found != expected:
            raise AssertionError(f"{state.as_hex(found)}, not {state.as_hex(expected)}")
    return "bf16 and fp32, with strides and offsets"


def _squares() -> dict[str, float]:
    x = torch.randn(3_000_000, device=DEVICE)
    found, exact = state.sum_squares(x), float(x.double().square().sum())
    if state.sum_squares(x.clone()) != found or abs(found - exact) > 1e-12 * exact:
        raise AssertionError(f"{found!r}, not {exact!r}")
    return {"relative_error": abs(found - exact) / exact}
