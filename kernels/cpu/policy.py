"""CPU form of sampling and scoring: policy.cpp."""

from __future__ import annotations

import torch

from rlk.kernels.cpu.library import load, pointer
from rlk.kernels.policy import NonFiniteLogitError, RowParams

BF16, F32, F64, I64, U8 = torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8


def describe() -> str:
    """Which implementation runs."""
    return "cpu: fixed loop order in C++"


def _settings(params: RowParams) -> tuple[int, int, int]:
    return pointer(params.temperature, F32), pointer(params.top_k, I64), pointer(params.top_p, F64)


def _finite(row: int) -> None:
    if row >= 0:
        raise NonFiniteLogitError(
            f"row {row} holds a NaN or infinite logit; the run stops here: look at the weights and the step before"
        )


def sample(
    logits: torch.Tensor,
    params: RowParams,
    seed: torch.Tensor,
    sample_id: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See rlk.kernels.policy."""
    r, v = logits.shape
    token, logprob = torch.empty(r, dtype=I64), torch.empty(r, dtype=F32)
    _finite(load().rlk_sample(
        pointer(logits, BF16), r, v, *_settings(params), pointer(params.greedy.view(U8), U8), pointer(seed, I64),
        pointer(sample_id, I64), pointer(position, I64), pointer(token, I64), pointer(logprob, F32),
    ))  # fmt: skip
    return token, logprob


def score(
    logits: torch.Tensor, params: RowParams, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See rlk.kernels.policy."""
    r, v = logits.shape
    logprob, inside, mass = torch.empty(r, dtype=F32), torch.empty(r, dtype=U8), torch.empty(r, dtype=I64)
    _finite(load().rlk_score(
        pointer(logits, BF16), r, v, *_settings(params), pointer(tokens, I64), pointer(logprob, F32), pointer(inside,
        U8), pointer(mass, I64)
    ))  # fmt: skip
    return logprob, inside.view(torch.bool), mass


def score_backward(
    logits: torch.Tensor, params: RowParams, tokens: torch.Tensor, coefficients: torch.Tensor
) -> torch.Tensor:
    """See rlk.kernels.policy."""
    r, v = logits.shape
    grad = torch.empty_like(logits)
    _finite(load().rlk_score_backward(
        pointer(logits, BF16), r, v, *_settings(params), pointer(tokens, I64), pointer(coefficients, F32),
        pointer(grad, BF16)
    ))  # fmt: skip
    return grad
