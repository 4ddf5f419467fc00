"""What one of four processes does for test_rollout_context_parallel: it is a rank of one engine after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch

from rlk.plan.derive import Plan, derive
from rlk.rollout import context_parallel
from rlk.rollout.engine import EngineRank
from rlk.rollout.paging import own_slots
from tests.consistency.engines import Outcome, make_plan, make_requests, page_bytes, together

T = TypeVar("T")

RANKS = 4
NARROW, FEW_PAGES = 24, 18  # tokens a step, so that no prompt is whole; pages, a quarter of what the sequences fill
TOPOLOGIES = {"cp4": (1, 4), "cp2": (1, 2), "tp2 cp2": (2, 2), "cp1": (1, 1)}


@dataclass
class RankCases:
    """Outcomes by topology and schedule on one rank, and what the live engine showed of itself afterwards."""

    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    readback: dict[str, dict[str, Any]] = field(default_factory=dict)
    fingerprints: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)


def plan_over(model: Path, tp: int, cp: int) -> Plan:
    """One engine of TP * CP ranks with as many pages, whatever the degrees: so all schedule alike."""
    plan = make_plan(model, budget=NARROW, pages=FEW_PAGES)
    profile = plan.profile.limited({"kv_cache_bytes": FEW_PAGES * page_bytes(plan.shape) // (tp * cp)})
    config = plan.config.model_copy(update={"rollout_tp": tp, "rollout_cp": cp})
    return derive(config, profile, plan.shape)


def run_rank(rank: int, model: Path, ports: dict[str, int]) -> RankCases:
    """Every topology in which this rank has a place."""
    cases, engine = RankCases(), None
    for name, degrees in TOPOLOGIES.items():
        plan = plan_over(model, *degrees)
        if rank >= plan.engine_ranks:
            continue
        place = (plan.to_json(), 0, rank, plan.engine_ranks, ports[name])
        if engine is None:
            engine = EngineRank(*place)
            engine.start()
        else:
            engine.move(*place)
        cases.outcomes[name, "cold"] = together(engine, make_requests())
        cases.outcomes[name, "warm"] = together(engine, make_requests())
        cases.readback[name] = engine.read_back()["worker"]
        cases.fingerprints[name] = engine.fingerprint()
        if name == "cp4":
            with _wrong_owner(rank):
                engine.commit(0)
                cases.outcomes[name, "wrong owner"] = together(engine, make_requests())
    assert engine is not None
    engine.stop()
    return cases


@contextmanager
def _wrong_owner(rank: int) -> Iterator[None]:
    """Rank 1 writes the rows of rank 2, and its own ones are nobody's."""

    def theirs(slots: torch.Tensor, block: int, owner: int, size: int) -> torch.Tensor:
        return own_slots(slots, block, 2 if rank == 1 else owner, size)

    with mock.patch.object(context_parallel, "own_slots", theirs):
        yield


def on_processes(work: Callable[..., T], *arguments: Any, environment: dict[str, str], timeout_s: int) -> list[T]:
    """work(rank, *arguments) in RANKS fresh processes at once."""
    with (
        mock.patch.dict("os.environ", environment),
        ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as pool,
    ):
        ranks = [pool.submit(work, rank, *arguments) for rank in range(RANKS)]
        return [rank.result(timeout_s) for rank in ranks]
