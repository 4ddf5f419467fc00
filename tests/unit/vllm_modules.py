"""Imports of rollout modules that need vLLM, for tests without an engine."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType


def with_vllm(name: str) -> ModuleType:
    """A module of rlk.rollout; vLLM chooses its platform once a process, and must find ours when it is first asked."""
    os.environ["RLK_PLATFORM"] = "cpu"
    import_module("vllm")  # first: vLLM imports our platform class while it is imported itself
    return import_module(f"rlk.rollout.{name}")
