"""Two cells never have one GPU at a time, whatever their visible lists; all that is asked for, or nothing, is taken.

Two and three processes on made-up GPUs, since a lock that one process holds proves nothing about another.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlk.driver.gpus import VISIBLE, Gpu, visible_gpus
from tests.gpus import LeaseError, lease, share
from tests.plugin import ROOT
from tests.unit.nvml import devices, library
from tests.unit.tiny import profile

HOLD = """
import sys
from pathlib import Path
from rlk.driver.gpus import VISIBLE, visible_gpus
from tests.gpus import lease
from tests.unit.nvml import devices, library
env = {VISIBLE: sys.argv[2]}
with lease(int(sys.argv[3]), visible_gpus(env, library(devices(4))), env, Path(sys.argv[1]), 20):
    sys.stdout.write(env[VISIBLE] + chr(10))
    sys.stdout.flush()
    sys.stdin.readline()
"""


def gpus(count: int = 4) -> tuple[Gpu, ...]:
    return visible_gpus({}, library(devices(count)))


class Holder:
    """Another process that leases and holds until it is told to go."""

    def __init__(self, locks: Path, visible: str, count: int) -> None:
        command = [sys.executable, "-c", HOLD, str(locks), visible, str(count)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(ROOT)}
        )
        self.has: set[str] = set()

    def wait(self) -> Holder:
        assert self.process.stdout is not None
        self.has = set(self.process.stdout.readline().strip().split(","))
        return self

    def go(self) -> None:
        self.process.communicate("\n")


def test_two_processes_get_different_gpus(tmp_path: Path) -> None:
    first, second = Holder(tmp_path, "0,1,2,3", 2), Holder(tmp_path, "0,1,2,3", 2)
    try:
        assert len(first.wait().has) == len(second.wait().has) == 2
        assert first.has.isdisjoint(second.has)
    finally:
        first.go()
        second.go()


def test_lease_waits_until_enough_are_free(tmp_path: Path) -> None:
    holder = Holder(tmp_path, "1,2", 2).wait()
    env: dict[str, str] = {}
    with pytest.raises(LeaseError, match=r"^3 GPUs are needed, 2 of 4 were free within 0\.1 s$"):  # noqa: SIM117
        with lease(3, gpus(), env, tmp_path, 0.1):
            pytest.fail("it took a GPU that another process holds")
    assert env == {}
    holder.go()
    with lease(3, gpus(), env, tmp_path, 20) as taken:
        assert [gpu.index for gpu in taken] == [0, 1, 2]


def test_failed_lease_gives_back_what_it_took(tmp_path: Path) -> None:
    holder = Holder(tmp_path, "3", 1).wait()
    with pytest.raises(LeaseError), lease(4, gpus(), {}, tmp_path, 0):
        pytest.fail("three of four are no lease")
    other = Holder(tmp_path, "0,1,2", 3).wait()
    assert len(other.has) == 3
    holder.go()
    other.go()


def test_process_that_dies_gives_its_gpus_back(tmp_path: Path) -> None:
    holder = Holder(tmp_path, "0,1,2,3", 4).wait()
    holder.process.kill()
    holder.process.wait()
    start = time.monotonic()
    with lease(4, gpus(), {}, tmp_path, 20):
        assert time.monotonic() - start < 10


def test_lease_is_the_visible_list_and_the_old_one_comes_back(tmp_path: Path) -> None:
    env = {VISIBLE: "3,1"}
    found = visible_gpus(env, library(devices(4)))
    with lease(1, found, env, tmp_path, 0):
        assert env == {VISIBLE: found[0].uuid}
        assert [gpu.index for gpu in visible_gpus(env, library(devices(4)))] == [3]
    assert env == {VISIBLE: "3,1"}


def test_more_than_are_visible_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(LeaseError, match=r"^8 GPUs are needed, 4 are visible$"), lease(8, gpus(), {}, tmp_path, 60):
        pytest.fail("there are four")


@pytest.mark.parametrize(
    ("asked", "there", "workers", "taken"),
    [(None, 8, 1, 8), (None, 8, 2, 4), (None, 2, 4, 1), (8, 8, 2, 8), (1, 8, 1, 1)],
)
def test_workers_share_the_gpus_evenly(asked: int | None, there: int, workers: int, taken: int) -> None:
    env = {"PYTEST_XDIST_WORKER_COUNT": str(workers)}
    assert share(profile(device="cuda", gpus=asked), there, env) == taken
