"""AdamW on fp32 masters, sharded by atoms: whole atoms a rank, so neither degree changes what is computed on an
element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlk.kernels import state
from rlk.kernels.collectives.connect import settle
from rlk.kernels.state import AdamStep
from rlk.model.parallel import ParallelContext
from rlk.train.gradients import from_pieces, owned_pieces


@dataclass(frozen=True)
class AdamSettings:
    """Constants of a run. Decay is decoupled and not applied to vectors (norm gains)."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float


@dataclass(frozen=True)
class UpdateReport:
    """What one step did: gradient norm before clipping, the clip factor, and the step's number, from 1."""

    grad_norm: float
    clip_factor: float
    step: int


class Optimizer:
    """Masters and moments of this rank's atoms, fp32 [S, 8 / CP, piece] a parameter."""

    def __init__(self, weights: Mapping[str, torch.Tensor], context: ParallelContext) -> None:
        self.context, self.step_count = context, 0
        # A copy in any case: pieces of a weight may be a view of it.
        self.master = {n: owned_pieces(w, context).to(torch.float32, copy=True) for n, w in sorted(weights.items())}
        self.m = {n: torch.zeros_like(t) for n, t in self.master.items()}
        self.v = {n: torch.zeros_like(t) for n, t in self.master.items()}
        self.vectors = {n for n, w in weights.items() if w.dim() == 1}

    def step(self, grads: Mapping[str, torch.Tensor], settings: AdamSettings) -> UpdateReport:
        """One update in place. grads: fp32 [S, 8 / CP, piece] by name."""
        norm = self.grad_norm(grads)
        # The factor of torch.nn.utils.clip_grad_norm_, in float64.
        clip = min(1.0, settings.max_grad_norm / (norm + 1e-6))
        self.step_count += 1
        for name, master in self.master.items():
            decay = 0.0 if name in self.vectors else settings.weight_decay
            scalars = AdamStep.at(
                self.step_count, lr=settings.lr, betas=settings.betas, eps=settings.eps, decay=decay, clip=clip
            )
            state.adamw(master, self.m[name], self.v[name], grads[name], scalars)
        return UpdateReport(norm, clip, self.step_count)

    def grad_norm(self, grads: Mapping[str, torch.Tensor]) -> float:
        """float64: squares summed within an atom by one kernel, then atoms in index order, then tensors in name
        order."""
        names, tp, cp = sorted(grads), self.context.tp, self.context.cp
        squares = state.sums_of_squares([grads[name] for name in names])
        gathered = tp.all_gather(cp.all_gather(squares, "gradient norm"), "gradient norm")
        settle(tp, cp)
        total = 0.0
        held = [grads[name].shape[:2] for name in names]
        for name, shape, own in zip(names, held, gathered.cpu().split([s * k for s, k in held], 2), strict=True):
            atoms = own.unflatten(2, shape).transpose(1, 2)  # [TP, S, CP, 8 / CP]: by index
            within = 0.0
            for square in atoms[: 1 if name in self.vectors else tp.size].flatten().tolist():
                within += square
            total += within
        return float(total**0.5)

    def export(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The stored parameters that the masters now stand for: one rounding to bf16, atoms gathered over CP."""
        return {
            name: from_pieces(master.to(torch.bfloat16), weights[name], self.context, f"export of {name}")
            for name, master in self.master.items()
        }
