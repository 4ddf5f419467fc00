"""Transport through memory that the processes of one machine share: one copy in, one meeting, one copy out."""

from __future__ import annotations

import torch

from rlk.kernels.collectives.base import Collective, CollectiveTimeoutError
from rlk.kernels.collectives.mapping import common_memory
from rlk.kernels.cpu.library import load

ROOM = 1 << 20  # bytes of a buffer: more goes in turns. Two a rank, of which only the pages that are used take memory


class SharedMemoryCollective:
    """One group of processes of one machine. A rank that is dead is noticed within a second, one that does not come
    after `timeout_s`."""

    def __init__(self, peers: Collective, name: str, timeout_s: float) -> None:
        """`peers` is another transport among the same ranks: they meet over it, and it keeps the ordinary sum."""
        self.peers, self.name, self.timeout_s = peers, name, timeout_s
        self.rank, self.size = peers.rank, peers.size
        self._memory = common_memory(peers, name, load().rlk_arena_header() + 2 * self.size * ROOM)
        load().rlk_arena_join(self._memory.data_ptr(), self.rank)
        peers.all_gather(torch.zeros(1, dtype=torch.uint8, device="cpu"), f"{name}: shared memory joined")

    def all_gather(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """See Collective."""
        out = t.new_empty((self.size, *t.shape))
        self._exchange(t.contiguous(), out, 1, stage)
        return out

    def all_to_all(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """See Collective."""
        out = t.new_empty(t.shape)
        self._exchange(t.contiguous(), out, self.size, stage)
        return out

    def all_reduce(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """See Collective."""
        return self.peers.all_reduce(t, stage)

    def _exchange(self, mine: torch.Tensor, out: torch.Tensor, pieces: int, stage: str) -> None:
        place, sent = (self._memory.data_ptr(), self.rank, self.size), (mine.data_ptr(), out.data_ptr(), pieces)
        who = load().rlk_exchange(*place, *sent, mine.nbytes // pieces, ROOM, self.timeout_s)
        if who:
            absent, dead = _ranks(who), _ranks(who >> 8)
            what = f"rank {dead} is gone" if dead else f"rank {absent} did not come within {self.timeout_s:g} s"
            raise CollectiveTimeoutError(f"{self.name}: rank {self.rank} of {self.size} waited in {stage!r}: {what}")


def _ranks(mask: int) -> str:
    return ", ".join(str(rank) for rank in range(8) if mask >> rank & 1)
