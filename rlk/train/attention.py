"""Attention of packed sequences under context parallelism: keys and values are gathered whole, queries stay where
they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlk.kernels import attention, gemm
from rlk.kernels.collectives.base import tree_reduce_scatter
from rlk.model.parallel import ParallelContext
from rlk.train.batching import MicroBatch


@dataclass(frozen=True)
class Saved:
    """What one layer's backward pass needs of its forward pass."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class PackedAttention:
    """The attention core of one micro-batch; `saved` fills up layer by layer when gradients are wanted."""

    def __init__(self, batch: MicroBatch, context: ParallelContext, *, save: bool) -> None:
        self.batch, self.context, self.save = batch, context, save
        self.saved: list[Saved] = []
        self.segments = attention.segments(batch.positions, batch.first, batch.key_first)
        # Once for all layers, since the device is waited for.
        self.key_first = tuple(batch.key_first.tolist()) if save else ()

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See rlk.model.qwen3.Attend."""
        b = self.batch
        keys, values = self.gather(k, v, f"layers.{layer}.kv")
        out, lse = attention.packed(q, keys, values, b.positions, b.first, b.key_first, self.segments)
        if self.save:
            self.saved.append(Saved(q, keys, values, out, lse))
        return out

    def gather(self, k: torch.Tensor, v: torch.Tensor, stage: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens in position order, from this rank's rows: moved, never summed."""
        b = self.batch
        mine = k.new_zeros(b.padded, 2, *k.shape[1:])
        mine[: k.shape[0], 0], mine[: v.shape[0], 1] = k, v
        rows = self.context.cp.all_gather(mine, stage).flatten(0, 1)[b.gather]
        return rows[:, 0].contiguous(), rows[:, 1].contiguous()

    def backward(self, layer: int, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of this rank's rows q, k, v, bf16. dk and dv: a leaf a virtual slice of queries, then the tree."""
        b, saved, cp = self.batch, self.saved[layer], self.context.cp
        rows = (dout, saved.q, saved.k, saved.v, saved.out, saved.lse, b.positions, b.first, self.key_first, b.slices)
        dq, dkv = attention.packed_gradients(*rows)
        partial = dkv.new_zeros(cp.size * b.padded, *dkv.shape[1:])
        partial[b.gather] = dkv
        pieces = partial.view(1, cp.size, b.padded, *partial.shape[1:])
        summed = tree_reduce_scatter(pieces, cp, f"layers.{layer}.dkv")[: saved.q.shape[0]]
        scale = attention.softmax_scale(saved.q)
        return dq, gemm.round_bf16(summed[:, 0] * scale), gemm.round_bf16(summed[:, 1])
