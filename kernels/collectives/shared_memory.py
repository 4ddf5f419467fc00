"""Transport through memory that the processes of one machine share: one copy in, one meeting, one copy out."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch

from rlk.kernels.collectives.base import Collective, CollectiveTimeoutError
from rlk.kernels.cpu.library import load

FOLDER = "/dev/shm"
ROOM = 1 << 20  # bytes of a buffer: more goes in turns. Two a rank, of which only the pages that are used take memory
PATH_BYTES = 256


class SharedMemoryCollective:
    """One group of processes of one machine. A rank that is dead is noticed within a second, one that does not come
    after `timeout_s`."""

    def __init__(self, peers: Collective, name: str, timeout_s: float) -> None:
        """`peers` is another transport among the same ranks: they meet over it, and it keeps the ordinary sum. The
        memory has no name once all have it, so it is gone with the last of them, however that ends."""
        self.peers, self.name, self.timeout_s = peers, name, timeout_s
        self.rank, self.size = peers.rank, peers.size
        self._memory = self._open()
        load().rlk_arena_join(self._memory.data_ptr(), self.rank)
        peers.all_gather(torch.zeros(1, dtype=torch.uint8), f"{name}: shared memory joined")

    def _open(self) -> torch.Tensor:
        length = load().rlk_arena_header() + 2 * self.size * ROOM
        with tempfile.NamedTemporaryFile(
            prefix=f"rlk-{os.getpid()}-", dir=FOLDER
        ) as own:  # each makes one; that of rank 0 is used
            path = torch.frombuffer(bytearray(own.name.encode().ljust(PATH_BYTES)), dtype=torch.uint8)
            first = self.peers.all_gather(path, f"{self.name}: shared memory made")[0]
            with open(first.numpy().tobytes().rstrip(), "r+b") as file:
                file.truncate(length)
                memory = mmap.mmap(file.fileno(), length)
            self.peers.all_gather(path[:1], f"{self.name}: shared memory opened")
        return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive for as long as it lives itself

    def all_gather(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """See Collective."""
        out = torch.empty((self.size, *t.shape), dtype=t.dtype)
        self._exchange(t.contiguous(), out, 1, stage)
        return out

    def all_to_all(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        """See Collective."""
        out = torch.empty(t.shape, dtype=t.dtype)
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
