"""A trainer step, offload and rollout context parallelism on a pretended GPU: nothing is left on the wrong device.

One layer and two short responses reach every operator of both arms, tied and untied; the pretended GPU computes with
the CPU forms, so every result must be the CPU's, byte for byte. Two ranks are the least that share pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlk.evidence.schemas import Holding
from rlk.kernels import attention
from rlk.kernels.collectives.staged import HostStaged
from rlk.model.parallel import ParallelContext
from rlk.plan.derive import Plan
from rlk.plan.sampling import Sampling
from rlk.rollout.context_parallel import ContextParallel
from rlk.rollout.paging import PagedBatch
from rlk.train.batching import Sample
from rlk.train.worker import TrainWorker
from tests.unit import checkpoints
from tests.unit.pretend_gpu import DeviceMixError, on_gpu, pretended_gpu
from tests.unit.training import Mode, coefficients, make_plan

SAMPLES = [Sample(40, (5, 9, 7, 250, 3), 2, Sampling(0.7, 0.95)), Sample(43, (8, 1, 299, 4, 60), 1, Sampling(0.0))]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checkpoints.CONFIG, "num_hidden_layers", 1)


def on(plan: Plan, device: str) -> Plan:
    return dataclasses.replace(plan, profile=plan.profile.model_copy(update={"device": device}))


def step(plan: Plan) -> tuple[TrainWorker, list[np.ndarray]]:
    """A worker after one step, and everything of it that becomes evidence."""
    worker = TrainWorker(plan, ParallelContext())
    worker.begin(SAMPLES)
    scored, reference = worker.score(), worker.score_reference()
    updated, _ = worker.update(coefficients(SAMPLES))
    return worker, [*(getattr(scored, f.name) for f in dataclasses.fields(scored)), reference, updated]


@pytest.mark.parametrize("mode", ["consistency", "native"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_trainer_step_stays_on_its_device(short: None, tmp_path: Path, mode: Mode, tied: bool) -> None:
    plan = make_plan(checkpoints.write(tmp_path, tied=tied), mode)
    torch.set_grad_enabled(True)
    expected, arrays = step(on(plan, "cpu"))
    with pretended_gpu():
        worker, found = step(on(plan, "cuda"))
        assert all(on_gpu(t) for tensors in worker.state.values() for t in tensors.values())
        assert worker.update_fingerprints() == expected.update_fingerprints()
    for a, b in zip(found, arrays, strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


def test_state_comes_back_as_it_left(short: None, tmp_path: Path) -> None:
    plan = on(make_plan(checkpoints.write(tmp_path)), "cuda")
    with pretended_gpu():
        worker, _ = step(plan)
        before = worker.update_fingerprints()
        worker.offload()
        assert not any(on_gpu(t) for tensors in worker.state.values() for t in tensors.values())
        worker.restore()
        assert worker.update_fingerprints() == before
        worker.begin(SAMPLES)
        worker.score()
    assert {h.during_rollout for h in map(Holding.model_validate, worker.holdings())} == {"offloaded", "released"}
    assert isinstance(worker.holdings(), tuple)


def test_a_step_with_offloaded_weights_is_refused(short: None, tmp_path: Path) -> None:
    plan = on(make_plan(checkpoints.write(tmp_path)), "cuda")
    with pretended_gpu():
        worker, _ = step(plan)
        worker.offload()
        worker.begin(SAMPLES)
        with pytest.raises(DeviceMixError):
            worker.score()


class Pair:
    """Rank 1 of a group of two that hold the same."""

    rank, size = 1, 2

    def __init__(self, place: bool) -> None:
        self.place = place

    def all_gather(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        assert on_gpu(t) == self.place, stage
        return torch.stack([t, t])

    all_to_all = all_reduce = all_gather


@pytest.mark.parametrize(("first", "lengths"), [((0, 5, 9), (5, 20)), ((0, 1, 2), (6, 21))])
def test_shared_pages_stay_on_their_device(first: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    def rows(n: int, heads: int) -> torch.Tensor:
        return torch.randn(n, heads, 8, device="cuda").to(torch.bfloat16)

    with pretended_gpu():
        caches = {f"l{i}": torch.zeros(6, 2, 16, 8, dtype=torch.bfloat16, device="cuda") for i in range(3)}
        shared, tokens = ContextParallel(Pair(place=True)), first[-1]

        def words(*values: Any) -> torch.Tensor:
            return torch.tensor(*values, dtype=torch.int32, device="cuda")

        slots = torch.arange(16, 16 + tokens, device="cuda")
        batch = PagedBatch(tokens, words(first), words(lengths), words([[1, 0], [2, 3]]), slots)
        part = shared.share(batch, 16, caches, prefill=tokens > 2)
        cut = shared.taken(part)
        mine = tokens if cut is None else cut.rows.numel()
        for layer in caches:
            pages = part.update(layer, rows(mine, 2), rows(mine, 2))
            own = part.own
            out = attention.paged(rows(own.tokens, 4), pages, own.block_table, own.query_first, own.seq_lens)
            assert on_gpu(out)
        assert cut is None or on_gpu(cut.whole(rows(mine, 4), "rows"))


def test_staged_bytes_cross_the_host_and_return() -> None:
    with pretended_gpu():
        group = HostStaged(Pair(place=False))
        t = torch.arange(6, device="cuda").view(2, 3)
        for call in (group.all_gather, group.all_to_all, group.all_reduce):
            out = call(t, "somewhere")
            assert on_gpu(out)
            assert torch.equal(out.cpu()[0], t.cpu())


def test_pretended_gpu_refuses_what_cuda_refuses() -> None:
    """The twin: without these refusals everything above would pass on any code."""
    with pretended_gpu():
        here, there = torch.ones(3), torch.ones(3, device="cuda")
        mixtures: list[Callable[[], object]] = [
            lambda: here + there,
            lambda: here[there.long()],
            lambda: torch.cat([here, there]),
            there.numpy,
        ]
        for mixture in mixtures:
            with pytest.raises(DeviceMixError):
                mixture()
        assert on_gpu(there[torch.tensor([0, 1])])
        assert on_gpu(there + torch.tensor(1.0))
        assert not on_gpu(there.cpu())
        assert there.new_zeros(2).device.type == "cuda"
