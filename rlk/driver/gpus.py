"""The GPUs that this process may use, as the driver's management library (NVML) tells them; none is initialised."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlk.plan.errors import ConfigErrors, shown

HOPPER = (9, 0)
"""Compute capability of H100, H200, H800, H20 and GH200."""
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class ComputeProcess:
    """A process that holds a context on a GPU. `memory` is in bytes; None where the driver does not tell."""

    pid: int
    name: str
    memory: int | None


@dataclass(frozen=True)
class Gpu:
    """One GPU: NVML's index, the UUID that CUDA_VISIBLE_DEVICES takes, compute capability, bytes of memory."""

    index: int
    uuid: str
    name: str
    capability: tuple[int, int]
    memory: int
    processes: tuple[ComputeProcess, ...] = ()

    @property
    def hopper(self) -> bool:
        """Whether the kernels were compiled and proved for it."""
        return self.capability == HOPPER


def visible_gpus(env: Mapping[str, str], library: Any = None) -> tuple[Gpu, ...]:
    """The GPUs of CUDA_VISIBLE_DEVICES in its order, or all; none on a machine without NVIDIA's driver.

    `library` stands in for `pynvml`. A number in the variable is NVML's index, which is CUDA's where all GPUs are
    of one kind.

    Raises:
        ConfigErrors: the variable names something else than a GPU of this machine, by its number or UUID.
    """
    nvml = library or importlib.import_module("pynvml")  # here, since machines without a GPU rarely need it
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return ()
    try:
        found = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    finally:
        nvml.nvmlShutdown()
    return found if VISIBLE not in env else _chosen(env[VISIBLE], found)


def given_gpus() -> list[str]:
    """In a task of Ray: the GPUs that it was given. It stands here since a worker imports the module of its task, and
    each of a node's workers would import torch for most others."""
    ray = importlib.import_module("ray")
    return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory=nvml.nvmlDeviceGetMemoryInfo(handle).total,
        processes=tuple(ComputeProcess(p.pid, _name(nvml, p.pid), p.usedGpuMemory) for p in processes),
    )


def _name(nvml: Any, pid: int) -> str:
    """The program's name; a question mark for one that ended meanwhile or that another container hides."""
    try:
        return _text(nvml.nvmlSystemGetProcessName(pid))
    except nvml.NVMLError:
        return "?"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _chosen(words: str, found: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    chosen = []
    for word in (word.strip() for word in words.split(",") if word.strip()):
        fits = [
            gpu for gpu in found if word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))
        ]
        if len(fits) != 1:
            allowed = f"0 to {len(found) - 1} or a GPU-UUID of this machine" if found else "nothing: there is no GPU"
            raise ConfigErrors([f"{VISIBLE}={shown(words)}: {shown(word)}: allowed are {allowed}"])
        chosen += fits
    twice = [gpu for gpu in chosen if chosen.count(gpu) > 1]
    if twice:
        raise ConfigErrors([f"{VISIBLE}={shown(words)}: GPU {twice[0].index} comes twice: say it once"])
    return tuple(chosen)
