"""Transport of a device's tensors through the host: out, over a transport of the host, and back. Bytes, so exact."""

from __future__ import annotations

import torch

from rlk.kernels.collectives.base import Collective


class HostStaged:
    """A group whose tensors are on a device and travel over `host`. It waits for the device at every call, so no graph
    can capture it."""

    def __init__(self, host: Collective) -> None:
        self.host, self.rank, self.size = host, host.rank, host.size

    def all_gather(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """See Collective."""
        return self.host.all_gather(t.cpu(), stage).to(t.device)

    def all_to_all(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """See Collective."""
        return self.host.all_to_all(t.cpu(), stage).to(t.device)

    def all_reduce(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """See Collective."""
        return self.host.all_reduce(t.cpu(), stage).to(t.device)
