"""The flags of an arena lose no signal and no half is overwritten while a peer may still read it, in any interleaving.

The protocol is played by two and three ranks over every order of their steps, four turns long: enough for each half to
be used twice. Its twins must fail: one half alone, and flags that are set and cleared instead of counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from rlk.kernels.collectives import arena
from rlk.kernels.collectives.arena import BLOCK_BYTES, Layout

TURNS = 4


@dataclass(frozen=True)
class State:
    """Of all ranks: the next step (turn * 4 + step), what each half holds, and the slots [receiver][sender]."""

    at: tuple[int, ...]
    halves: tuple[tuple[int, ...], ...]
    slots: tuple[tuple[int, ...], ...]


def play(size: int, *, halves: int = 2, counted: bool = True) -> str | None:
    """Every reachable state; what went wrong in one of them, or None."""
    start = State((0,) * size, ((-1,) * halves,) * size, ((0,) * size,) * size)
    open_states, seen = [start], {start}
    while open_states:
        state = open_states.pop()
        if min(state.at) == 4 * TURNS:
            continue
        following = [s for rank in range(size) if (s := step(state, rank, halves, counted)) is not None]
        if not following:
            return "nobody can go on"
        for s in following:
            if isinstance(s, str):
                return s
            if s not in seen:
                seen.add(s)
                open_states.append(s)
    return None


def step(state: State, rank: int, halves: int, counted: bool) -> State | str | None:
    """The state after the rank's next step; None while it waits."""
    if state.at[rank] == 4 * TURNS:
        return None
    turn, what = divmod(state.at[rank], 4)
    peers = [p for p in range(len(state.at)) if p != rank]
    slots, held = [list(row) for row in state.slots], [list(row) for row in state.halves]
    if what == 0:
        held[rank][turn % halves] = turn
    elif what == 1:
        for p in peers:
            slots[p][rank] = slots[p][rank] + 1 if counted else 1
    elif what == 2:
        if any(slots[rank][p] < 1 for p in peers):
            return None
        for p in peers:
            slots[rank][p] = slots[rank][p] - 1 if counted else 0
    elif any(held[p][turn % halves] != turn for p in peers):
        return f"rank {rank} reads a half of turn {turn} that holds another"
    at = tuple(a + (r == rank) for r, a in enumerate(state.at))
    return replace(state, at=at, halves=tuple(map(tuple, held)), slots=tuple(map(tuple, slots)))


@pytest.mark.parametrize("size", [2, 3])
def test_no_order_of_steps_loses_a_signal_or_a_half(size: int) -> None:
    assert play(size) is None


def test_one_half_alone_is_overwritten() -> None:
    assert str(play(2, halves=1)).startswith("rank 0 reads a half")


def test_flags_that_are_set_and_cleared_lose_a_signal() -> None:
    assert play(2, counted=False) == "nobody can go on"


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("pieces", [1, 8])
def test_parts_of_a_turn_stay_within_their_half_and_cover_everything(size: int, pieces: int) -> None:
    layout = Layout(size, BLOCK_BYTES)
    assert arena.HEADER_BYTES + 2 * layout.half <= layout.total
    assert pieces * layout.chunk(pieces) <= layout.half
    assert layout.chunk(pieces) % 16 == layout.half % 16 == 0, "wide accesses need it"
    for piece in (1, 4096, layout.chunk(pieces), layout.chunk(pieces) + 2, 3 * layout.half):
        parts = list(layout.chunks(piece, pieces))
        assert sum(length for _, length in parts) == piece
        assert [offset for offset, _ in parts] == [i * layout.chunk(pieces) for i in range(len(parts))]


def test_slots_lie_within_the_header_apart_from_the_counters() -> None:
    layout = Layout(8, BLOCK_BYTES)
    words = [arena.TURN, arena.FAILED, *map(layout.slot, range(8))]
    assert len(set(words)) == 10
    assert 4 * max(words) < arena.HEADER_BYTES


@pytest.mark.parametrize(("size", "total", "words"), [(3, 2 << 20, "3 ranks"), (2, 3 << 20, "3145728 bytes")])
def test_other_arenas_are_refused(size: int, total: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Layout(size, total)
