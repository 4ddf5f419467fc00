"""Where ranks that computed the same row do not agree, and who has which word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlk.evidence.probe import Probe


@dataclass(frozen=True)
class Side:
    """What some ranks recorded in one phase. `name` stands before their roles, as `score` or a run's name."""

    name: str
    phase: str
    probes: Sequence[Probe]


@dataclass(frozen=True)
class Word:
    """One fingerprint and everyone who has it: side and role."""

    sources: tuple[str, ...]
    value: int

    def __str__(self) -> str:
        more = f" and {len(self.sources) - 1} more" if len(self.sources) > 1 else ""
        return f"{self.sources[0]}{more} 0x{self.value:016x}"


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

    def __str__(self) -> str:
        shard = "" if self.shard is None else f" shard {self.shard}"
        where = f" piece {self.piece}" if self.sample is None else f" sample {self.sample} position {self.position}"
        return f"{self.op}{shard}{where}: {self.odd}, {self.common}"
