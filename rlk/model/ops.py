"""The operations a model is built of. Both engines construct the same ones: canonical, or the library's ordinary
ones."""

from __future__ import annotations

from typing import Protocol

import torch

from rlk.kernels import gemm, pointwise
from rlk.kernels.collectives.base import Collective, tree_all_reduce


class Ops(Protocol):
    """What Qwen3 calls. T tokens, N outputs, K inputs, S virtual shards held here."""

    name: str

    def prepare_column(self, w: torch.Tensor) -> torch.Tensor:
        """What `column` multiplies with, from a stored weight [S, N, K]."""

    def prepare_row(self, w: torch.Tensor) -> torch.Tensor:
        """What `row` multiplies with, from a stored weight [S, N, K]."""

    def embed(self, table: torch.Tensor, ids: torch.Tensor, tp: Collective) -> torch.Tensor:
        """Rows of a vocabulary-parallel table [S, V/8, N] for ids int64 [T], bf16 [T, N]."""

    def column(self, x: torch.Tensor, w: torch.Tensor, tp: Collective) -> torch.Tensor:
        """x [T, K] times the local rows of a column-parallel weight, bf16 [T, S * N]."""

    def row(self, x: torch.Tensor, w: torch.Tensor, tp: Collective, stage: str) -> torch.Tensor:
        """x [T, S, K] times a row-parallel weight, summed over all shards, bf16 [T, N]."""

    def rmsnorm(self, x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm over the last axis, bf16, and the reciprocal deviation fp32, one a row."""

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of x [T, H, D]."""

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [T, S, 2F]."""

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Residual sum."""

    def gather_columns(self, x: torch.Tensor, tp: Collective) -> torch.Tensor:
        """Column shards [T, n] of every rank side by side, [T, size * n]."""


class CanonicalOps:
    """The canonical program: the order of every sum is declared and mentions no physical topology."""

    name = "canonical"

    def prepare_column(self, w: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return gemm.prepare(w.flatten(0, 1))

    def prepare_row(self, w: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return gemm.prepare(w)

    def embed(self, table: torch.Tensor, ids: torch.Tensor, tp: Collective) -> torch.Tensor:
        """See Ops. The owner's row is selected, not summed."""
        height = table.shape[0] * table.shape[1]
        local = (ids - tp.rank * height).clamp(0, height - 1)
        rows = tp.all_gather(table.view(height, -1)[local], "embedding")
        return rows[ids // height, torch.arange(ids.numel(), device=ids.device)]

    def column(self, x: torch.Tensor, w: torch.Tensor, tp: Collective) -> torch.Tensor:
        """See Ops. One chain over all of K; the parallel group is not needed."""
        return gemm.linear(x, w)

    def row(self, x: torch.Tensor, w: torch.Tensor, tp: Collective, stage: str) -> torch.Tensor:
        """See Ops. One leaf a virtual shard, the tree, one rounding; partials travel as fp32."""
        if tp.size == 1:
            return gemm.row_linear(x, w)
        return gemm.round_bf16(tree_all_reduce(gemm.row_leaves(x, w)[None], tp, stage))

    def rmsnorm(self, x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """See Ops."""
        return pointwise.rmsnorm(x, w, eps)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return pointwise.rope(x, cos, sin, positions)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return pointwise.swiglu(gate_up)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return pointwise.add(a, b)

    def gather_columns(self, x: torch.Tensor, tp: Collective) -> torch.Tensor:
        """See Ops."""
        return tp.all_gather(x, "columns").permute(1, 0, 2).flatten(1)

    # What `row` is made of, for whoever looks at a leaf or breaks a join on purpose; in one step it is faster.

    def leaves(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Partials of x [T, S, K] times a row-parallel weight, one a virtual shard: fp32 [S, T, N]."""
        return torch.stack([gemm.leaf(x[:, s], shard) for s, shard in enumerate(w)])

    def join(self, leaves: torch.Tensor, tp: Collective, stage: str) -> torch.Tensor:
        """The tree over the leaves of all ranks and one rounding, bf16 [T, N]: the bits of `row`."""
        return gemm.round_bf16(tree_all_reduce(leaves, tp, stage))
