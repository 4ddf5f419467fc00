"""The first field in which a step of two runs differs, its place, and both values.

Fields stand in the order in which a step makes them, so the first that differs is where two runs part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlk.evidence.arrays import F32, length_problem
from rlk.evidence.bits import hex_word, show
from rlk.evidence.errors import EvidenceError
from rlk.evidence.record import Record, StepRecord
from rlk.evidence.samples import Samples, token_of

Names = tuple[str, str]


@dataclass(frozen=True)
class Value:
    """What one run has: its name, the value as text, and its bits in hex where it has any."""

    run: str
    value: str
    word: str | None = None

    def __str__(self) -> str:
        return f"{self.run} {self.value}" + (f" {self.word}" if self.word else "")


@dataclass(frozen=True)
class Parting:
    """The first difference of two runs. `count` is how many of `compared` things of that field and step differ."""

    step: int | None
    field: str
    left: Value
    right: Value
    tensor: str | None = None
    sample: int | None = None
    token_index: int | None = None
    count: int = 1
    compared: int = 1

    def __str__(self) -> str:
        named = (("step", self.step), ("", self.field), ("tensor", self.tensor), ("sample", self.sample))
        known = [(name, value) for name, value in (*named, ("token", self.token_index)) if value is not None]
        place = [f"{name} {value}".strip() for name, value in known]
        return f"{' '.join(place)}: {self.left}, {self.right} [{self.count} of {self.compared}]"


def initial(a: Record, b: Record, names: Names) -> Parting | None:
    """The first tensor in which the weights differ that two runs started from."""
    return _tensors(None, "initial weights", a.fingerprints[0].trainer, b.fingerprints[0].trainer, names)


def step(a: Record, b: Record, number: int, names: Names) -> Iterator[Parting]:
    """The differing fields of a step, in the order in which a step makes them."""
    left, right = a.step(number), b.step(number)
    for field, found in (
        ("prompts", _ragged(left.samples, right.samples, names, Samples.prompt, _integer)),
        ("tokens", _ragged(left.samples, right.samples, names, lambda s, row: s.tokens[s.response(row)], _integer)),
        ("logprobs", _ragged(left.samples, right.samples, names, lambda s, row: s.logprobs[s.response(row)], _f32)),
        ("rewards", _per_sample(left, right, names, "reward")),
        ("advantages", _per_sample(left, right, names, "advantage")),
        ("policy logprobs", _scored(left, right, names, "logprob")),
        ("update logprobs", _scored(left, right, names, "update_logprob")),
        ("reference logprobs", _scored(left, right, names, "ref_logprob")),
    ):
        if found is not None:
            yield _at(number, field, found)
    before, after = a.update(number), b.update(number)
    for field in ("gradients", "masters", "first_moments", "second_moments"):
        state = _tensors(number, field.replace("_", " "), getattr(before, field), getattr(after, field), names)
        if state is not None:
            yield state
    made = [record.fingerprints[number + 1].trainer for record in (a, b)]
    weights = _tensors(number, "weights", made[0], made[1], names)
    if weights is not None:
        yield weights


@dataclass(frozen=True)
class _Found:
    left: Value
    right: Value
    sample: int
    token_index: int | None
    count: int
    compared: int


def _at(step: int, field: str, found: _Found) -> Parting:
    return Parting(step, field, **vars(found))


_Column = Callable[[Samples, int], NDArray[Any]]
_Show = Callable[[str, NDArray[Any], int], Value]


def _integer(run: str, values: NDArray[Any], at: int) -> Value:
    return Value(run, str(values[at]) if at < len(values) else "nothing")


def _f32(run: str, values: NDArray[Any], at: int) -> Value:
    if at >= len(values):
        return Value(run, "nothing")
    return Value(run, show(values[at]), hex_word(values[at]))


def _words(values: NDArray[Any]) -> NDArray[np.uint32]:
    """32-bit values as integers, so that they are compared by their bits."""
    return values.view(np.uint32)


def _ragged(left: Samples, right: Samples, names: Names, column: _Column, show: _Show) -> _Found | None:
    """The first entry of the first sample that differs in a column of one entry a token."""
    first, count, compared = None, 0, 0
    rows = [{int(i): row for row, i in enumerate(s.sample_id.tolist())} for s in (left, right)]
    for sample in sorted(rows[0].keys() | rows[1].keys()):
        values = [
            column(s, own[sample]) if sample in own else np.empty(0, np.int32)
            for s, own in ((left, rows[0]), (right, rows[1]))
        ]
        n = min(map(len, values))
        wrong = np.flatnonzero(_words(values[0][:n]) != _words(values[1][:n]))
        longest = max(map(len, values))
        compared += longest
        differing = len(wrong) + longest - n
        count += differing
        if first is None and differing:
            at = int(wrong[0]) if len(wrong) else n
            first = show(names[0], values[0], at), show(names[1], values[1], at), sample, at
    return None if first is None else _Found(*first, count, compared)


def _per_sample(left: StepRecord, right: StepRecord, names: Names, column: str) -> _Found | None:
    sides = [_column(side, column) for side in (left, right)]
    ids = sorted(sides[0].keys() | sides[1].keys())
    wrong = [i for i in ids if _bits(sides[0], i) != _bits(sides[1], i)]
    if not wrong:
        return None

    def shown(name: str, side: Mapping[int, np.float64]) -> Value:
        if wrong[0] not in side:
            return Value(name, "nothing")
        value = side[wrong[0]]
        return Value(name, repr(float(value)), f"0x{int(value.view(np.uint64)):016x}")

    return _Found(shown(names[0], sides[0]), shown(names[1], sides[1]), wrong[0], None, len(wrong), len(ids))


def _column(step: StepRecord, column: str) -> dict[int, np.float64]:
    """Values of a column of the batch by sample. Raises EvidenceError where columns do not fit each other."""
    if problem := length_problem(step.batch):
        raise EvidenceError(f"step {step.step}: batch: {problem}")
    return dict(zip(step.batch.sample_id.tolist(), getattr(step.batch, column), strict=True))


def _bits(side: Mapping[int, np.float64], sample: int) -> bytes:
    return side[sample].tobytes() if sample in side else b""


def _scored(left: StepRecord, right: StepRecord, names: Names, column: str) -> _Found | None:
    a, b = left.scored[0], right.scored[0]
    _, rows, others = np.intersect1d(a.key, b.key, return_indices=True)
    values: list[F32] = [getattr(a, column)[rows], getattr(b, column)[others]]
    wrong = np.flatnonzero(_words(values[0]) != _words(values[1]))
    if not len(wrong):
        return None
    at = int(wrong[0])
    sample, index = token_of(int(a.key[rows[at]]))
    return _Found(_f32(names[0], values[0], at), _f32(names[1], values[1], at), sample, index, len(wrong), len(rows))


def _tensors(
    step: int | None, field: str, left: Mapping[str, str], right: Mapping[str, str], names: Names
) -> Parting | None:
    every = sorted(left.keys() | right.keys(), key=_in_model_order)
    wrong = [name for name in every if left.get(name) != right.get(name)]
    if not wrong:
        return None
    values = [Value(run, said.get(wrong[0], "nothing")) for run, said in zip(names, (left, right), strict=True)]
    return Parting(step, field, values[0], values[1], tensor=wrong[0], count=len(wrong), compared=len(every))


def _in_model_order(name: str) -> tuple[bool, bool, list[int], str]:
    """Embedding, layers by number, what comes after them."""
    layer = [int(part) for part in name.split(".") if part.isdecimal()]
    return "embed" not in name, not layer, layer, name
