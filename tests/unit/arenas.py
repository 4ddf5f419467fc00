"""Ranks of an arena collective as threads of one process, whose arenas are CPU tensors: the real programs, interpreted.

Only in a process that interprets Triton (tests.unit.interpreted). A device's wait becomes a look at the own slots.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from unittest import mock

import torch

from rlk.kernels.collectives.arena import BLOCK_BYTES, HEADER_BYTES, PROGRESS_WORDS, Layout
from rlk.kernels.collectives.turns import ArenaCollective
from rlk.kernels.cuda import launch

T = TypeVar("T")
WAIT_S = 60


def on_arenas(size: int, work: Callable[[ArenaCollective], T]) -> list[T]:
    """work(collective) on `size` threads with arenas of 2 MiB; results in rank order."""
    layout = Layout(size, BLOCK_BYTES)
    arenas = [torch.zeros(layout.total, dtype=torch.uint8) for _ in range(size)]
    addresses = [a.data_ptr() for a in arenas]
    one_at_a_time, run = threading.Lock(), launch.run

    def locked(*args: Any, **constants: Any) -> None:
        with one_at_a_time:  # the interpreter changes its module while a program runs
            run(*args, **constants)

    def rank_of(rank: int) -> T:
        header = arenas[rank][:HEADER_BYTES].view(torch.int32)
        slots = [layout.slot(p) for p in range(size) if p != rank]

        def wait() -> None:
            end = time.monotonic() + WAIT_S
            while int(header[slots].min()) < 1:
                assert time.monotonic() < end, f"rank {rank} waited {WAIT_S} s, slots {header[slots].tolist()}"
                time.sleep(0.0005)

        progress = torch.zeros(PROGRESS_WORDS, dtype=torch.int32)
        return work(ArenaCollective("test", rank, layout, arenas[rank], progress, addresses, wait))

    with mock.patch.object(launch, "run", locked), ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_of, range(size)))
