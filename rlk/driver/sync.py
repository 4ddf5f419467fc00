"""Weights from the trainer's shards to the engines' shards, and fingerprints of both sides. Nothing is summed or
cast on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rlk.driver.errors import RunError
from rlk.evidence.schemas import Fingerprints, TensorEntry, Update
from rlk.kernels.state import as_hex, combine
from rlk.kernels.tree import VIRTUAL
from rlk.model.layout import Tensor, parameters
from rlk.plan.derive import Plan

Bits = npt.NDArray[np.uint16]
Parts = Mapping[str, tuple[int, int]]


def recut(exports: Sequence[Mapping[str, Bits]], tp: int) -> list[dict[str, Bits]]:
    """Stored shards by trainer TP rank to stored shards by engine TP rank: virtual shards change owner, replicated
    ones stay."""
    out: list[dict[str, Bits]] = [{} for _ in range(tp)]
    for name, first in exports[0].items():
        if first.ndim == 1:
            for part in out:
                part[name] = first
            continue
        whole = first if len(exports) == 1 else np.concatenate([export[name] for export in exports])
        for rank, part in enumerate(out):
            n = VIRTUAL // tp
            part[name] = whole[rank * n : (rank + 1) * n]
    return out


def replicated_names(plan: Plan) -> frozenset[str]:
    """Checkpoint names of the tensors that every rank holds whole."""
    return frozenset(t.hf_name for p in parameters(plan.shape) if p.replicated for t in p.tensors)


def by_tensor_rank(ranks: Sequence[Parts], tp: int) -> list[Parts]:
    """An engine's parts, one a tensor-parallel rank; engine rank = cp_rank * TP + tp_rank, and context-parallel ranks
    hold the same weights."""
    places = [ranks[t::tp] for t in range(tp)]
    return [{name: _agreed([part[name] for part in same]) for name in same[0]} for same in places]


def whole(parts: Sequence[Parts], replicated: frozenset[str]) -> dict[str, str]:
    """Fingerprints of whole tensors from those of the tensor-parallel ranks' parts; a replicated tensor is taken
    once."""
    out = {}
    for name in parts[0]:
        values = [p[name] for p in parts]
        out[name] = as_hex(_agreed(values) if name in replicated else combine(values))
    return out


def _agreed(copies: list[tuple[int, int]]) -> tuple[int, int]:
    """The fingerprint of copies that should be equal. Where one differs, a sum that is no copy's: whichever is the odd
    one, the difference shows."""
    return copies[0] if all(copy == copies[0] for copy in copies) else combine(copies)


def update_record(plan: Plan, step: int, parts: Sequence[Mapping[str, Parts]]) -> Update:
    """The fingerprints of an update from those of all train ranks, rank = tp_rank * CP + cp_rank: atoms are spread over
    both, those of a replicated parameter over context-parallel ranks only."""
    cp = plan.train.cp
    whole_ones = {p.name for p in parameters(plan.shape) if p.replicated}
    agree = all(
        parts[rank][field][name] == parts[rank % cp][field][name]
        for rank in range(plan.ranks)
        for field in parts[0]
        for name in whole_ones
    )
    fields = {
        field: {
            name: as_hex(combine([p[field][name] for p in parts[: cp if name in whole_ones else plan.ranks]]))
            for name in parts[0][field]
        }
        for field in parts[0]
    }
    return Update(step=step, replicas_agree=agree, **fields)


def tensor_entries(plan: Plan, described: Sequence[Sequence[tuple[str, int, str]]]) -> list[TensorEntry]:
    """Every exported tensor as the tensor-parallel ranks hold it; its shape follows from the elements there."""
    replicated, tensors = replicated_names(plan), {t.hf_name: t for p in parameters(plan.shape) for t in p.tensors}
    elements: dict[str, int] = {}
    dtypes: dict[str, set[str]] = {}
    for rank, parts in enumerate(described):
        for name, count, dtype in parts:
            dtypes.setdefault(name, set()).add(dtype)
            if rank == 0 or name not in replicated:
                elements[name] = elements.get(name, 0) + count
    return [
        TensorEntry(
            name=name, shape=_shape(count, tensors[name]), dtype="/".join(sorted(dtypes[name])), kind=tensors[name].kind
        )
        for name, count in sorted(elements.items())
    ]


def _shape(elements: int, tensor: Tensor) -> tuple[int, ...]:
    return (elements,) if len(tensor.shape) == 1 else (elements // tensor.width, tensor.width)


def fingerprint_record(
    plan: Plan,
    version: int,
    tensors: Sequence[TensorEntry],
    trainer: Sequence[Parts],
    engines: Sequence[Sequence[Parts]],
) -> Fingerprints:
    """The fingerprints of one weight version: the trainer's by rank, the engines' by engine and rank."""
    replicated, cp = replicated_names(plan), plan.train.cp
    if len(trainer) != plan.ranks:
        raise RunError(
            f"fingerprints of version {version}: {len(trainer)} train ranks answered, {plan.ranks} are needed"
        )
    by_tp = [trainer[t * cp] for t in range(plan.train.tp)]
    same_over_cp = all(trainer[t * cp + c] == by_tp[t] for t in range(plan.train.tp) for c in range(cp))
    same_over_tp = all(p[name] == by_tp[0][name] for p in by_tp for name in replicated)
    return Fingerprints(
        version=version,
        tensors=tuple(tensors),
        trainer=whole(by_tp, replicated),
        trainer_replicas_agree=same_over_cp and same_over_tp,
        engines=tuple(whole(by_tensor_rank(ranks, plan.rollout.tp), replicated) for ranks in engines),
    )
