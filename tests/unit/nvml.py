"""A stand-in for `pynvml`: the functions that are asked, answering from a list of made-up GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """The base class of the library's errors."""


class NoDriverError(NVMLError):
    """No driver on this machine."""


@dataclass
class Device:
    """One made-up GPU; processes are (pid, bytes or None)."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    processes: list[tuple[int, int | None]] = field(default_factory=list)


def devices(count: int, **changes: Any) -> list[Device]:
    """That many GPUs, `GPU-0a...` and on."""
    return [Device(f"GPU-{index}a000000-0000-0000-0000-000000000000", **changes) for index in range(count)]


def library(found: list[Device] | None, names: dict[int, bytes] | None = None) -> Any:
    """The module; None is a machine without a driver. `names` are those of the processes that can be seen."""
    calls: list[str] = []

    def init() -> None:
        calls.append("init")
        if found is None:
            raise NoDriverError

    def process_name(pid: int) -> bytes:
        if pid not in (names or {}):
            raise NVMLError
        return (names or {})[pid]

    def running(device: Device) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in device.processes]

    return SimpleNamespace(
        calls=calls,
        NVMLError=NVMLError,
        NVMLError_LibraryNotFound=NoDriverError,
        NVMLError_DriverNotLoaded=NoDriverError,
        nvmlInit=init,
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: len(found or ()),
        nvmlDeviceGetHandleByIndex=lambda index: (found or [])[index],
        nvmlDeviceGetUUID=lambda device: device.uuid.encode(),
        nvmlDeviceGetName=lambda device: device.name,
        nvmlDeviceGetCudaComputeCapability=lambda device: list(device.capability),
        nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(total=80 << 30),
        nvmlDeviceGetComputeRunningProcesses=running,
        nvmlSystemGetProcessName=process_name,
    )
