"""The transport is the one that was named, and what a process says of it is read from its live groups."""

from __future__ import annotations

import pytest

from rlk.kernels.collectives.base import Alone, CollectiveTimeoutError
from rlk.kernels.collectives.connect import arena_bytes, connect, disconnect, settle, transport_of
from rlk.kernels.collectives.staged import HostStaged
from tests.unit.ranks import ThreadCollective, _Meeting


def test_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="transport 'nccl': allowed is shared-memory or host-staged or cuda-ipc"):
        connect("nccl", None, "a group", 1.0)  # type: ignore[arg-type]  # refused before the group is looked at


def test_live_groups_name_their_transport() -> None:
    staged = HostStaged(Alone())
    assert transport_of(Alone(), Alone()) == "none"
    assert transport_of(staged, Alone()) == "host-staged"
    with pytest.raises(ValueError, match="host-staged"):
        transport_of(staged, ThreadCollective(_Meeting(1), 0))


def test_what_a_group_holds_is_given_back_once() -> None:
    closed: list[str] = []

    class Holding(Alone):
        def close(self) -> None:
            closed.append("closed")

    disconnect(Alone(), Holding())
    assert closed == ["closed"]


def test_only_a_devices_arenas_are_counted() -> None:
    class OnDevice(Alone):
        def describe(self) -> dict[str, object]:
            return {"arena_bytes": 64 << 20}

    assert arena_bytes(Alone(), HostStaged(Alone())) == 0
    assert arena_bytes(OnDevice(), OnDevice()) == 128 << 20


class _OnDevice(Alone):
    """A group whose device stops when any group's wait was given up."""

    waited = 0
    error: str | None = None
    device_error: str | None = None

    def settle(self) -> None:
        self.waited += 1
        if self.device_error:
            raise RuntimeError(self.device_error)
        self.check()

    def check(self) -> None:
        if self.error:
            raise CollectiveTimeoutError(self.error)


def test_settling_waits_for_every_group_of_a_device() -> None:
    first, second = _OnDevice(), _OnDevice()
    settle(first, Alone(), second)
    assert (first.waited, second.waited) == (1, 1)


def test_the_group_whose_rank_stayed_away_is_named() -> None:
    first, second = _OnDevice(), _OnDevice()
    first.device_error, second.error = "unspecified launch failure", "context parallel group: rank 3 did not come"
    with pytest.raises(CollectiveTimeoutError, match="rank 3 did not come"):
        settle(first, second)
    second.error = None
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        settle(first, second)
