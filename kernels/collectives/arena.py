"""Where things lie in one rank's arena, and the protocol of its flags: plain numbers, no device.

An arena is a header of 32-bit words and two halves of data that take turns. In turn k every rank

1. writes its contribution to its own half k mod 2,
2. adds 1 to TURN, and to its slot in every peer's header (release, system scope),
3. waits until every slot of its own header is at least 1, then takes 1 from each,
4. reads the peers' halves k mod 2.

Slots count instead of being set and cleared: a peer may signal turn k + 1 before this rank has taken turn k. No half is
overwritten too early: a rank writes turn k + 2 after its wait of turn k + 1, so after every peer's signal of k + 1,
which comes after that peer's reads of turn k. Nothing in this depends on a number known to the host, so a captured
graph can be replayed any number of times between other turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

TURN, FAILED = range(2)
"""Words of a header: turns signalled, and whether a wait was given up."""
SIGNALLED, READ, STAGE = range(3)
"""Words of a rank's progress, which its device writes to the host's memory: turns signalled, turns that it has gone on
to read, and the stage of the last signal."""
PROGRESS_WORDS = 3
FIRST_SLOT, SLOT_WORDS = 32, 32
"""Slots lie 128 bytes apart: each has another writer."""
HEADER_BYTES = 4096
BLOCK_BYTES = 2 << 20
"""What the driver hands out at a time: an allocation smaller than that would share, and export, its neighbours."""
ALIGNED = 128
RANKS = (2, 4, 8)


@dataclass(frozen=True)
class Layout:
    """An arena of `total` bytes in a group of `size` ranks.

    Raises:
        ValueError: the group is of another size than 2, 4 or 8, or the arena is no multiple of 2 MiB.
    """

    size: int
    total: int

    def __post_init__(self) -> None:
        if self.size not in RANKS:
            raise ValueError(f"a group of {self.size} ranks: an arena serves 2, 4 or 8")
        if self.total < BLOCK_BYTES or self.total % BLOCK_BYTES:
            raise ValueError(f"an arena of {self.total} bytes: allowed are multiples of {BLOCK_BYTES}")

    @property
    def half(self) -> int:
        """Bytes of one half."""
        return (self.total - HEADER_BYTES) // 2 // ALIGNED * ALIGNED

    def slot(self, rank: int) -> int:
        """The word that `rank` counts its signals in."""
        return FIRST_SLOT + rank * SLOT_WORDS

    def chunk(self, pieces: int) -> int:
        """Bytes of each of `pieces` pieces that one turn moves."""
        return self.half // pieces // ALIGNED * ALIGNED

    def chunks(self, piece: int, pieces: int) -> Iterator[tuple[int, int]]:
        """Offset and length, in bytes, of what each turn moves of `pieces` pieces of `piece` bytes."""
        step = self.chunk(pieces)
        for offset in range(0, piece, step):
            yield offset, min(step, piece - offset)
