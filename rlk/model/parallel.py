"""Which shards and slices of the virtual machine a rank owns, and the groups it exchanges them with."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlk.kernels.collectives.base import Alone, Collective
from rlk.kernels.tree import VIRTUAL


@dataclass(frozen=True)
class ParallelContext:
    """One rank's place. A rank owns VIRTUAL / size adjacent virtual shards (tensor parallel) and slices (context
    parallel)."""

    tp: Collective = field(default_factory=Alone)
    cp: Collective = field(default_factory=Alone)

    def __post_init__(self) -> None:
        for name, group in (("tensor", self.tp), ("context", self.cp)):
            if group.size not in (1, 2, 4, 8):
                raise ValueError(f"{name}-parallel size {group.size}: allowed are 1, 2, 4 and 8")

    @property
    def shards(self) -> range:
        """Virtual shards held here."""
        return self._owned(self.tp)

    @property
    def slices(self) -> range:
        """Virtual slices held here; also the pieces of each shard whose optimizer state is held here."""
        return self._owned(self.cp)

    @staticmethod
    def _owned(group: Collective) -> range:
        n = VIRTUAL // group.size
        return range(group.rank * n, (group.rank + 1) * n)
