"""The driver's memory between processes: allocations that can be exported, and waits in a stream.

cuMemAlloc, not torch's caching allocator: what that hands out is a part of a larger block, and with expandable segments
no block that CUDA IPC can export. So its settings, sleep mode and offloading cannot touch an arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver


class CudaDriverError(RuntimeError):
    """A call of the driver failed; the message has the call and the driver's own word."""


def call(function: Any, *args: Any) -> Any:
    """function(*args), its one result or None.

    Raises:
        CudaDriverError: the driver refused.
    """
    error, *results = function(*args)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise CudaDriverError(f"{function.__name__}: {error.name}")
    return results[0] if results else None


def allocate(nbytes: int) -> int:
    """Address of device memory of the current context."""
    return int(call(driver.cuMemAlloc, nbytes))


def free(address: int) -> None:
    """Gives it back."""
    call(driver.cuMemFree, driver.CUdeviceptr(address))


def export(address: int) -> bytes:
    """The 64 bytes with which another process of this machine opens an allocation."""
    return bytes(call(driver.cuIpcGetMemHandle, driver.CUdeviceptr(address)).reserved)


def open_handle(exported: bytes) -> int:
    """Address, in the current context, of another process's allocation.

    Not by torch, which maps it in the context of the exporter's device, where kernels of this one fault.
    """
    handle = driver.CUipcMemHandle()
    handle.reserved = exported
    lazy = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(call(driver.cuIpcOpenMemHandle, handle, int(lazy)))


def close_handle(address: int) -> None:
    """Ends what open_handle began."""
    call(driver.cuIpcCloseMemHandle, driver.CUdeviceptr(address))


class _Memory:
    """What torch.as_tensor reads."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def as_tensor(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] over memory of `device`; the caller keeps it allocated."""
    return torch.as_tensor(_Memory(address, nbytes), device=device)


class Wait:
    """The stream goes on when every one of some 32-bit words of this device is at least 1."""

    def __init__(self, addresses: Sequence[int]) -> None:
        self.conditions = [self._at_least_one(a) for a in addresses]

    def enqueue(self, stream: int) -> None:
        """Also into a graph that the stream is being captured in."""
        call(driver.cuStreamBatchMemOp, driver.CUstream(stream), len(self.conditions), self.conditions, 0)

    @staticmethod
    def _at_least_one(address: int) -> Any:
        operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
        condition = driver.CUstreamBatchMemOpParams()
        condition.operation = operation
        condition.waitValue.operation = operation
        condition.waitValue.address = driver.CUdeviceptr(address)
        condition.waitValue.value = driver.cuuint32_t(1)
        condition.waitValue.flags = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        return condition


class SideStream:
    """A stream that nothing else waits for, for a thread that writes while the others wait. Make it in that thread."""

    def __init__(self, context: Any) -> None:
        call(driver.cuCtxSetCurrent, context)
        # Another thread's capture of a graph would otherwise forbid this one's calls, and be ended by them.
        call(driver.cuThreadExchangeStreamCaptureMode, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        self.stream = call(driver.cuStreamCreate, int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    @staticmethod
    def here() -> Any:
        """The calling thread's context."""
        return call(driver.cuCtxGetCurrent)

    def write(self, address: int, value: int) -> None:
        """One 32-bit word on the device, after what was written before."""
        call(driver.cuMemsetD32Async, driver.CUdeviceptr(address), value, 1, self.stream)

    def close(self) -> None:
        """Gives the stream back."""
        call(driver.cuStreamDestroy, self.stream)
