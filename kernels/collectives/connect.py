"""One place that makes the transport that a plan names: it is never chosen by what happens to work."""

from __future__ import annotations

import torch.distributed as dist

from rlk.kernels.collectives.base import Alone, Collective
from rlk.kernels.collectives.gloo import GlooCollective
from rlk.kernels.collectives.shared_memory import SharedMemoryCollective
from rlk.kernels.collectives.staged import HostStaged

TRANSPORTS = {SharedMemoryCollective: "shared-memory", HostStaged: "host-staged"}
"""Memory that processes of one machine share: of tensors on the host, and of a device's with a copy on either side."""


def connect(transport: str, group: dist.ProcessGroup, name: str, timeout_s: float) -> Collective:
    """The transport among the ranks of a gloo group, over which they meet.

    Raises:
        ValueError: there is no transport of this name.
    """
    if transport not in TRANSPORTS.values():
        raise ValueError(f"transport {transport!r}: allowed is {' or '.join(TRANSPORTS.values())}")
    host = SharedMemoryCollective(GlooCollective(group, name), name, timeout_s)
    return host if transport == "shared-memory" else HostStaged(host)


def transport_of(*groups: Collective) -> str:
    """The name of the transport that these groups use, read from the live objects; "none" where all are of one rank.

    Raises:
        ValueError: they use several.
    """
    used = {TRANSPORTS.get(type(group), type(group).__name__) for group in groups if not isinstance(group, Alone)}
    if len(used) > 1:
        raise ValueError(f"groups of one process use {', '.join(sorted(used))}: allowed is one transport")
    return used.pop() if used else "none"
