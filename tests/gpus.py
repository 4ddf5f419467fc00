"""Leases of GPUs: a cell takes its GPUs out of the caller's visible list, and no two cells have one at a time.

A lock file a GPU, by UUID, in one folder of this user on this machine: xdist's workers and other pytest sessions see
the same files, whatever their visible lists are, and a process that dies gives its locks back.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from rlk.driver.gpus import VISIBLE, Gpu, visible_gpus
from rlk.plan.profile import Profile

WORKERS = "PYTEST_XDIST_WORKER_COUNT"
POLL_S = 0.2
WAIT_S = 3600


class LeaseError(RuntimeError):
    """There are not enough GPUs, or they were not free in time; the message has both counts."""


def folder() -> Path:
    """Where this user's lock files are."""
    return Path(tempfile.gettempdir()) / f"rlk-gpu-leases-{os.getuid()}"


def share(profile: Profile, there: int, env: Mapping[str, str]) -> int:
    """How many of `there` GPUs one cell takes: what its profile says, else this worker's even share, at least one."""
    return profile.gpus or profile.gpus_of(max(1, there // int(env.get(WORKERS, "1"))))


@contextmanager
def lease_for(profile: Profile, env: MutableMapping[str, str]) -> Iterator[tuple[Gpu, ...]]:
    """A lease of what a session of this profile takes; waits for other cells as long as those may take."""
    found = visible_gpus(env)
    with lease(share(profile, len(found), env), found, env, folder(), WAIT_S) as taken:
        yield taken


@contextmanager
def lease(
    count: int, found: Sequence[Gpu], env: MutableMapping[str, str], locks: Path, timeout_s: float
) -> Iterator[tuple[Gpu, ...]]:
    """Takes `count` of `found` and makes them the visible list of `env` meanwhile.

    All at once or none, so that two cells can never wait for each other's.

    Raises:
        LeaseError: there are fewer, or fewer than `count` were free within `timeout_s`.
    """
    if len(found) < count:
        raise LeaseError(f"{count} GPUs are needed, {len(found)} are visible")
    locks.mkdir(exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with ExitStack() as held:
        while len(taken := _take(count, found, locks, held)) < count:
            if time.monotonic() > deadline:
                raise LeaseError(
                    f"{count} GPUs are needed, {len(taken)} of {len(found)} were free within {timeout_s:g} s"
                )
            time.sleep(POLL_S)
        before = env.get(VISIBLE)
        env[VISIBLE] = ",".join(gpu.uuid for gpu in taken)
        try:
            yield taken
        finally:
            if before is None:
                del env[VISIBLE]
            else:
                env[VISIBLE] = before


def _take(count: int, found: Sequence[Gpu], locks: Path, held: ExitStack) -> tuple[Gpu, ...]:
    """The free ones of `found`, up to `count`, whose locks `held` then has; locks of fewer are given back at once."""
    with ExitStack() as tried:
        free: list[Gpu] = []
        for gpu in found:
            try:
                tried.enter_context(FileLock(locks / f"{gpu.uuid}.lock", timeout=0))
            except Timeout:
                continue
            free.append(gpu)
            if len(free) == count:
                held.push(tried.pop_all())
                break
        return tuple(free)
