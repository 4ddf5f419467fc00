"""Optimizer, gradient norm and fingerprints over 10^8 elements beside torch's."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rlk.kernels import state
from rlk.kernels.state import AdamStep
from tests.bench.case import Case
from tools.gpu.data import DEVICE, normal

N = 100_000_000


def cases() -> Iterator[Case]:
    """Each moves far more than the L2 holds."""
    step = AdamStep.at(3, lr=1e-3, betas=(0.9, 0.98), eps=1e-8, decay=0.1, clip=0.7)
    steps = torch.tensor(3.0, device=DEVICE)

    def four() -> tuple[torch.Tensor, ...]:
        return tuple(torch.rand(N, device=DEVICE) for _ in range(4))

    def fused(p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> None:
        torch._fused_adamw_(
            [p], [g], [m], [v], [], [steps], lr=1e-3, beta1=0.9, beta2=0.98, weight_decay=0.1, eps=1e-8, amsgrad=False,
            maximize=False,
        )  # fmt: skip

    yield Case(
        "AdamW", "1e8 elements", four, {"triton": lambda p, m, v, g: state.adamw(p, m, v, g, step)},
        ("torch's fused AdamW", fused),
    )  # fmt: skip
    yield Case(
        "sum of squares", "1e8 elements", lambda: (torch.rand(N, device=DEVICE),), {"triton": state.sum_squares},
        ("vector_norm in float64", lambda x: torch.linalg.vector_norm(x, dtype=torch.float64).item()),
    )  # fmt: skip
    yield Case("fingerprint", "8.2e7 bf16", lambda: (normal(10_000, 8192, seed=1),), {"triton": state.fingerprint})
    yield Case(
        "row fingerprints", "8.2e7 bf16, 8 shards", lambda: (normal(10_000, 8192, seed=1),),
        {"triton": lambda x: state.row_fingerprints(x, 8)},
    )  # fmt: skip
