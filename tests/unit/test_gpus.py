"""Which GPUs a process may use: the caller's list in its order, or all, and none without a driver."""

from __future__ import annotations

import pytest

from rlk.driver.gpus import VISIBLE, visible_gpus
from rlk.plan.errors import ConfigErrors
from tests.unit.nvml import devices, library


@pytest.mark.parametrize(
    ("words", "indices"),
    [(None, [0, 1, 2, 3]), ("2,0", [2, 0]), ("GPU-3a,1", [3, 1]), ("", []), (" 1 , 2 ", [1, 2])],
)
def test_visible_list_is_kept_in_its_order(words: str | None, indices: list[int]) -> None:
    env = {} if words is None else {VISIBLE: words}
    assert [gpu.index for gpu in visible_gpus(env, library(devices(4)))] == indices


@pytest.mark.parametrize("words", ["4", "0,7", "GPU-9", "MIG-1", "-1", "GPU-"])
def test_word_that_names_no_gpu_is_refused(words: str) -> None:
    with pytest.raises(ConfigErrors, match=rf"^{VISIBLE}={words}: .*: allowed are 0 to 3 or a GPU-UUID"):
        visible_gpus({VISIBLE: words}, library(devices(4)))


def test_gpu_named_twice_is_refused() -> None:
    with pytest.raises(ConfigErrors, match="GPU 1 comes twice"):
        visible_gpus({VISIBLE: "1,GPU-1a"}, library(devices(4)))


def test_machine_without_a_driver_has_none() -> None:
    assert visible_gpus({}, library(None)) == ()


def test_stand_in_has_only_what_the_library_has() -> None:
    import pynvml

    assert [name for name in vars(library(None)) if name != "calls" and not hasattr(pynvml, name)] == []


def test_processes_are_told_with_name_and_memory() -> None:
    (device,) = devices(1, processes=[(10, 1 << 30), (11, None)])
    nvml = library([device], {10: b"python"})
    (gpu,) = visible_gpus({}, nvml)
    assert [(p.pid, p.name, p.memory) for p in gpu.processes] == [(10, "python", 1 << 30), (11, "?", None)]
    assert nvml.calls == ["init", "shutdown"]


@pytest.mark.parametrize(
    ("capability", "hopper"), [((9, 0), True), ((8, 0), False), ((10, 0), False), ((12, 0), False)]
)
def test_hopper_is_a_compute_capability(capability: tuple[int, int], hopper: bool) -> None:
    (gpu,) = visible_gpus({}, library(devices(1, capability=capability)))
    assert gpu.hopper == hopper
