"""Transport over torch.distributed's gloo: bytes are moved as bytes, so no arithmetic of the library is involved."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from rlk.kernels.collectives.base import CollectiveTimeoutError


class GlooCollective:
    """One gloo process group. Timeouts are the group's own."""

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self.group, self.name = group, name
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_gather(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """See Collective."""
        # gloo's own all_gather is a ring, one hop after the other: for 8 ranks on 2 cores it took 20 ms, this 5.5 ms.
        return self.all_to_all(t.expand(self.size, *t.shape), stage)

    def all_to_all(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """See Collective."""
        mine = t.contiguous().view(torch.uint8)
        out = torch.empty_like(mine)
        self._run(stage, lambda: dist.all_to_all_single(out, mine, group=self.group))
        return out.view(t.dtype).view(t.shape)

    def all_reduce(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """See Collective."""
        out = t.clone()
        self._run(stage, lambda: dist.all_reduce(out, group=self.group))
        return out

    def _run(self, stage: str, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise CollectiveTimeoutError(
                f"{self.name}: rank {self.rank} of {self.size} waited in {stage!r} and a peer did not answer ({error})"
            ) from error
