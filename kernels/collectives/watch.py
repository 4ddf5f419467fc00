"""A thread that looks at one arena's header: a wait in a stream has no timeout of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch

from rlk.kernels.collectives import arena
from rlk.kernels.collectives.arena import Layout
from rlk.kernels.collectives.cuda_memory import SideStream

log = logging.getLogger(__name__)
OPEN = 1 << 20
"""What a slot is set to when its rank is given up: no number of signals that a rank can be ahead."""


class Watch:
    """Ends a wait that lasts longer than `timeout_s`: notes who is missing and where, marks the arena as failed, and
    lets the stream go on, into a program that stops at that mark."""

    def __init__(
        self, name: str, rank: int, layout: Layout, header: int, timeout_s: float, stage: Callable[[int], str]
    ) -> None:
        self.name, self.rank, self.layout, self.header = name, rank, layout, header
        self.timeout_s, self.stage = timeout_s, stage
        self.error: str | None = None
        """Set once a wait was given up: rank and stage, for people."""
        self._words = torch.empty(layout.header_words, dtype=torch.int32, pin_memory=True)
        self._context = SideStream.here()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch {name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        side = SideStream(self._context)
        seen, since = (0, 0), time.monotonic()
        try:
            while not self._end.wait(min(1.0, self.timeout_s / 4)):
                words = side.read(self.header, self._words)
                now = words[arena.TURN], words[arena.DONE]
                if now[0] == now[1] or now != seen:
                    seen, since = now, time.monotonic()
                elif time.monotonic() - since > self.timeout_s:
                    self._give_up(side, words)
                    return
        except RuntimeError:  # the process's work on the device has failed; whoever asked for it is told by CUDA
            log.exception("%s: rank %d is no longer watched", self.name, self.rank)

    def _give_up(self, side: SideStream, words: list[int]) -> None:
        absent = arena.missing(words, self.layout, self.rank)
        who = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
        self.error = (
            f"{self.name}: rank {self.rank} of {self.layout.size} waited {self.timeout_s:g} s in "
            f"{self.stage(words[arena.STAGE])!r} and {who} did not come"
        )
        log.error("%s", self.error)
        side.write(self.header + 4 * arena.FAILED, 1)
        for p in absent:
            side.write(self.header + 4 * self.layout.slot(p), OPEN)
        side.wait()
