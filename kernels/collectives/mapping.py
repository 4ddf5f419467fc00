"""Host memory that the processes of a group share."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch

from rlk.kernels.collectives.base import Collective

FOLDER = "/dev/shm"
PATH_BYTES = 256


def common_memory(peers: Collective, name: str, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes], zero, the same memory in every process of `peers`, which is a transport of the host.

    It has no name once all have it, so it is gone with the last of them, however that ends.
    """
    with tempfile.NamedTemporaryFile(
        prefix=f"rlk-{os.getpid()}-", dir=FOLDER
    ) as own:  # each makes one; that of rank 0 is used
        path = torch.frombuffer(bytearray(own.name.encode().ljust(PATH_BYTES)), dtype=torch.uint8)
        first = peers.all_gather(path, f"{name}: shared memory made")[0]
        with open(first.numpy().tobytes().rstrip(), "r+b") as file:
            file.truncate(nbytes)
            memory = mmap.mmap(file.fileno(), nbytes)
        peers.all_gather(path[:1], f"{name}: shared memory opened")
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive for as long as it lives itself
