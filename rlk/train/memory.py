"""What a train rank holds, and its way to the host and back while the engines of the same GPU generate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlk.kernels.devices import release_cached
from rlk.model.checkpoint import HOST

State = Mapping[str, dict[str, torch.Tensor]]
"""Tensors by name, by what they are: weights, masters, moments, gradients."""


def held_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of these tensors."""
    return sum(t.nbytes for t in tensors.values())


class Residence:
    """Where the state of a train rank lies. Bytes are moved, so they come back as they were."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.offloads = self.freed_bytes = 0

    def offload(self, state: State) -> None:
        """Moves the state to the host and gives the device's memory back."""
        before = self._allocated()
        self._move(state, HOST)
        release_cached(self.device)
        self.offloads, self.freed_bytes = self.offloads + 1, before - self._allocated()

    def restore(self, state: State) -> None:
        """Moves the state back to the device."""
        self._move(state, self.device)

    def holdings(self, state: State, reference: int) -> tuple[dict[str, Any], ...]:
        """By name: bytes, and where they lie while engines generate: see rlk.evidence.schemas.Holding."""
        where = "offloaded" if self.offloads else "resident"
        held = [{"name": name, "bytes": held_bytes(t), "during_rollout": where} for name, t in state.items()]
        return *held, {"name": "reference", "bytes": reference, "during_rollout": "released"}

    def _move(self, state: State, device: torch.device) -> None:
        for tensors in state.values():
            for name in tensors:
                tensors[name] = tensors[name].to(device)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
