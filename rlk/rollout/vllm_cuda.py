"""vLLM 0.26.0 on a GPU that several ranks may share: NCCL refuses two ranks on one device, so vLLM's groups use gloo.

Nothing of ours goes through vLLM's groups on the device: the model exchanges its bytes itself.
"""

from __future__ import annotations

from vllm.platforms.cuda import CudaPlatform


class SharedCudaPlatform(CudaPlatform):  # type: ignore[misc]
    """vLLM's own CUDA platform with another backend between ranks."""

    dist_backend = "gloo"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """The communicator without anything of a device."""
        return "rlk.rollout.vllm_communicator.HostCommunicator"
