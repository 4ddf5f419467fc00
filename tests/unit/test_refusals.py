"""What is refused before anything is created: one line each, with the value, what is allowed and the remedy.

GPUs are made up at the boundary of NVIDIA's library; the rest is the environment and the checkout as they are given.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from rlk.driver.gpus import Gpu, visible_gpus
from rlk.driver.refusals import allocator_refusals, gpu_refusals, settings_refusals
from rlk.evidence.schemas import Repository
from rlk.plan.config import RunConfig
from rlk.plan.derive import Plan, derive
from tests.unit.nvml import devices, library
from tests.unit.tiny import SHAPE, profile

CLEAN = Repository(revision="ab" * 20, dirty=False, patch_sha256=None)
DIRTY = Repository(revision="ab" * 20, dirty=True, patch_sha256="cd" * 32)


def plan(config: dict[str, Any] | None = None, **changes: Any) -> Plan:
    return derive(RunConfig(**(config or {})), profile(**changes), SHAPE)


def gpus(count: int, names: dict[int, bytes] | None = None, **changes: Any) -> tuple[Gpu, ...]:
    return visible_gpus({}, library(devices(count, **changes), names))


def said(wanted: Plan, env: dict[str, str], state: Repository = CLEAN) -> list[str]:
    return list(settings_refusals(wanted, env, lambda: state))


def on_gpus(wanted: Plan, found: Sequence[Gpu], own: Sequence[int] = ()) -> list[str]:
    return list(gpu_refusals(wanted, found, lambda: set(own)))


def test_nothing_is_refused_on_a_clean_machine() -> None:
    assert said(plan(), {}) == []
    assert on_gpus(plan(device="cuda", gpus=8), gpus(8)) == []


def test_ray_address_of_the_environment_is_refused() -> None:
    (line,) = said(plan(), {"RAY_ADDRESS": "10.0.0.1:6379"})
    assert line.startswith("RAY_ADDRESS=10.0.0.1:6379: ")
    assert "--ray-address" in line
    assert said(plan({"ray_address": "10.0.0.1:8265"}), {"RAY_ADDRESS": "10.0.0.1:6379"}) == []


def test_dirty_checkout_is_refused_unless_allowed() -> None:
    (line,) = said(plan(), {}, DIRTY)
    assert DIRTY.patch_sha256 in line
    assert "--allow-dirty" in line
    assert said(plan({"allow_dirty": True}), {}, DIRTY) == []
    assert said(plan(test=True), {}, DIRTY) == []


@pytest.mark.parametrize(
    ("variable", "value", "key"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "expandable_segments"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments : true", "expandable_segments"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "backend"),
    ],
)
def test_allocator_that_cannot_export_is_refused(variable: str, value: str, key: str) -> None:
    (line,) = said(plan(device="cuda"), {variable: value})
    assert line.startswith(f"{variable}=")
    assert f"take {key} out of it" in line
    assert said(plan(), {variable: value}) == [], "a CPU has no such memory"


@pytest.mark.parametrize(
    "value", ["", "expandable_segments:False", "backend:native", "garbage", "max_split_size_mb:64"]
)
def test_other_allocator_settings_are_allowed(value: str) -> None:
    assert list(allocator_refusals({"PYTORCH_CUDA_ALLOC_CONF": value})) == []


@pytest.mark.parametrize(("there", "needed"), [(0, None), (1, 2), (7, 8)])
def test_too_few_gpus_are_refused_with_both_counts(there: int, needed: int | None) -> None:
    (line,) = on_gpus(plan(device="cuda", gpus=needed), gpus(there))
    assert f"gpus {needed or 1}: {there} are visible" in line


def test_gpus_that_are_no_hopper_are_named() -> None:
    lines = on_gpus(plan(device="cuda", gpus=2), gpus(4, name="NVIDIA A100", capability=(8, 0)))
    assert [line.split(":")[0] for line in lines] == [
        f"GPU {index} (NVIDIA A100) has compute capability 8.0" for index in (0, 1)
    ]


def test_foreign_processes_are_listed_by_pid_name_and_memory() -> None:
    found = gpus(2, {10: b"trainer"}, processes=[(10, 3 << 30), (11, None)])
    lines = on_gpus(plan(device="cuda", gpus=1), found, own=[11])
    (line,) = lines
    assert "GPU 0 (NVIDIA H100 80GB HBM3) is in use: pid 10, trainer, 3072 MiB: allowed are GPUs without" in line
    assert len(on_gpus(plan(device="cuda", gpus=2), found)) == 4


def test_own_processes_are_no_foreign_ones() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = gpus(1, processes=[(os.getpid(), None), (child.pid, None)])
        assert list(gpu_refusals(plan(device="cuda"), found)) == []
    finally:
        child.communicate(b"\n")


def test_every_refusal_is_one_line() -> None:
    wanted = plan(device="cuda", gpus=8)
    found = gpus(1, name="A100", capability=(8, 0), processes=[(1, None)])
    lines = [*said(wanted, {"RAY_ADDRESS": "x:1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}, DIRTY)]
    lines += on_gpus(wanted, found)
    assert len(lines) == 6
    assert all("\n" not in line and ": " in line for line in lines)
