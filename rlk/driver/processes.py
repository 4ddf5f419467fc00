"""Which processes a run started, and their end. A process is known by pid and start time, so nobody else's is ever
touched."""

from __future__ import annotations

import logging
import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

import psutil

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owned:
    """One process that the run started."""

    pid: int
    started: float
    role: str

    def process(self) -> psutil.Process | None:
        """The process while it lives; None once it is gone, also if its pid was given to another."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 0.01
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


class Ledger:
    """The processes of a run, recorded as they appear below this one. Those that are there when it is made belong to
    whoever called."""

    def __init__(self) -> None:
        self._owned: dict[int, Owned] = {}
        self._others = set(psutil.Process().children())

    @property
    def owned(self) -> tuple[Owned, ...]:
        """All recorded processes by pid."""
        return tuple(self._owned[pid] for pid in sorted(self._owned))

    def name(self, pid: int, role: str) -> None:
        """Gives a process the role that it has in the run."""
        self._owned[pid] = Owned(pid, psutil.Process(pid).create_time(), role)

    def rename(self, old: Collection[str], new: str) -> None:
        """Gives every process of these roles another one."""
        for owned in self.owned:
            if owned.role in old:
                self._owned[owned.pid] = replace(owned, role=new)

    def record_children(self) -> None:
        """Adds every process that the run started and that is not recorded yet, under the name that it has."""
        for child in self._started():
            try:
                found = Owned(child.pid, child.create_time(), child.name())
            except psutil.NoSuchProcess:
                continue  # it ended between the listing and the question: nothing is left to own
            known = self._owned.get(found.pid)
            if known is None or known.started != found.started:
                self._owned[found.pid] = found

    def _started(self) -> Iterator[psutil.Process]:
        """What came below this process since, but for the helpers of Python's multiprocessing: a run has none, and
        they serve whatever else the process does."""
        for child in psutil.Process().children():
            try:
                if child in self._others or any("from multiprocessing." in word for word in child.cmdline()):
                    continue
                yield from (child, *child.children(recursive=True))
            except psutil.NoSuchProcess:
                continue

    def end_all(self, timeout_s: float) -> list[Owned]:
        """Asks what still lives to end, waits, then kills what is left; returns those that had to be killed."""
        living = {owned: process for owned in self.owned if (process := owned.process()) is not None}
        for process in living.values():
            process.terminate()  # Ray's own helpers would otherwise take 10 s to notice that their head is gone
        psutil.wait_procs(list(living.values()), timeout=timeout_s)
        killed = []
        for owned in living:
            process = owned.process()
            if process is not None:
                log.warning("killing %s, pid %d: it did not end within %g s", owned.role, owned.pid, timeout_s)
                process.kill()
                killed.append(owned)
        psutil.wait_procs([process for owned in killed if (process := owned.process()) is not None], timeout=timeout_s)
        return killed


@contextmanager
def interruptible() -> Iterator[None]:
    """A polite end (SIGTERM) is an interrupt meanwhile: processes are ended and the evidence is sealed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """Raises TimeoutError in the main thread once `seconds` are over; None is no limit."""

    def over(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{what}: not done within {seconds:g} s")

    if seconds is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
