"""Where ranks that computed the same row do not agree, and who has which word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlk.evidence.bits import hex_word, show
from rlk.evidence.probe import Probe
from rlk.evidence.program import Kept


@dataclass(frozen=True)
class Side:
    """What some ranks recorded in one phase. `name` stands before their roles, as `score` or a run's name."""

    name: str
    phase: str
    probes: Sequence[Probe]

    def source(self, probe: Probe) -> str:
        """Who says what one of its ranks recorded."""
        return f"{self.name} {probe.role}"


@dataclass(frozen=True)
class Word:
    """One fingerprint, or one kept value, and everyone who has it: side and role."""

    sources: tuple[str, ...]
    value: int
    kept: Kept | None = None

    @property
    def said(self) -> str:
        """A fingerprint in hex, an integer as it is, an fp32 value and its word."""
        if self.kept == "integer":
            return str(self.value)
        if self.kept == "fp32":
            value = np.uint32(self.value).view(np.float32)
            return f"{show(value)} {hex_word(value)}"
        return f"0x{self.value:016x}"

    def __str__(self) -> str:
        more = f" and {len(self.sources) - 1} more" if len(self.sources) > 1 else ""
        return f"{self.sources[0]}{more} {self.said}"


@dataclass(frozen=True)
class Place:
    """Where ranks disagree. `common` is the word that most ranks have, `odd` the first other; where as many have either
    (one owner of a shard on each side), `common` is that of the first side, and either may be wrong. For an atom of
    the optimizer `sample` and `position` are None and `piece` is set."""

    op: str
    shard: int | None
    sample: int | None
    position: int | None
    piece: int | None
    common: Word
    odd: Word

    @property
    def row(self) -> str:
        """The row as `--probe-row` names it."""
        return f"{self.op}@{self.sample}/{self.position}"

    def __str__(self) -> str:
        shard = "" if self.shard is None else f" shard {self.shard}"
        where = f" piece {self.piece}" if self.sample is None else f" sample {self.sample} position {self.position}"
        return f"{self.op}{shard}{where}: {self.odd}, {self.common}"
