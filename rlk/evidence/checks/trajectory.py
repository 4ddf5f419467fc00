"""Do the hashes of the trajectory follow from the record?"""

from __future__ import annotations

from rlk.evidence.checks.tally import Tally
from rlk.evidence.digest import START, Made, trajectory_line
from rlk.evidence.layout import TRAJECTORY
from rlk.evidence.record import Record, StepRecord


def digest(run: Record, step: StepRecord, tally: Tally) -> None:
    """The line of each step is the one that its arrays, its weights and the line before it give."""
    previous = START if step.step == 0 else run.trajectory_of(step.step - 1).digest
    made = Made(run.update(step.step), run.fingerprints[step.step + 1], run.plan.config.seed)
    expected = trajectory_line(step.step, step.samples, step.batch, made, previous)
    found = run.trajectory_of(step.step)
    for name in expected.model_dump(exclude={"step"}):
        where = f"{TRAJECTORY}: step {step.step}"
        tally.equal(where, name, getattr(found, name), getattr(expected, name), step.step)
