"""A thread that looks at how far the ranks of a group have come: a wait in a stream has no timeout of its own.

While it looks it makes no call of the CUDA driver. Another thread's copy to memory that is not pinned (`tolist`, `cpu`)
holds the driver's lock until the stream reaches it, that is for as long as the wait lasts. So the device itself writes
its progress to memory of the host, and each rank's watch passes it on to the others in a shared table.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from rlk.kernels.collectives.arena import READ, SIGNALLED, STAGE

log = logging.getLogger(__name__)
Words = npt.NDArray[np.int32]
Release = Callable[[list[int]], None]
Releasing = Callable[[], AbstractContextManager[Release]]
GRACE_S = 5.0
EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h: how a process ends whose driver cannot be reached any more."""


def end_process(message: str) -> None:
    """Ends this process at once: no thread of it that waits for the driver could be told."""
    log.critical("%s; the CUDA driver is locked by a copy that waits for it, so this process ends", message)
    sys.stderr.flush()
    os._exit(EXIT_CODE)


class Watch:
    """Ends a wait that lasts longer than `timeout_s`: notes in `error` who is missing and where, then releases it.

    own: int32 words SIGNALLED, READ and STAGE, written by the device. table: [ranks, 3], a row a rank, written by the
    ranks' watches. stage: the name of a number. releasing: gives, in a thread of its own, what lets the stream go on
    into a program that stops there; where that is not done within `grace_s`, `end` is called.
    """

    def __init__(
        self, name: str, rank: int, own: Words, table: Words, timeout_s: float, stage: Callable[[int], str],
        releasing: Releasing, *, grace_s: float = GRACE_S, end: Callable[[str], None] = end_process,
    ) -> None:  # fmt: skip
        self.name, self.rank, self.own, self.table = name, rank, own, table
        self.timeout_s, self.stage, self.grace_s, self.end = timeout_s, stage, grace_s, end
        self.error: str | None = None
        self._absent: list[int] = []
        self._stop, self._give_up, self._released = (threading.Event() for _ in range(3))
        self._threads = [
            threading.Thread(target=target, args=args, name=f"watch of {name}", daemon=True)
            for target, args in ((self._look, ()), (self._release, (releasing,)))
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the threads."""
        self._stop.set()
        self._give_up.set()
        for thread in self._threads:
            thread.join()

    def missing(self) -> list[int]:
        """The ranks that have signalled fewer turns than this one."""
        behind = self.table[:, SIGNALLED] - self.own[SIGNALLED]  # int32: counters wrap around
        return [int(p) for p in np.flatnonzero(behind < 0) if p != self.rank]

    def _look(self) -> None:
        seen, since = (0, 0), time.monotonic()
        while not self._stop.wait(min(1.0, self.timeout_s / 4)):
            self.table[self.rank] = self.own
            now = int(self.own[SIGNALLED]), int(self.own[READ])
            if now[0] == now[1] or now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self.timeout_s:
                self._end_wait()
                return

    def _end_wait(self) -> None:
        self._absent = self.missing()
        who = f"rank{'s' if len(self._absent) > 1 else ''} {', '.join(map(str, self._absent))} did not come"
        self.error = (
            f"{self.name}: rank {self.rank} of {len(self.table)} waited {self.timeout_s:g} s in "
            f"{self.stage(int(self.own[STAGE]))!r} and "
            f"{who if self._absent else 'the device does not go on, though every rank came'}"
        )
        log.error("%s", self.error)
        self._give_up.set()
        if not self._released.wait(self.grace_s):
            self.end(self.error)

    def _release(self, releasing: Releasing) -> None:
        with releasing() as release:
            self._give_up.wait()
            if self.error:
                release(self._absent)
                self._released.set()
