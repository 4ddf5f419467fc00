"""A wait that lasts too long is given up, by rank and stage; one that goes on is not; no process is left hanging.

Ranks are rows of a table in this process; a timeout is a fifth of a second, looked at four times as often, or two
seconds where steps must surely be shorter than it on a busy machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

from rlk.kernels.collectives.arena import READ, SIGNALLED, STAGE
from rlk.kernels.collectives.watch import Release, Watch

TIMEOUT_S, STAGES = 0.2, ("layers.0.o", "layers.3.down")


class Group:
    """A watch of rank 1 of 4, what it released, and how it ended the process."""

    def __init__(self, release: Release | None, timeout_s: float) -> None:
        self.own, self.table = np.zeros(3, np.int32), np.zeros((4, 3), np.int32)
        self.released: list[list[int]] = []
        self.ended: list[str] = []
        self.watch = Watch(
            "tensor parallel group", 1, self.own, self.table, timeout_s, lambda i: STAGES[i],
            lambda: nullcontext(release or self.released.append), grace_s=0.2, end=self.ended.append,
        )  # fmt: skip

    def until_given_up(self) -> str:
        end = time.monotonic() + 20
        while not (self.watch.error and (self.released or self.ended)):
            assert time.monotonic() < end, "nobody gave up"
            time.sleep(0.01)
        return self.watch.error


@contextmanager
def group(release: Release | None = None, timeout_s: float = TIMEOUT_S) -> Iterator[Group]:
    g = Group(release, timeout_s)
    try:
        yield g
    finally:
        g.watch.stop()


@pytest.mark.parametrize(
    ("turns", "absent", "who"),
    [([7, 0, 7, 6], [3], "rank 3 did not come"), ([6, 0, 8, 5], [0, 3], "ranks 0, 3 did not come")],
)
def test_the_missing_ranks_and_the_stage_are_named(turns: list[int], absent: list[int], who: str) -> None:
    with group() as g:
        g.table[:, SIGNALLED] = turns
        g.own[[SIGNALLED, READ, STAGE]] = 7, 6, 1
        words = f"tensor parallel group: rank 1 of 4 waited 0.2 s in 'layers.3.down' and {who}"
        assert g.until_given_up() == words
        assert g.released == [absent]
        assert g.ended == []
        assert g.table[1].tolist() == [7, 6, 1], "what the others see of this rank"


def test_counters_may_wrap_around() -> None:
    with group() as g:
        g.table[:, SIGNALLED] = [-(2**31), 0, 2**31 - 1, -(2**31)]
        g.own[[SIGNALLED, READ]] = -(2**31), 2**31 - 1
        assert g.until_given_up().endswith("rank 2 did not come")


def test_a_device_that_stops_though_all_came_is_said_so() -> None:
    with group() as g:
        g.table[:, SIGNALLED] = 1
        g.own[SIGNALLED] = 1
        assert g.until_given_up().endswith("the device does not go on, though every rank came")


def test_a_rank_that_goes_on_is_let_be() -> None:
    with group(timeout_s=2.0) as g:
        for turn in range(1, 12):  # longer than the timeout, a turn in an eighth of it
            g.own[[SIGNALLED, READ]] = turn, turn - 1
            time.sleep(0.25)
        assert g.watch.error is None


def test_a_rank_that_waits_for_nobody_is_let_be() -> None:
    with group() as g:
        g.own[[SIGNALLED, READ]] = 8, 8
        time.sleep(3 * TIMEOUT_S)
        assert g.watch.error is None


def test_a_process_whose_driver_is_locked_is_ended() -> None:
    unlocked = threading.Event()
    with group(lambda absent: void(unlocked.wait(20))) as g:
        g.table[:, SIGNALLED] = [1, 0, 1, 0]
        g.own[SIGNALLED] = 1
        assert g.until_given_up() == g.ended[0]
        assert g.ended[0].endswith("in 'layers.0.o' and rank 3 did not come")
        unlocked.set()


def void(_: object) -> None:
    """Drops a value."""
