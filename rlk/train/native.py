"""The trainer's ordinary arm: packed attention through torch's SDPA, and gradients through autograd."""

from __future__ import annotations

from typing import Any

import torch

from rlk.kernels.collectives.base import Collective
from rlk.kernels.policy import RowParams
from rlk.model.checkpoint import as_shards
from rlk.model.native import sdpa, token_log_probabilities
from rlk.model.parallel import ParallelContext
from rlk.model.qwen3 import Qwen3
from rlk.train.batching import MicroBatch
from rlk.train.gradients import Accumulators, to_pieces


class _GatherRows(torch.autograd.Function):
    """Rows of all context-parallel ranks; the gradient is summed over ranks, and each keeps its own rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Collective) -> torch.Tensor:
        ctx.group = group
        return group.all_gather(x, "keys and values")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.all_reduce(grads[0].contiguous(), "keys and values")[ctx.group.rank], None


class NativeAttention:
    """See rlk.model.qwen3.Attend."""

    def __init__(self, batch: MicroBatch, context: ParallelContext) -> None:
        self.batch, self.context = batch, context

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """SDPA, sequence by sequence."""
        b = self.batch
        pad = (0, 0, 0, 0, 0, 0, 0, b.padded - k.shape[0])
        mine = torch.nn.functional.pad(torch.stack([k, v], 1), pad)
        rows = _GatherRows.apply(mine, self.context.cp).flatten(0, 1)[b.gather]  # type: ignore[no-untyped-call]
        parts = []
        for i in range(len(b.samples)):
            own, keys = slice(*b.first[i : i + 2].tolist()), slice(*b.key_first[i : i + 2].tolist())
            parts.append(sdpa(q[own], rows[keys, 0], rows[keys, 1], b.positions[own]))
        return torch.cat(parts)


def score(logits: torch.Tensor, params: RowParams, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 log-probability of each token and whether it lies in the support."""
    return token_log_probabilities(logits, params.temperature, params.top_k, params.top_p, tokens)


def accumulate(
    model: Qwen3, batch: MicroBatch, params: RowParams, coefficients: torch.Tensor, sums: Accumulators
) -> torch.Tensor:
    """Forward and backward of one micro-batch; returns the log-probabilities that were differentiated, fp32 [R]."""
    leaves = {name: w.detach().requires_grad_() for name, w in model.weights.items()}
    live = Qwen3(model.shape, model.context, model.ops, model.cos.shape[0], leaves, model.device)
    hidden = live.forward(batch.ids, batch.positions, NativeAttention(batch, model.context))
    logprob, _ = score(live.logits(hidden[batch.rows]), params, batch.target)
    (logprob * coefficients).sum().backward()
    cp, tp = model.context.cp, model.context.tp
    for name, leaf in leaves.items():
        grad = torch.zeros_like(leaf, dtype=torch.float32) if leaf.grad is None else leaf.grad.float()
        if name.endswith((".q_norm", ".k_norm")):  # a rank's heads saw only their own part of these gains
            grad = tp.all_reduce(grad, f"gradient of {name}")
        total = to_pieces(as_shards(cp.all_reduce(grad, f"gradient of {name}")))
        own = model.context.slices
        sums.pieces[name] += total[:, own.start : own.stop]
    return logprob.detach()
