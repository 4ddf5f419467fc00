"""Ranks as threads of one process: every topology in seconds, with the collective interface of the real transports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from rlk.model.parallel import ParallelContext

T = TypeVar("T")


class _Meeting:
    """Where the threads of one group exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[torch.Tensor] = [torch.empty(0)] * size


class ThreadCollective:
    """See rlk.kernels.collectives.base.Collective."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, len(meeting.slots)

    def all_gather(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        self.meeting.slots[self.rank] = t
        self.meeting.barrier.wait(60)
        out = torch.stack(self.meeting.slots)
        self.meeting.barrier.wait(60)
        return out

    def all_to_all(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        return self.all_gather(t, stage)[:, self.rank].contiguous()

    def all_reduce(self, t: torch.Tensor, stage: str) -> torch.Tensor:
        # Starts at another rank in every group: an ordinary all-reduce promises no order.
        out = self.all_gather(t, stage)
        return torch.cat([out[self.size // 2 :], out[: self.size // 2]]).sum(0)


def on_ranks(tp: int, cp: int, work: Callable[[ParallelContext], T]) -> list[T]:
    """work(context) on tp * cp threads; results in rank order (tp_rank * cp + cp_rank)."""
    tp_meetings = [_Meeting(tp) for _ in range(cp)]
    cp_meetings = [_Meeting(cp) for _ in range(tp)]

    def run(rank: int) -> T:
        t, c = divmod(rank, cp)
        try:
            return work(ParallelContext(ThreadCollective(tp_meetings[c], t), ThreadCollective(cp_meetings[t], c)))
        except BaseException:
            for meeting in (*tp_meetings, *cp_meetings):
                meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(tp * cp) as pool:
        ranks = [pool.submit(run, rank) for rank in range(tp * cp)]
    errors = [error for rank in ranks if (error := rank.exception())]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error  # the cause, before what it did to the ranks that waited for it
    return [rank.result() for rank in ranks]
