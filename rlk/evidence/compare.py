"""Are two runs the same, and if not, where do they part? From their directories alone.

A step is compared field by field in the order in which a step makes them; the first field that differs is where the
runs part. Where both were probed, the first op in program order that differs stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlk.evidence import parting
from rlk.evidence.errors import EvidenceError
from rlk.evidence.locate import Search, search_states
from rlk.evidence.parting import Names, Parting, Value
from rlk.evidence.place import Side
from rlk.evidence.probe import Probe
from rlk.evidence.program import PHASES, parameters, program
from rlk.evidence.record import Record

OWN = frozenset(
    {"run_id", "output_root", "as_json", "detach", "probe", "probe_row", "profile", "ray_address", "allow_dirty"}
)
"""Options that may differ between equal runs, and are not reported."""


@dataclass(frozen=True)
class Comparison:
    """Two runs. `settings` names the options that differ; `op` is the first op that does, where both were probed."""

    left: str
    right: str
    steps: int
    first: Parting | None
    op: str | None
    settings: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """No field of any step differs, nor any recorded op."""
        return self.first is None and self.op is None


def compare(left: Path, right: Path) -> Comparison:
    """Compares two run directories. Raises EvidenceError where one cannot be read."""
    a, b = Record(left), Record(right)
    names = (left.name, right.name) if left.name != right.name else (str(left), str(right))
    steps = [record.plan.config.steps for record in (a, b)]
    first, probed, op = parting.initial(a, b, names), a.plan.config.probe and b.plan.config.probe, None
    done = 0
    while first is None and op is None and done < min(steps):
        first = next(parting.step(a, b, done, names), None)
        if probed:
            op = _first_op(a, b, done, names)
        done += 1
    if first is None and op is None and steps[0] != steps[1]:
        first = Parting(None, "number of steps", Value(names[0], str(steps[0])), Value(names[1], str(steps[1])))
    return Comparison(*names, steps=done, first=first, op=op, settings=_settings(a, b))


def _settings(a: Record, b: Record) -> tuple[str, ...]:
    left, right = a.plan.effective(), b.plan.effective()
    return tuple(name for name in left if name not in OWN and left[name] != right.get(name))


def _first_op(a: Record, b: Record, step: int, names: Names) -> str | None:
    """The first op of a step, in program order, that differs between two probed runs."""
    native = [record.plan.config.mode == "native" for record in (a, b)]
    shape, probes = a.plan.shape, (a.probes(step), b.probes(step))
    if shape != b.plan.shape:
        raise EvidenceError(f"{names[0]} and {names[1]} have models of different shapes: their ops cannot be compared")
    row, other = (record.plan.config.probe_row for record in (a, b))
    search = Search(row if row == other else None)
    for phase in PHASES:
        sides = list(_sides(names, phase, probes))
        if phase == "backward" and any(native):
            continue  # autograd's gradients are not recorded
        for op in program(phase, shape.layers, native=any(native)):
            search.op(op, sides)
        if search.place is not None:
            return f"step {step} {phase} {search}"
    states = list(_sides(names, "optimizer", probes))
    search_states(search, states, parameters(shape.layers, tied=shape.tie_word_embeddings))
    return None if search.place is None else f"step {step} optimizer {search}"


def _sides(names: Names, phase: str, probes: Sequence[Sequence[Probe]]) -> Iterator[Side]:
    role = "engine-" if phase == "rollout" else "train-"
    for name, own in zip(names, probes, strict=True):
        yield Side(name, phase, [probe for probe in own if probe.role.startswith(role)])
