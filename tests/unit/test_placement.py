"""Where the ranks of a submitted run go: one GPU for a train rank and its rollout worker, and one node for all.

GPU counts 1, 2, 4 and 8 under 8 ranks, since sharing is where a fraction could be lost.
"""

from __future__ import annotations

import pytest

from rlk.plan.config import RunConfig
from rlk.plan.derive import Plan, derive
from rlk.plan.describe import describe
from rlk.plan.placement import Placement, placement
from tests.unit.tiny import SHAPE, profile


def plan(config: dict[str, object] | None = None, **changes: object) -> Plan:
    return derive(RunConfig(**(config or {})), profile(**changes), SHAPE)  # type: ignore[arg-type]


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_two_actors_fill_a_bundle_and_all_bundles_the_gpus(gpus: int) -> None:
    placed = placement(plan({"tp": 2, "rollout_tp": 2}, device="cuda"), gpus)
    assert len(placed.bundles) == 8
    assert {2 * placed.actor_gpus} == {bundle["GPU"] for bundle in placed.bundles}
    assert placed.total == {"CPU": 16, "GPU": gpus}
    assert (placed.actor_gpus * 10_000).is_integer(), "Ray counts in ten-thousandths"


def test_slot_without_a_rollout_worker_takes_one_cpu() -> None:
    capped = plan({"tp": 2, "rollout_tp": 2}, engine={"max_engines": 2})
    assert [bundle["CPU"] for bundle in placement(capped, 0).bundles] == [2, 2, 2, 2, 1, 1, 1, 1]


def test_cpu_run_asks_for_no_gpu() -> None:
    placed = placement(plan(), 8)
    assert placed.gpus == placed.actor_gpus == 0
    assert all(set(bundle) == {"CPU"} for bundle in placed.bundles)


def test_gpus_of_the_profile_are_asked_for_even_where_they_are_not() -> None:
    assert placement(plan(device="cuda", gpus=8), 2) == Placement(8, 8, 8)


def test_plan_shows_what_would_be_submitted() -> None:
    shown = dict(describe(plan({"ray_address": "10.0.0.1:8265", "output_root": "/data/runs"}, device="cuda", gpus=2)))
    lines = dict(shown["submission"])
    assert lines["to"] == "10.0.0.1:8265, as job rlk-RUN_ID"
    assert lines["entrypoint"] == "PYTHON -P -m rlk job /data/runs/RUN_ID.submission.json"
    assert lines["bundles"].startswith("8 x {CPU 2, GPU 0.25} on one node")
    assert dict(describe(plan()))["submission"] == []
