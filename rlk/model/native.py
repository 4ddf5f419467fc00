"""The library's ordinary operators behind the same interface: torch matmul, ordinary all-reduce, fused activations.

This is what most stacks run. It is the negative control of the suite: its bits depend on batch, chunk and topology,
and every equality that the canonical program keeps is expected to break here. Differentiable, so that its trainer
uses autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from rlk.kernels.collectives.base import Collective


class _SumForward(torch.autograd.Function):
    """All-reduce forward, identity backward: the exit of a tensor-parallel region (Shoeybi et al., 2019)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Collective, stage: str) -> torch.Tensor:
        return group.all_reduce(x, stage)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0], None, None


class _SumBackward(torch.autograd.Function):
    """Identity forward, all-reduce backward: the entrance of a tensor-parallel region."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Collective) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.all_reduce(grads[0].contiguous(), "input gradient"), None


class _GatherColumns(torch.autograd.Function):
    """Columns of all ranks side by side; each rank keeps its own columns of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Collective) -> torch.Tensor:
        ctx.group, ctx.width = group, x.shape[1]
        return group.all_gather(x, "columns").permute(1, 0, 2).flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        start = ctx.group.rank * ctx.width
        return grads[0][:, start : start + ctx.width], None


class NativeOps:
    """See rlk.model.ops.Ops."""

    name = "native"

    def prepare_column(self, w: torch.Tensor) -> torch.Tensor:
        """The rank's rows, as one matrix."""
        return w.flatten(0, 1)

    def prepare_row(self, w: torch.Tensor) -> torch.Tensor:
        """The rank's columns, as one matrix."""
        return w.transpose(0, 1).flatten(1)

    def embed(self, table: torch.Tensor, ids: torch.Tensor, tp: Collective) -> torch.Tensor:
        """Masked lookup and all-reduce."""
        height = table.shape[0] * table.shape[1]
        local = ids - tp.rank * height
        own = (local >= 0) & (local < height)
        rows = functional.embedding(local.clamp(0, height - 1), table.view(height, -1))
        out: torch.Tensor = _SumForward.apply(rows * own[:, None], tp, "embedding")  # type: ignore[no-untyped-call]
        return out

    def column(self, x: torch.Tensor, w: torch.Tensor, tp: Collective) -> torch.Tensor:
        """One torch matmul."""
        entered = _SumBackward.apply(x, tp)  # type: ignore[no-untyped-call]
        return functional.linear(entered, w)

    def row(self, x: torch.Tensor, w: torch.Tensor, tp: Collective, stage: str) -> torch.Tensor:
        """One torch matmul over the rank's columns, then an all-reduce of bf16 partials."""
        partial = functional.linear(x.flatten(1), w)
        out: torch.Tensor = _SumForward.apply(partial, tp, stage)  # type: ignore[no-untyped-call]
        return out

    def rmsnorm(self, x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """As transformers writes it."""
        wide = x.float()
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return w * (wide * rstd).to(x.dtype), rstd

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate halves."""
        c, s = cos[positions][:, None], sin[positions][:, None]
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """torch's silu, times up."""
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Plain bf16 addition."""
        return a + b

    def gather_columns(self, x: torch.Tensor, tp: Collective) -> torch.Tensor:
        """Column shards of every rank side by side."""
        out: torch.Tensor = _GatherColumns.apply(x, tp)  # type: ignore[no-untyped-call]
        return out


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """torch's attention for rows q [T, H, D] at absolute positions int64 [T] against keys 0.. of one sequence [n,
    HK, D]."""
    mask = torch.arange(k.shape[0], device=k.device)[None, :] <= positions[:, None]
    qh, kh, vh = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = functional.scaled_dot_product_attention(qh, kh, vh, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def token_log_probabilities(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 log-probability [R] of tokens int64 [R] under logits / T over the kept tokens: sort, cumulative softmax,
    mask.

    Also whether each token is kept; one that is not is scored against the kept mass all the same.
    """
    scaled = logits.float() / temperature[:, None]
    ordered, index = scaled.sort(1, descending=True)
    rank = torch.arange(logits.shape[1], device=logits.device)[None]
    kept = rank < top_k[:, None]
    share = ordered.masked_fill(~kept, float("-inf")).softmax(1)
    kept &= (share.cumsum(1) - share) < top_p[:, None]
    support = torch.zeros_like(kept).scatter_(1, index, kept)
    total = scaled.masked_fill(~support, float("-inf")).logsumexp(1)
    return scaled.gather(1, tokens[:, None])[:, 0] - total, support.gather(1, tokens[:, None])[:, 0]
