"""CUDA form of sampling and scoring."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rlk.kernels.cuda import launch
from rlk.kernels.cuda.launch import take
from rlk.kernels.cuda.programs import masses as programs
from rlk.kernels.cuda.programs import policy as rows_programs
from rlk.kernels.cuda.programs import support
from rlk.kernels.policy import NonFiniteLogitError, RowParams

BF16, F32, F64, I32, I64, U8 = (
    torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8,
)  # fmt: skip
SEGMENT = 4096
"""Logits of one program: a row is cut in segments so that few rows still fill the device."""
EACH = 8
"""Pieces of a segment whose largest logits are noted: with 304 of them a row says much about its first 304 tokens."""
ORDERS = 1 << 16
COUNTED_AT_ONCE = 512
"""Rows whose counts, a quarter of a megabyte each, are held at the same time."""


def describe() -> str:
    """Which implementation runs."""
    return f"{launch.PLACE}: Triton, support by counting bf16 values"


@dataclass(frozen=True)
class _Rows:
    """R rows of V logits in S segments of P / S pieces: largest logits, what is kept, and the kept mass.

    tops fp32 [R, P], +inf where a logit is not finite; bounds fp32 [R], ends int32 [R], masses int64 [R, S].
    """

    logits: torch.Tensor
    params: RowParams
    tops: torch.Tensor
    bounds: torch.Tensor
    ends: torch.Tensor
    masses: torch.Tensor
    block: int

    @classmethod
    def of(cls, logits: torch.Tensor, params: RowParams) -> _Rows:
        """Everything of these rows; truncated rows are searched for their supports."""
        r, v = logits.shape
        if take(logits, BF16, contiguous=False).stride(1) != 1 and v > 1:
            raise TypeError(f"a row of logits must be contiguous, got strides {logits.stride()}")
        for t, dtype in ((params.temperature, F32), (params.top_k, I64), (params.top_p, F64)):
            take(t, dtype)
        block = min(SEGMENT, launch.power(v))
        n = launch.tiles(v, block)
        tops, masses = logits.new_zeros(r, n * EACH, dtype=F32), logits.new_empty(r, n, dtype=I64)
        bounds, ends = logits.new_full((r,), -math.inf, dtype=F32), logits.new_full((r,), v, dtype=I32)
        rows = cls(logits, params, tops, bounds, ends, masses, block)
        launch.run(
            programs.segment_tops, (r, n), logits, tops, v, logits.stride(0), n * EACH, BLOCK=block, EACH=EACH,
        )  # fmt: skip
        rows.weigh(torch.arange(r, device=logits.device))
        for some in params.cut.split(COUNTED_AT_ONCE) if params.cut.numel() else ():
            rows.truncate(some)
            rows.weigh(some)
        return rows

    @property
    def sizes(self) -> tuple[int, int]:
        """Pieces and segments of a row."""
        return self.tops.shape[1], self.masses.shape[1]

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time constants that depend on the vocabulary alone."""
        pieces, segments = self.sizes
        return {"PIECES": launch.power(pieces), "SEGMENTS": launch.power(segments)}

    def weigh(self, some: torch.Tensor) -> None:
        """The kept mass of every segment of some rows."""
        pieces, segments = self.sizes
        launch.run(
            programs.segment_masses, (some.numel(), segments), self.logits, some, self.tops, self.params.temperature,
            self.bounds, self.ends, self.masses, self.logits.shape[1], self.logits.stride(0), pieces, segments,
            PIECES=launch.power(pieces), BLOCK=self.block,
        )  # fmt: skip

    def truncate(self, some: torch.Tensor) -> None:
        """The supports of some rows; their masses must be those of the whole row."""
        (n, v), stride, sizes, p = (some.numel(), self.logits.shape[1]), self.logits.stride(0), self.sizes, self.params
        counts = self.logits.new_zeros(n, ORDERS, dtype=I32)
        floors, rooms = self.logits.new_empty(n, dtype=F32), torch.zeros_like(some)
        launch.run(
            support.find_floor, (n,), some, self.tops, self.masses, p.temperature, p.top_k, p.top_p, floors, v, *sizes,
            **self.constants,
        )  # fmt: skip
        launch.run(
            support.count_orders, (n, sizes[1]), self.logits, some, floors, counts, v, stride, BLOCK=self.block,
        )  # fmt: skip
        launch.run(
            support.find_cut, (n,), some, self.tops, self.masses, counts, p.temperature, p.top_k, p.top_p, self.bounds,
            rooms, v, *sizes, **self.constants, BLOCK=1024,
        )  # fmt: skip
        launch.run(
            support.find_end, (n,), self.logits, some, counts, self.bounds, rooms, self.ends, v, stride,
            BLOCK=self.block,
        )  # fmt: skip

    def require_finite(self) -> None:
        """Raises NonFiniteLogitError for the first row with a NaN or an infinity. Waits for the device."""
        bad = (self.tops == math.inf).any(1).nonzero()
        if bad.numel():
            raise NonFiniteLogitError(
                f"row {int(bad[0])} holds a NaN or infinite logit; the run stops here: look at the weights and the "
                f"step before"
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
    rows = _Rows.of(logits, params)
    token, logprob = logits.new_zeros(r, dtype=I64), logits.new_empty(r, dtype=F32)
    launch.run(
        rows_programs.draw, (r,), logits, rows.tops, rows.masses, params.temperature,
        take(params.greedy.view(U8), U8), rows.bounds, rows.ends, take(seed, I64), take(sample_id, I64),
        take(position, I64), token, logprob, v, logits.stride(0), *rows.sizes, **rows.constants, BLOCK=rows.block,
        EACH=EACH,
    )  # fmt: skip
    rows.require_finite()
    return token, logprob


def score(
    logits: torch.Tensor, params: RowParams, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See rlk.kernels.policy."""
    r = logits.shape[0]
    rows = _Rows.of(logits, params)
    logprob, inside, mass = (logits.new_empty(r, dtype=t) for t in (F32, U8, I64))
    launch.run(
        rows_programs.score, (r,), logits, rows.tops, rows.masses, params.temperature, rows.bounds, rows.ends,
        take(tokens, I64), logprob, inside, mass, logits.stride(0), *rows.sizes, **rows.constants, warps=1,
    )  # fmt: skip
    rows.require_finite()
    return logprob, inside.view(torch.bool), mass


def score_backward(
    logits: torch.Tensor, params: RowParams, tokens: torch.Tensor, coefficients: torch.Tensor
) -> torch.Tensor:
    """See rlk.kernels.policy."""
    r, v = logits.shape
    rows = _Rows.of(logits, params)
    grad = logits.new_empty(r, v)
    launch.run(
        rows_programs.score_gradient, (r, rows.sizes[1]), logits, rows.tops, rows.masses, params.temperature,
        rows.bounds, rows.ends, take(tokens, I64), take(coefficients, F32), grad, v, logits.stride(0), *rows.sizes,
        **rows.constants, BLOCK=rows.block,
    )  # fmt: skip
    rows.require_finite()
    return grad
