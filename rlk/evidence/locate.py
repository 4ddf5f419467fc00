"""Finds the first op, in program order, on which ranks that computed the same rows do not agree.

An op reads only what earlier ops returned for this position and earlier ones, so the first op that differs is where a
difference began, and each of its differing rows is an origin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlk.evidence.arrays import I64
from rlk.evidence.element import element
from rlk.evidence.place import Place, Side, Word
from rlk.evidence.probe import U64
from rlk.evidence.program import STATES, Kept, Op, replicated
from rlk.evidence.samples import token_keys, token_of


@dataclass
class Search:
    """Looks at op after op and keeps the first disagreement. `rows` counts the rows that the first side and another
    have, `wrong` those of the first differing op that differ, `later` the ops after it that differ too. `element` says
    more where the raw row was kept."""

    place: Place | None = None
    rows: int = 0
    wrong: int = 0
    later: int = 0
    element: str | None = None

    def op(self, op: Op, sides: Sequence[Side]) -> int:
        """Compares one op over all sides; returns how many of its rows the first side and another have."""
        compared, wrong, place = 0, set[int](), None
        for shard in range(8) if op.sharded else (None,):
            table = _Table.of(_rows(op, sides, shard))
            compared = max(compared, table.shared)
            wrong |= set(table.wrong.tolist())
            key = table.first
            if key is not None and (place is None or (key,) < (place[0],)):
                place = key, shard, table.words(key, op.kept)
        self.rows += compared
        if place is not None:
            sample, position = token_of(place[0])
            found = Place(op.name, place[1], sample, position, None, *place[2])
            self._found(found, len(wrong), None if self.place else element(found, sides))
        return compared

    def atoms(self, name: str, parameter: str, sides: Sequence[Side]) -> None:
        """Compares one state of the optimizer for one parameter, atom by atom."""
        table = _Table.of(_atoms(f"optimizer/{name}/{parameter}", parameter, sides))
        self.rows += table.shared
        if table.first is not None:
            shard, piece = divmod(table.first, 8)
            whole = replicated(parameter)
            words = table.words(table.first)
            place = Place(f"{name} of {parameter}", None if whole else shard, None, None, piece, *words)
            self._found(place, len(table.wrong), None)

    def _found(self, place: Place, wrong: int, element: str | None) -> None:
        if self.place is None:
            self.place, self.wrong, self.element = place, wrong, element
        else:
            self.later += 1

    def __str__(self) -> str:
        if self.place is None:
            return f"no op differs in {self.rows} rows"
        row = f"; {self.element}" if self.element else ""
        return f"{self.place} [{self.wrong} rows of this op, and {self.later} later ops]{row}"


@dataclass(frozen=True)
class _Part:
    """Rows of one rank: keys and words, and which side it belongs to."""

    side: int
    source: str
    key: I64
    word: U64


@dataclass(frozen=True)
class _Table:
    """All rows of one op (and shard), sorted by key. `start` is where each distinct key begins."""

    sources: tuple[str, ...]
    key: I64
    word: U64
    source: I64
    start: I64
    shared: int
    wrong: I64

    @classmethod
    def of(cls, parts: Iterable[_Part]) -> _Table:
        kept = list(parts)
        key = np.concatenate([np.empty(0, np.int64), *(p.key for p in kept)])
        word = np.concatenate([np.empty(0, np.uint64), *(p.word for p in kept)])
        source = np.repeat(np.arange(len(kept)), [len(p.key) for p in kept]).astype(np.int64)
        order = np.lexsort((source, key))
        key, word, source = key[order], word[order], source[order]
        start = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else np.empty(0, np.int64)
        if not len(start):
            return cls((), key, word, source, start, 0, key)
        side = np.array([p.side for p in kept])[source]
        shared = (np.minimum.reduceat(side, start) == 0) & (np.maximum.reduceat(side, start) > 0)
        wrong = np.maximum.reduceat(word, start) != np.minimum.reduceat(word, start)
        names = tuple(p.source for p in kept)
        return cls(names, key, word, source, start, int(shared.sum()), key[start[wrong]])

    @property
    def first(self) -> int | None:
        """The lowest key on which words differ."""
        return int(self.wrong[0]) if len(self.wrong) else None

    def words(self, key: int, kept: Kept | None = None) -> tuple[Word, Word]:
        """The word that most ranks have for a key, and the first other one."""
        rows = slice(int(np.searchsorted(self.key, key)), int(np.searchsorted(self.key, key, side="right")))
        found: dict[int, list[str]] = {}
        for word, source in zip(self.word[rows].tolist(), self.source[rows].tolist(), strict=True):
            names = found.setdefault(word, [])
            if self.sources[source] not in names:
                names.append(self.sources[source])
        # Ranks vote, not passes: one rank that was wrong in two passes is still one.
        common, odd, *_ = sorted(found.items(), key=lambda item: -len({name.split(" ")[-1] for name in item[1]}))
        return Word(tuple(common[1]), common[0], kept), Word(tuple(odd[1]), odd[0], kept)


def _rows(op: Op, sides: Sequence[Side], shard: int | None) -> Iterator[_Part]:
    """What every rank that holds the shard (all ranks, for an op that is not sharded) recorded of an op."""
    for number, side in enumerate(sides):
        for probe in side.probes:
            sample, position, words = probe.rows(side.phase, op)
            column = 0 if shard is None else shard - probe.shard0
            if 0 <= column < words.shape[1]:
                yield _Part(number, f"{side.name} {probe.role}", token_keys(sample, position), words[:, column])


def _atoms(name: str, parameter: str, sides: Sequence[Side]) -> Iterator[_Part]:
    for number, side in enumerate(sides):
        for probe in side.probes:
            words = probe.arrays[name]
            shards = np.arange(words.shape[0]) + (0 if replicated(parameter) else probe.shard0)
            keys = shards[:, None] * 8 + probe.piece0 + np.arange(words.shape[1])
            yield _Part(number, f"{side.name} {probe.role}", keys.ravel().astype(np.int64), words.ravel())


def search_states(search: Search, sides: Sequence[Side], names: Iterable[str]) -> None:
    """Compares every input and output of the optimizer, in program order."""
    parameters = tuple(names)
    for state in STATES:
        for parameter in parameters:
            search.atoms(state, parameter, sides)
