"""Which rows the ranks of an engine computed, as one number that adds up: no row twice, and none left out.

Rows of the steps that were shared out are numbered through, from 0. A rank's key is the sum, modulo 2^64, of a mixed
number for each of its rows; the sum of the ranks' keys is that of all rows exactly where each row has one owner (but
for collisions of a 64-bit hash).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def rows_key(first: int, pieces: Sequence[range]) -> int:
    """The sum over rows first + i for all i of the pieces, each mixed by splitmix64 (Steele, Lea, Flood 2014)."""
    rows = [np.arange(first + piece.start, first + piece.stop, dtype=np.uint64) for piece in pieces]
    z = (np.concatenate(rows) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((z ^ (z >> np.uint64(31))).sum(dtype=np.uint64))
