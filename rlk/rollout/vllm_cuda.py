"""vLLM 0.26.0 on a GPU that several ranks may share: NCCL refuses two ranks on one device, so vLLM's groups use gloo.

Nothing of ours goes through vLLM's groups on the device: the model exchanges its bytes itself.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator
from vllm.platforms.cuda import CudaPlatform


class SharedCudaPlatform(CudaPlatform):  # type: ignore[misc]
    """vLLM's own CUDA platform with another backend between ranks."""

    dist_backend = "gloo"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """The communicator without anything of a device."""
        return f"{HostCommunicator.__module__}.{HostCommunicator.__qualname__}"


class HostCommunicator(CudaCommunicator):  # type: ignore[misc]
    """vLLM's communicator without NCCL, custom all-reduce and symmetric memory, which its own start would bring.

    A subclass, since vLLM captures graphs with one of these only. What it was not given, it refuses to use: its
    all-reduce asserts that there is NCCL.
    """

    pynccl_comm = ca_comm = qr_comm = symm_mem_comm = fi_ar_comm = aiter_ar_comm = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("tcp_store_group", None)
        DeviceCommunicatorBase.__init__(self, *args, **kwargs)
