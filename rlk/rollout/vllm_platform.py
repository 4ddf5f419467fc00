"""The two entry points by which vLLM finds us: its platforms, and our model. Both are named in pyproject.toml."""

from __future__ import annotations

import os

ARCHITECTURE = "RlkQwen3ForCausalLM"
"""A name of our own: stock Qwen3 stays what it is for whoever else uses this environment."""


PLATFORMS = {"cpu": "rlk.rollout.vllm_cpu.CpuPlatform", "cuda": "rlk.rollout.vllm_cuda.SharedCudaPlatform"}


def platform() -> str | None:
    """The platform class that RLK_PLATFORM names, cpu or cuda; without it None: vLLM then chooses as it always does.

    vLLM 0.26.0 takes its own CPU platform only where the installed version says "cpu", which a source build without
    compiled ops does not.
    """
    return PLATFORMS.get(os.environ.get("RLK_PLATFORM", ""))


def register() -> None:
    """Registers the model. vLLM calls this in each process that it starts, before any model is built."""
    from vllm import ModelRegistry

    from rlk.rollout.vllm_model import RolloutQwen3

    # The class and not its path: a path would be inspected in a subprocess, which costs 6 s a process on a fresh
    # machine.
    ModelRegistry.register_model(ARCHITECTURE, RolloutQwen3)
