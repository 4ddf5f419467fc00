"""One place that makes the transport that a plan names: it is never chosen by what happens to work."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rlk.kernels.collectives.base import Alone, Collective, Settling
from rlk.kernels.collectives.gloo import GlooCollective
from rlk.kernels.collectives.shared_memory import SharedMemoryCollective
from rlk.kernels.collectives.staged import HostStaged

TRANSPORTS = {"SharedMemoryCollective": "shared-memory", "HostStaged": "host-staged", "IpcCollective": "cuda-ipc"}
"""By class: memory that processes of one machine share, for tensors on the host; the same for a device's, with a copy
on either side; memory of the devices themselves."""


def connect(transport: str, group: dist.ProcessGroup, name: str, timeout_s: float) -> Collective:
    """The transport among the ranks of a gloo group, over which they meet. A device is the process's current one.

    Raises:
        ValueError: there is no transport of this name.
    """
    if transport not in TRANSPORTS.values():
        raise ValueError(f"transport {transport!r}: allowed is {' or '.join(TRANSPORTS.values())}")
    with torch.device("cpu"):  # vLLM makes its own device torch's default while it builds a model
        if transport == "cuda-ipc":
            from rlk.kernels.collectives.ipc import IpcCollective  # here: it needs Triton and CUDA, which a CPU lacks

            return IpcCollective(group, name, torch.device("cuda", torch.cuda.current_device()), timeout_s)
        host = SharedMemoryCollective(GlooCollective(group, name), name, timeout_s)
        return host if transport == "shared-memory" else HostStaged(host)


def transport_of(*groups: Collective) -> str:
    """The name of the transport that these groups use, read from the live objects; "none" where all are of one rank.

    Raises:
        ValueError: they use several.
    """
    classes = {type(group).__name__ for group in groups if not isinstance(group, Alone)}
    used = {TRANSPORTS.get(name, name) for name in classes}
    if len(used) > 1:
        raise ValueError(f"groups of one process use {', '.join(sorted(used))}: allowed is one transport")
    return used.pop() if used else "none"


def arena_bytes(*groups: Collective) -> int:
    """Bytes of the device that the groups hold for as long as they live; a transport over the host has none."""
    described = [group.describe() for group in groups if hasattr(group, "describe")]
    return sum(int(said["arena_bytes"]) for said in described)


def settle(*groups: Collective) -> None:
    """Before results are read on the host: waits for what the groups started on a device, in a way that a rank which
    stays away can end. A transport over the host has waited already.

    Raises:
        CollectiveTimeoutError: by rank and stage.
    """
    live = [group for group in groups if isinstance(group, Settling)]
    for group in live:
        try:
            group.settle()
        except RuntimeError:  # the device stopped; the group whose rank stayed away can say so
            for other in live:
                other.check()
            raise


def disconnect(*groups: Collective) -> None:
    """Gives back what groups hold beyond their objects' lives, before the gloo groups under them end. All ranks call
    it together."""
    for group in groups:
        close = getattr(group, "close", None)
        if close is not None:
            close()
