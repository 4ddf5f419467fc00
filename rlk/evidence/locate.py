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
from rlk.evidence.probe import U64, Probe
from rlk.evidence.program import STATES, Kept, Op, backward, forward, parameters, replicated
from rlk.evidence.samples import token_keys, token_of
from rlk.plan.derive import Plan
from rlk.plan.topology import VIRTUAL


@dataclass
class Search:
    """Looks at op after op and keeps the first disagreement. `rows` counts the rows that the first side and another
    have, `wrong` those of the first differing op that differ, `later` the ops after it that differ too. `kept` is
    the row whose raw words were kept, as `--probe-row` names it: `element` says more where the first disagreement is
    there."""

    kept: str | None = None
    place: Place | None = None
    rows: int = 0
    wrong: int = 0
    later: int = 0
    element: str | None = None

    def op(self, op: Op, sides: Sequence[Side]) -> int:
        """Compares one op over all sides; returns how many of its rows the first side and another have."""
        table = _Table.of(_rows(op, sides))
        # Ranks may hold some shards of a row only: a row counts as often as the shard that most rows share.
        compared = int(np.bincount(table.shared % VIRTUAL).max(initial=0))
        self.rows += compared
        if table.first is not None:
            token, shard = divmod(table.first, VIRTUAL)
            sample, position = token_of(token)
            words = table.words(table.first, op.kept)
            place = Place(op.name, shard if op.sharded else None, sample, position, None, *words)
            wrong = len(np.unique(table.wrong // VIRTUAL))
            self._found(place, wrong, element(place, sides) if place.row == self.kept else None)
        return compared

    def atoms(self, name: str, parameter: str, sides: Sequence[Side]) -> None:
        """Compares one state of the optimizer for one parameter, atom by atom."""
        table = _Table.of(_atoms(f"optimizer/{name}/{parameter}", parameter, sides))
        self.rows += len(table.shared)
        if table.first is not None:
            shard, piece = divmod(table.first, VIRTUAL)
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
    """All rows of one op, sorted by key. `shared` are the keys that the first side and another have, `wrong` those with
    different words."""

    sources: tuple[str, ...]
    key: I64
    word: U64
    source: I64
    shared: I64
    wrong: I64

    @classmethod
    def of(cls, parts: Iterable[_Part]) -> _Table:
        kept = list(parts)
        key, word = np.concatenate([p.key for p in kept]), np.concatenate([p.word for p in kept])
        source = np.repeat(np.arange(len(kept)), [len(p.key) for p in kept])
        order = np.lexsort((source, key))
        key, word, source = key[order], word[order], source[order]
        _, start = np.unique(key, return_index=True)
        side = np.array([p.side for p in kept])[source]
        shared = (np.minimum.reduceat(side, start) == 0) & (np.maximum.reduceat(side, start) > 0)
        wrong = np.maximum.reduceat(word, start) != np.minimum.reduceat(word, start)
        names = tuple(p.source for p in kept)
        return cls(names, key, word, source, key[start[shared]], key[start[wrong]])

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
        votes = {word: len({name.split(" ")[-1] for name in names}) for word, names in found.items()}
        common, odd, *_ = sorted(found.items(), key=lambda item: votes[item[0]], reverse=True)
        return Word(tuple(common[1]), common[0], kept), Word(tuple(odd[1]), odd[0], kept)


def _rows(op: Op, sides: Sequence[Side]) -> Iterator[_Part]:
    """What every rank recorded of an op; the key of a word is that of its token, then its shard (0 where not cut)."""
    for number, side in enumerate(sides):
        for probe in side.probes:
            sample, position, words = probe.rows(side.phase, op)
            shards = np.arange(words.shape[1]) + (probe.shard0 if op.sharded else 0)
            keys = token_keys(sample, position)[:, None] * VIRTUAL + shards
            yield _Part(number, side.source(probe), keys.ravel(), words.ravel())


def _atoms(name: str, parameter: str, sides: Sequence[Side]) -> Iterator[_Part]:
    for number, side in enumerate(sides):
        for probe in side.probes:
            words = probe.arrays[name]
            shards = np.arange(words.shape[0]) + (0 if replicated(parameter) else probe.shard0)
            keys = shards[:, None] * VIRTUAL + probe.piece0 + np.arange(words.shape[1])
            yield _Part(number, side.source(probe), keys.ravel().astype(np.int64), words.ravel())


def search_states(search: Search, sides: Sequence[Side], names: Iterable[str]) -> None:
    """Compares every input and output of the optimizer, in program order."""
    parameters = tuple(names)
    for state in STATES:
        for parameter in parameters:
            search.atoms(state, parameter, sides)


def search_step(plan: Plan, probes: Sequence[Probe]) -> tuple[Search, int]:
    """Everything that a step of a run recorded: rollout against recomputed policy and update, and replicas among each
    other. Also how many predicted tokens have logits on both sides."""
    layers, native = plan.shape.layers, plan.config.mode == "native"
    engines = [p for p in probes if p.role.startswith("engine-")]
    trains = [p for p in probes if p.role.startswith("train-")]
    sides = [Side("rollout", "rollout", engines), Side("score", "score", trains), Side("update", "update", trains)]
    search, ops = Search(plan.config.probe_row), forward(layers, native=native)
    for op in ops:
        search.op(op, sides)
    logits = next(op for op in ops if op.head)
    seen = Search().op(logits, sides[:2])
    if not native:
        for op in backward(layers):
            search.op(op, [Side("backward", "backward", trains)])
    names = parameters(layers, tied=plan.shape.tie_word_embeddings)
    search_states(search, [Side("optimizer", "optimizer", trains)], names)
    return search, seen
