"""Transport between the GPUs of one machine, or between processes on one GPU: CUDA IPC arenas and waits in the stream.

NCCL and torch's symmetric memory refuse two ranks on one device; this serves both. Nothing spins: processes that share
a GPU are time-sliced, and a spinning one costs whole slices.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlk.kernels.collectives import cuda_memory
from rlk.kernels.collectives.arena import FAILED, HEADER_BYTES, PROGRESS_WORDS, Layout
from rlk.kernels.collectives.base import CollectiveTimeoutError
from rlk.kernels.collectives.gloo import GlooCollective
from rlk.kernels.collectives.turns import ArenaCollective
from rlk.kernels.collectives.watch import Release, Watch, Words

ARENA_BYTES = 64 << 20
PATH_BYTES = 200
OPEN = 1 << 20
"""What a slot is set to when its rank is given up: no number of signals that a rank can be ahead."""
POLL_S = 50e-6


class IpcCollective(ArenaCollective):
    """One group of 2, 4 or 8 processes of one machine. Tensors are on `device`, calls on torch's current stream.

    All ranks make the same calls in the same order; a rank that uses several streams orders them. Calls may be captured
    in a graph, once such a call was made outside of one, which compiles the programs.

    group: a gloo group, for the start and the end only. timeout_s: how long a wait may last. arena_bytes: the resident
    memory of this rank, a multiple of 2 MiB; larger tensors go in several turns.
    """

    def __init__(
        self, group: dist.ProcessGroup, name: str, device: torch.device, timeout_s: float,
        arena_bytes: int = ARENA_BYTES,
    ) -> None:  # fmt: skip
        self._meeting = GlooCollective(group, name)
        layout = Layout(self._meeting.size, arena_bytes)
        torch.cuda.set_device(device)
        here = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.synchronize()  # there is a context from here on
        self._address = cuda_memory.allocate(arena_bytes)
        arena = cuda_memory.as_tensor(self._address, arena_bytes, here)
        arena[:HEADER_BYTES].zero_()
        torch.cuda.synchronize()
        self._opened, rank = self._meet(here), self._meeting.rank
        slots = [self._address + 4 * layout.slot(p) for p in self._opened]
        addresses = [self._opened.get(p, self._address) for p in range(layout.size)]
        self._condition = cuda_memory.Wait(slots)
        progress = torch.zeros(PROGRESS_WORDS, dtype=torch.int32, pin_memory=True)
        super().__init__(name, rank, layout, arena, progress, addresses, self._enqueue)
        self._context = cuda_memory.SideStream.here()
        table = self._shared_table()
        self._watch = Watch(name, rank, progress.numpy(), table, timeout_s, self.stage, self._releasing)

    def _shared_table(self) -> Words:
        """int32 [ranks, 3], zero, the same memory in every process; its file is gone when this returns."""
        with tempfile.NamedTemporaryFile(prefix="rlk-", dir="/dev/shm") as file:
            shape = (self._meeting.size, PROGRESS_WORDS)
            file.truncate(4 * shape[0] * shape[1])
            said = torch.frombuffer(bytearray(file.name.encode().ljust(PATH_BYTES)), dtype=torch.uint8)
            path = bytes(self._meeting.all_gather(said, "opening the table")[0].tolist()).decode().rstrip()
            table: Words = np.memmap(path, dtype=np.int32, mode="r+", shape=shape)
            self._meeting.all_gather(torch.zeros(1), "opening the arenas")  # of rank 0's file, before it goes
        return table

    def _releasing(self) -> Release:
        """What ends a wait whose rank stays away: the mark first, at which the program after it stops."""
        side = cuda_memory.SideStream(self._context)

        def release(absent: list[int]) -> None:
            side.write(self._address + 4 * FAILED, 1)
            for p in absent:
                side.write(self._address + 4 * self.layout.slot(p), OPEN)
            side.wait()

        return release

    def _meet(self, device: torch.device) -> dict[int, int]:
        """The peers' arenas in this process, by rank; notes which ranks share a device."""
        uuid = str(torch.cuda.get_device_properties(device).uuid).encode()
        mine = torch.frombuffer(bytearray(cuda_memory.export(self._address) + uuid), dtype=torch.uint8)
        told = [bytes(row) for row in self._meeting.all_gather(mine, "exchange of arena handles").tolist()]
        devices = list(dict.fromkeys(row[64:] for row in told))
        self.device_of_rank = [devices.index(row[64:]) for row in told]
        return {p: cuda_memory.open_handle(row[:64]) for p, row in enumerate(told) if p != self._meeting.rank}

    def _enqueue(self) -> None:
        self.check()
        self._condition.enqueue(torch.cuda.current_stream(self.device).cuda_stream)

    def describe(self) -> dict[str, Any]:
        """For the manifest: what is resident here, and which ranks share a device (equal numbers)."""
        return {"transport": "cuda-ipc", "arena_bytes": self.layout.total, "device_of_rank": self.device_of_rank}

    def check(self) -> None:
        """Raises CollectiveTimeoutError if a wait was given up."""
        if self._watch.error:
            raise CollectiveTimeoutError(self._watch.error)

    def settle(self) -> None:
        """Waits for what was started on the current stream, and raises CollectiveTimeoutError by rank and stage.

        Before results are read on the host: a plain read of memory that is not pinned would hold the driver's lock
        while it waits, and a process in which that happens can only be ended.
        """
        with self.naming_timeouts():
            done = torch.cuda.Event()
            done.record()
            while not done.query():
                time.sleep(POLL_S)

    @contextmanager
    def naming_timeouts(self) -> Iterator[None]:
        """Around what waits for the device: the error that a wait given up leaves there is told by rank and stage."""
        try:
            yield
        except RuntimeError as error:
            if self._watch.error:
                raise CollectiveTimeoutError(self._watch.error) from error
            raise
        self.check()

    def close(self) -> None:
        """Gives the arena back, once every rank has come to this point."""
        self._watch.stop()
        torch.cuda.synchronize(self.device)
        self._meeting.all_gather(torch.zeros(1), "closing the arenas")
        for address in self._opened.values():
            cuda_memory.close_handle(address)
        self._meeting.all_gather(torch.zeros(1), "freeing the arenas")
        cuda_memory.free(self._address)
