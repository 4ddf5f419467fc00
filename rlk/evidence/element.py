"""The element behind a differing fingerprint, where a second run was asked to keep the raw row (`--probe-row`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlk.evidence.bits import show
from rlk.evidence.place import Place, Side, Word
from rlk.evidence.probe import Probe


def element(place: Place, sides: Sequence[Side]) -> str | None:
    """The first element of the row that differs between the two words of a place, as a sentence; None where one of the
    two ranks kept no raw row of this op."""
    left, right = _row(place, place.odd, sides), _row(place, place.common, sides)
    if left is None or right is None or left.shape != right.shape:
        return None
    wrong = np.flatnonzero(left != right)
    if not len(wrong):
        return None
    at = int(wrong[0])
    values = [_value(word[at], place.op) for word in (left, right)]
    said = f"{place.odd.sources[0]} {values[0]}, {place.common.sources[0]} {values[1]}"
    return f"element {at} of {len(left)}: {said} [{len(wrong)} elements of the row]"


def _row(place: Place, word: Word, sides: Sequence[Side]) -> NDArray[np.unsignedinteger] | None:
    """The words of the place's shard (of the whole row, for an op that is not cut) that the first holder kept."""
    every = ((side, probe) for side in sides for probe in side.probes)
    side, probe = next(one for one in every if one[0].source(one[1]) == word.sources[0])
    kept = probe.arrays.get(f"row/{side.phase}/{place.op}")
    if kept is None or not len(kept):
        return None
    return _shard(kept[-1], place, side, probe)


def _shard(row: NDArray[np.unsignedinteger], place: Place, side: Side, probe: Probe) -> NDArray[np.unsignedinteger]:
    if place.shard is None:
        return row
    shards = probe.arrays[f"{side.phase}/{place.op}"].shape[1]
    mine: NDArray[np.unsignedinteger] = row.reshape(shards, -1)[place.shard - probe.shard0]
    return mine


def _value(word: np.unsignedinteger, op: str) -> str:
    """A bf16 or fp32 word as its value and its bits; a word of settings or of a key, which have more kinds, as bits."""
    if op in ("settings", "key"):
        return f"0x{int(word):08x}"
    size = word.dtype.itemsize
    wide = np.uint32(int(word) << 32 - 8 * size)
    return f"{show(wide.view(np.float32))} 0x{int(word):0{2 * size}x}"
