"""vLLM 0.26.0 on a GPU that several ranks may share: NCCL refuses two ranks on one device, so vLLM's groups use gloo.

Nothing of ours goes through vLLM's groups on the device: the model exchanges its bytes itself. So the communicator that
would start NCCL, custom all-reduce and symmetric memory is left out, and what remains is what all platforms have.
"""

from __future__ import annotations

from vllm.platforms.cuda import CudaPlatform


class SharedCudaPlatform(CudaPlatform):  # type: ignore[misc]
    """vLLM's own CUDA platform with another backend between ranks."""

    dist_backend = "gloo"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """The communicator without anything of a device."""
        return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
