"""Gradient accumulators, sharded over context-parallel ranks by atoms, and the order in which contributions join them.

Every stored shard is cut in 8 equal pieces (padded with zeros); a piece of a virtual shard is an atom. A rank
accumulates the pieces that its place in the context-parallel group owns: memory of a sharded gradient. A parameter's
gradient is, for each sample by id, the tree over the sample's 8 virtual slices, added to the accumulator in one fp32
chain: neither the degrees nor the packing enter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlk.evidence.program import replicated
from rlk.kernels import state
from rlk.kernels.collectives.base import tree_reduce_scatter
from rlk.kernels.tree import VIRTUAL
from rlk.model.checkpoint import as_shards
from rlk.model.parallel import ParallelContext


def piece_size(elements: int) -> int:
    """Elements of one of the 8 pieces of a shard."""
    return -(-elements // VIRTUAL)


def to_pieces(stored: torch.Tensor) -> torch.Tensor:
    """[..., S, rows, cols] to [..., S, 8, piece], zero padded."""
    flat = stored.flatten(-2)
    missing = piece_size(flat.shape[-1]) * VIRTUAL - flat.shape[-1]
    padded = torch.nn.functional.pad(flat, (0, missing)) if missing else flat  # to pad by nothing is to copy
    return padded.reshape(*padded.shape[:-1], VIRTUAL, -1)


def owned_pieces(stored: torch.Tensor, context: ParallelContext) -> torch.Tensor:
    """This rank's atoms of a stored parameter, [S, 8 / CP, piece]."""
    own = context.slices
    return to_pieces(as_shards(stored))[:, own.start : own.stop].contiguous()


def from_pieces(mine: torch.Tensor, like: torch.Tensor, context: ParallelContext, stage: str) -> torch.Tensor:
    """The stored parameter, from every context-parallel rank's atoms: moved, never summed."""
    shards = as_shards(like)
    gathered = context.cp.all_gather(mine, stage)  # [CP, S, 8 / CP, piece]
    flat = gathered.transpose(0, 1).flatten(1)[:, : shards[0].numel()]
    return flat.reshape(like.shape)


def piece_fingerprints(pieces: Mapping[str, torch.Tensor], context: ParallelContext) -> dict[str, tuple[int, int]]:
    """This rank's part of the fingerprint of every parameter's fp32 atoms [S, 8 / CP, piece]: ranks' parts add up.

    An element's index is its atom's place, then its place within; padding counts. A replicated parameter is one shard,
    the same on every tensor-parallel rank.
    """
    parts = []
    for name, held in pieces.items():
        first = 0 if replicated(name) else context.shards.start
        rows = [(first + s) * VIRTUAL + context.slices.start for s in range(held.shape[0])]
        parts.append([state.Part(x, row, 0, x.shape[1]) for x, row in zip(held, rows, strict=True)])
    return dict(zip(pieces, state.fingerprints(parts), strict=True))


TIED_HEAD = "embed (as head)"


class Accumulators:
    """fp32 accumulators of every parameter, [S, 8 / CP, piece], zero at the start of a step.

    An embedding that is also the head has two: its gradient is fp32(sum as head) + fp32(sum as embedding).
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], context: ParallelContext) -> None:
        self.context = context
        self.pieces = {n: torch.zeros_like(owned_pieces(w, context), dtype=torch.float32) for n, w in weights.items()}
        if "head" not in weights:
            self.pieces[TIED_HEAD] = torch.zeros_like(self.pieces["embed"])

    def gradients(self) -> dict[str, torch.Tensor]:
        """The finished gradients by parameter."""
        out = dict(self.pieces)
        if TIED_HEAD in out:
            out["embed"] = out.pop(TIED_HEAD) + out["embed"]
        return out

    def zero(self) -> None:
        """Forgets the last step."""
        for t in self.pieces.values():
            t.zero_()

    def add(self, name: str, partials: torch.Tensor) -> None:
        """Joins one micro-batch's contributions.

        partials: fp32 [samples, S, rows, cols] ([samples, 1, 1, n] if replicated), each the sum of the subtree of
        this rank's slices. One exchange for the whole micro-batch; then the tree over ranks and the chain over samples.
        """
        cp = self.context.cp
        pieces = to_pieces(partials)
        pieces = pieces.reshape(*pieces.shape[:2], cp.size, -1, pieces.shape[-1])  # [samples, S, CP, 8 / CP, piece]
        mine = tree_reduce_scatter(pieces.movedim(2, 0)[None], cp, f"gradient of {name}")
        accumulator = self.pieces[name]
        for contribution in mine:
            accumulator.add_(contribution)

    def add_rows(self, name: str, rows: torch.Tensor, contribution: torch.Tensor) -> None:
        """Joins one sample's contribution to some rows of a parameter [S, rows, cols], the tree over it complete.

        rows int64 [n], each once, counted over the shards held here; contribution fp32 [n, cols]. A row that is left
        out would have joined a zero: no accumulator is -0, so that changes no bit.

        Raises:
            ValueError: an atom of the parameter is not made of whole rows.
        """
        shards, owned, piece = self.pieces[name].shape
        cols, own = contribution.shape[1], self.context.slices
        if piece % cols:
            raise ValueError(f"{name}: an atom has {piece} elements, allowed are multiples of the row's {cols}")
        each = piece // cols  # rows of an atom
        shard, atom = rows // (each * VIRTUAL), rows // each % VIRTUAL - own.start
        mine = (atom >= 0) & (atom < owned)
        at = (shard[mine], atom[mine], (rows % each)[mine])
        accumulator = self.pieces[name].view(shards, owned, each, cols)
        accumulator[at] = accumulator[at] + contribution[mine]
