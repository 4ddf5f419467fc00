"""What vLLM 0.26.0 gets as the communicator of a group whose ranks may share a GPU.

A module of its own, since it is imported once vLLM knows its platform, and the platform's module before.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator


class HostCommunicator(CudaCommunicator):  # type: ignore[misc]
    """vLLM's communicator without NCCL, custom all-reduce and symmetric memory, which its own start would bring.

    A subclass, since vLLM captures graphs with one of these only. Without the others its own sums go through
    torch.distributed, which is gloo here; the model asks for none.
    """

    pynccl_comm = ca_comm = qr_comm = symm_mem_comm = fi_ar_comm = aiter_ar_comm = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("tcp_store_group", None)
        DeviceCommunicatorBase.__init__(self, *args, **kwargs)
