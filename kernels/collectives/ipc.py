"""Transport between the GPUs of one machine, or between processes on one GPU: CUDA IPC arenas and waits in the stream.

NCCL and torch's symmetric memory refuse two ranks on one device; this serves both. Nothing spins: processes that share
a GPU are time-sliced, and a spinning one costs whole slices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from rlk.kernels.collectives import cuda_memory
from rlk.kernels.collectives.arena import FAILED, HEADER_BYTES, PROGRESS_WORDS, Layout
from rlk.kernels.collectives.base import CollectiveTimeoutError
from rlk.kernels.collectives.gloo import GlooCollective
from rlk.kernels.collectives.mapping import common_memory
from rlk.kernels.collectives.turns import ArenaCollective
from rlk.kernels.collectives.watch import Release, Watch

ARENA_BYTES = 64 << 20
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
        progress = torch.zeros(PROGRESS_WORDS, dtype=torch.int32, device="cpu", pin_memory=True)
        super().__init__(name, rank, layout, arena, progress, addresses, self._enqueue)
        self._context = cuda_memory.SideStream.here()
        words = common_memory(self._meeting, name, 4 * PROGRESS_WORDS * layout.size).view(torch.int32)
        table = words.view(layout.size, PROGRESS_WORDS).numpy()
        self._watch = Watch(name, rank, progress.numpy(), table, timeout_s, self.stage, self._releasing)
        self._all_come("opening the arenas")

    def _all_come(self, stage: str) -> None:
        self._meeting.all_gather(torch.zeros(1, device="cpu"), stage)  # vLLM makes the GPU torch's default device

    @contextmanager
    def _releasing(self) -> Iterator[Release]:
        """What ends a wait whose rank stays away: the mark first, at which the program after it stops."""
        side, given_up = cuda_memory.SideStream(self._context), False

        def release(absent: list[int]) -> None:
            nonlocal given_up
            given_up = True
            side.write(self._address + 4 * FAILED, 1)
            for p in absent:
                side.write(self._address + 4 * self.layout.slot(p), OPEN)

        yield release
        if not given_up:  # else the context ends with the program that stops, and its streams with it
            side.close()

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
        self._all_come("closing the arenas")
        for address in self._opened.values():
            cuda_memory.close_handle(address)
        self._all_come("freeing the arenas")
        cuda_memory.free(self._address)
