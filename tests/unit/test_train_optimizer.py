"""The optimizer's state is cut in atoms, and no cut changes a bit of a norm, a master, a moment or an export.

Three parameters: shards whose pieces need padding (63 elements), a vector (10), shards that divide (64). Gradients span
powers of two, so that a norm summed in another order shows; their norm is above 1, so that clipping takes part.
"""

from __future__ import annotations

import math

import pytest
import torch

from rlk.kernels import state
from rlk.model.parallel import ParallelContext
from rlk.train.gradients import owned_pieces
from rlk.train.optimizer import AdamSettings, Optimizer, UpdateReport
from tests.unit.probes import Record, assert_as_accurate, assert_same, spread
from tests.unit.ranks import on_ranks

SHAPES = {"a": (8, 7, 9), "norm": (10,), "b": (8, 4, 16)}
WEIGHTS = {name: spread(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}
SETTINGS = AdamSettings(lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1, max_grad_norm=1.0)
TOPOLOGIES = ((1, 1), (1, 8), (2, 4), (4, 2), (8, 1), (2, 2))
STEPS = 3


def gradient(name: str, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (spread(*SHAPES[name], seed=10 * step + len(name)).float() / 3).to(dtype)  # all 24 bits of fp32


def local(stored: torch.Tensor, context: ParallelContext) -> torch.Tensor:
    return stored if stored.dim() == 1 else stored[list(context.shards)]


def run(context: ParallelContext) -> tuple[dict[str, torch.Tensor], Optimizer, list[UpdateReport]]:
    """Exports, the optimizer and the reports of three steps on one rank."""
    weights = {name: local(w, context) for name, w in WEIGHTS.items()}
    optimizer, reports = Optimizer(weights, context), []
    for step in range(1, STEPS + 1):
        grads = {name: owned_pieces(local(gradient(name, step), context), context) for name in WEIGHTS}
        reports.append(optimizer.step(grads, SETTINGS))
    return optimizer.export(weights), optimizer, reports


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"tp{t[0]}_cp{t[1]}")
def test_no_sharding_changes_a_bit(topology: tuple[int, int]) -> None:
    tp, cp = topology
    expected_export, expected, expected_reports = run(ParallelContext())
    ranks = on_ranks(tp, cp, run)
    for export, optimizer, reports in ranks:
        assert reports == expected_reports
        for kind in ("master", "m", "v"):
            for name, whole in getattr(expected, kind).items():
                shards = whole if WEIGHTS[name].dim() == 1 else whole[list(optimizer.context.shards)]
                own = shards[:, list(optimizer.context.slices)]
                assert_same(getattr(optimizer, kind)[name], own, f"{kind} of {name}")
        for name, whole in expected_export.items():
            assert_same(export[name], local(whole, optimizer.context), f"export of {name}")


def test_a_norm_summed_rank_by_rank_would_show() -> None:
    def rank_sum(context: ParallelContext) -> float:
        grads = [owned_pieces(local(gradient(name, 1), context), context) for name in WEIGHTS]
        return sum(state.sum_squares(g) for g in grads)

    assert len({sum(on_ranks(1, cp, rank_sum)) for cp in (1, 2, 4, 8)}) > 1


def test_the_norm_is_that_of_all_elements() -> None:
    _, _, reports = run(ParallelContext())
    for step, report in enumerate(reports, 1):
        whole = torch.cat([gradient(name, step, torch.float64).flatten() for name in WEIGHTS])
        assert report.grad_norm == pytest.approx(float(whole.norm()), rel=1e-12)


def test_vectors_are_counted_once() -> None:
    grads = {name: torch.zeros(SHAPES[name]) for name in WEIGHTS}
    grads["norm"] = torch.full((10,), 3.0)

    def norm(context: ParallelContext) -> float:
        weights = {name: local(w, context) for name, w in WEIGHTS.items()}
        pieces = {name: owned_pieces(local(g, context), context) for name, g in grads.items()}
        return Optimizer(weights, context).grad_norm(pieces)

    assert on_ranks(4, 2, norm) == [math.sqrt(90.0)] * 8


@pytest.mark.parametrize(("size", "factor"), [(0.5, 1.0), (1.0, 1 / (1 + 1e-6)), (4.0, 1 / (4 + 1e-6)), (0.0, 1.0)])
def test_a_gradient_above_the_norm_is_scaled(size: float, factor: float) -> None:
    weights = {"norm": WEIGHTS["norm"]}
    grad = torch.zeros(1, 8, 2)
    grad[0, 3, 1] = size
    assert Optimizer(weights, ParallelContext()).step({"norm": grad}, SETTINGS) == UpdateReport(size, factor, 1)


def run_torch(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    parameters = {name: torch.nn.Parameter(w.to(dtype)) for name, w in WEIGHTS.items()}
    groups = [
        {"params": [p], "weight_decay": 0.0 if p.dim() == 1 else SETTINGS.weight_decay} for p in parameters.values()
    ]
    optimizer = torch.optim.AdamW(groups, lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps)
    for step in range(1, STEPS + 1):
        for name, p in parameters.items():
            p.grad = gradient(name, step, dtype)
        torch.nn.utils.clip_grad_norm_(parameters.values(), SETTINGS.max_grad_norm)
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}


def test_masters_are_as_accurate_as_torch(record_property: Record) -> None:
    """Three steps with clipping and decay, none on the vector; RMS over all elements."""
    _, optimizer, _ = run(ParallelContext())
    real = {"a": 63, "b": 64, "norm": 10}  # elements a shard that are not padding
    ours = torch.cat([optimizer.master[name].flatten(1)[:, :n].flatten() for name, n in real.items()])
    trained = [run_torch(dtype) for dtype in (torch.float32, torch.float64)]
    ordinary, exact = (torch.cat([found[name].flatten() for name in real]) for found in trained)
    assert_as_accurate(ours, ordinary, exact, record_property)


def test_an_export_is_the_master_rounded_once() -> None:
    export, optimizer, _ = run(ParallelContext())
    master = optimizer.master["b"].flatten(1).view(8, 4, 16)
    assert_same(export["b"], master.to(torch.bfloat16))


def test_padding_stays_zero() -> None:
    _, optimizer, _ = run(ParallelContext())
    for kind in ("master", "m", "v"):
        assert not getattr(optimizer, kind)["a"].flatten(1)[:, 63:].any()
        assert not getattr(optimizer, kind)["norm"].flatten(1)[:, 10:].any()
