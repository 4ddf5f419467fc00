"""Norms, rotation, activation and sums over rows of Qwen3-8B beside torch's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from rlk.kernels import pointwise
from tests.bench.case import Case
from tools.gpu.data import DEVICE, normal


def cases() -> Iterator[Case]:
    """A decode batch and a training batch."""
    for rows in (64, 8192):
        yield from _norms(rows)
        yield from _elementwise(rows)


def _norms(rows: int) -> Iterator[Case]:
    size = f"{rows} rows"
    for name, shape in (("hidden", (rows, 4096)), ("32 heads", (rows, 32, 128))):
        width = shape[-1:]
        yield Case(
            f"rmsnorm, {name}", size, lambda s=shape: (normal(*s, seed=20), normal(s[-1], seed=21)),
            {"triton": lambda x, w: pointwise.rmsnorm(x, w, 1e-6)[0]},
            ("functional.rms_norm", lambda x, w, n=width: functional.rms_norm(x, n, w, 1e-6)),
            lambda x, w, n=width: functional.rms_norm(x.double(), n, w.double(), 1e-6),
        )  # fmt: skip

    def make() -> tuple[torch.Tensor, ...]:
        x, w, dy = normal(rows, 4096, seed=20), normal(4096, seed=21), normal(rows, 4096, seed=22)
        return dy, x, w, pointwise.rmsnorm(x, w, 1e-6)[1]

    def ordinary(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
        grad = torch.ops.aten._fused_rms_norm_backward(dy, x, (4096,), rstd.view(-1, 1), w, [True, False])
        return grad[0]  # type: ignore[no-any-return]

    yield Case(
        "rmsnorm backward", size, make,
        {"triton": lambda dy, x, w, rstd: pointwise.rmsnorm_backward(dy, x, w, rstd, None)},
        ("torch's fused backward", ordinary),
    )  # fmt: skip


def _elementwise(rows: int) -> Iterator[Case]:
    size = f"{rows} rows"
    tables, positions = torch.rand(16384, 64, device=DEVICE), torch.arange(rows, device=DEVICE)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        cos, sin = (tables[positions].repeat(1, 2)[:, None] for _ in range(2))
        left, right = x.chunk(2, -1)
        return (x * cos + torch.cat([-right, left], -1) * sin).to(x.dtype)

    yield Case(
        "rotation, 32 heads", size, lambda: (normal(rows, 32, 128, seed=23),),
        {"triton": lambda x: pointwise.rope(x, tables, tables, positions)}, ("torch, eager", rotated),
        lambda x: rotated(x.double()),
    )  # fmt: skip
    yield Case(
        "swiglu", size, lambda: (normal(rows, 8, 3072, seed=25),), {"triton": pointwise.swiglu},
        ("silu(gate) * up", lambda x: functional.silu(x.chunk(2, 2)[0]) * x.chunk(2, 2)[1]),
        lambda x: functional.silu(x.double().chunk(2, 2)[0]) * x.double().chunk(2, 2)[1],
    )  # fmt: skip
    yield Case(
        "residual sum", size, lambda: (normal(rows, 4096, seed=20), normal(rows, 4096, seed=22)),
        {"triton": pointwise.add}, ("x + y", lambda x, y: x + y), lambda x, y: x.double() + y.double(),
    )  # fmt: skip
