"""What a process can say of the device that it computes on."""

from __future__ import annotations

import torch


def gpu_name(device: torch.device) -> str | None:
    """Name and UUID of a GPU; None for a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} GPU-{properties.uuid}"


def release_cached(device: torch.device) -> None:
    """Gives back memory that torch keeps for later: other processes share the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
