"""CUDA form of sampling and scoring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlk.kernels.cuda import launch
from rlk.kernels.cuda.launch import take
from rlk.kernels.cuda.programs import masses as search
from rlk.kernels.cuda.programs import policy as programs
from rlk.kernels.policy import NonFiniteLogitError, RowParams

BF16, F32, F64, I32, I64, U8 = (
    torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8,
)  # fmt: skip
SEGMENT = 4096
"""Logits of one program: a row is cut in segments so that few rows still fill the device."""
ORDERS = 1 << 16
COUNTED_AT_ONCE = 512
"""Rows whose counts, a quarter of a megabyte each, are held at the same time."""


def describe() -> str:
    """Which implementation runs."""
    return f"{launch.PLACE}: Triton, support by counting bf16 values"


@dataclass(frozen=True)
class _Rows:
    """R rows of V logits in S segments: where each row's largest logit is, what is kept, and the kept mass.

    tops int32 [R, S], cuts int32 [R], ends int32 [R], masses int64 [R, S].
    """

    tops: torch.Tensor
    cuts: torch.Tensor
    ends: torch.Tensor
    masses: torch.Tensor
    block: int

    @property
    def segments(self) -> int:
        return self.tops.shape[1]

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time constants that depend on the vocabulary alone."""
        return {"SEGMENTS": launch.power(self.segments)}

    def require_finite(self) -> None:
        """Raises NonFiniteLogitError for the first row with a NaN or an infinity. Waits for the device."""
        bad = (self.tops < 0).any(1).nonzero()
        if bad.numel():
            raise NonFiniteLogitError(
                f"row {int(bad[0])} holds a NaN or infinite logit; the run stops here: look at the weights and the "
                f"step before"
            )


def _search(logits: torch.Tensor, params: RowParams) -> _Rows:
    """Largest logits, supports and masses of all rows."""
    (r, v), stride = logits.shape, logits.stride(0)
    if take(logits, BF16, contiguous=False).stride(1) != 1 and v > 1:
        raise TypeError(f"a row of logits must be contiguous, got strides {logits.stride()}")
    block = min(SEGMENT, launch.power(v))
    n = launch.tiles(v, block)
    tops, masses = logits.new_zeros(r, n, dtype=I32), logits.new_empty(r, n, dtype=I64)
    cuts, ends = logits.new_full((r,), ORDERS, dtype=I32), logits.new_full((r,), v, dtype=I32)
    rows = _Rows(tops, cuts, ends, masses, block)
    launch.run(search.segment_tops, (r, n), logits, tops, v, stride, n, BLOCK=block)
    for some in _truncated(params, v):
        counts = logits.new_zeros(some.numel(), ORDERS, dtype=I32)
        rooms = torch.zeros_like(some)
        launch.run(search.count_orders, (some.numel(), n), logits, some, counts, v, stride, BLOCK=block)
        launch.run(
            search.find_cut, (some.numel(),), some, tops, counts, take(params.temperature, F32),
            take(params.top_k, I64), take(params.top_p, F64), cuts, rooms, n, **rows.constants, BLOCK=1024,
        )  # fmt: skip
        launch.run(
            search.find_end, (some.numel(),), logits, some, counts, cuts, rooms, ends, v, stride, BLOCK=block,
        )  # fmt: skip
    launch.run(
        search.segment_masses, (r, n), logits, tops, take(params.temperature, F32), cuts, ends, masses, v, stride, n,
        **rows.constants, BLOCK=block,
    )  # fmt: skip
    return rows


def _truncated(params: RowParams, vocab: int) -> Iterator[torch.Tensor]:
    """Indices of the rows that top-k or top-p cuts, some at a time. Waits for the device."""
    rows = ((params.top_k < vocab) | (params.top_p < 1.0)).nonzero()[:, 0]
    if rows.numel():
        yield from rows.split(COUNTED_AT_ONCE)


def sample(
    logits: torch.Tensor,
    params: RowParams,
    seed: torch.Tensor,
    sample_id: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See rlk.kernels.policy."""
    r, v = logits.shape
    rows = _search(logits, params)
    token, logprob = logits.new_zeros(r, dtype=I64), logits.new_empty(r, dtype=F32)
    launch.run(
        programs.draw, (r,), logits, rows.tops, rows.masses, params.temperature, take(params.greedy.view(U8), U8),
        rows.cuts, rows.ends, take(seed, I64), take(sample_id, I64), take(position, I64), token, logprob, v,
        logits.stride(0), rows.segments, **rows.constants, BLOCK=rows.block,
    )  # fmt: skip
    rows.require_finite()
    return token, logprob


def score(
    logits: torch.Tensor, params: RowParams, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See rlk.kernels.policy."""
    r = logits.shape[0]
    rows = _search(logits, params)
    logprob, inside, mass = (logits.new_empty(r, dtype=t) for t in (F32, U8, I64))
    launch.run(
        programs.score, (r,), logits, rows.tops, rows.masses, params.temperature, rows.cuts, rows.ends,
        take(tokens, I64), logprob, inside, mass, logits.stride(0), rows.segments, **rows.constants, warps=1,
    )  # fmt: skip
    rows.require_finite()
    return logprob, inside.view(torch.bool), mass


def score_backward(
    logits: torch.Tensor, params: RowParams, tokens: torch.Tensor, coefficients: torch.Tensor
) -> torch.Tensor:
    """See rlk.kernels.policy."""
    r, v = logits.shape
    rows = _search(logits, params)
    grad = logits.new_empty(r, v)
    launch.run(
        programs.score_gradient, (r, rows.segments), logits, rows.tops, rows.masses, params.temperature, rows.cuts,
        rows.ends, take(tokens, I64), take(coefficients, F32), grad, v, logits.stride(0), rows.segments,
        **rows.constants, BLOCK=rows.block,
    )  # fmt: skip
    rows.require_finite()
    return grad
