"""The worker class on a CPU."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker  # first: it patches torch before the GPU worker below is imported

from rlk.rollout.vllm_worker import RankWorker


class CpuRankWorker(RankWorker, CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with our rank's methods in front."""
