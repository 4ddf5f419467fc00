"""Did every process and every sample run with the settings asked for?"""

from __future__ import annotations

from typing import Any

from rlk.evidence import layout
from rlk.evidence.checks.tally import Tally
from rlk.evidence.documents import Part
from rlk.evidence.record import Record, StepRecord
from rlk.evidence.settings import requested_engine, requested_train
from rlk.evidence.verdict import Failure, Side


def train_settings(run: Record, tally: Tally) -> None:
    """Every train rank reports the settings of the plan."""
    asked = {layout.train_role(rank): requested_train(run.plan, rank) for rank in range(run.plan.ranks)}
    _readback(tally, run.train_readback(), asked)


def engine_settings(run: Record, tally: Tally) -> None:
    """Every rank of every engine reports the settings of the plan."""
    places = [(engine, rank) for engine in range(run.plan.engines) for rank in range(run.plan.engine_ranks)]
    asked = {layout.engine_role(*place): requested_engine(run.plan, *place) for place in places}
    _readback(tally, run.engine_readback(), asked)


def kernels(run: Record, tally: Tally) -> None:
    """Every process runs the kernel forms that the manifest states, each with its proof."""
    chosen = {kernel.name: kernel.form for kernel in run.manifest.kernels}
    if len(chosen) != len(run.manifest.kernels) or not chosen:
        tally.fail(f"{layout.MANIFEST}: kernels must name each choice once", Failure(where=layout.MANIFEST))
    said = {role: one.kernels for role, one in run.train_readback().items()}
    said |= {role: one.kernels for role, one in run.engine_readback().items()}
    for role, forms in said.items():
        tally.equal(f"{layout.MANIFEST} readback {role}", "kernels", forms, chosen)


def sampling_settings(run: Record, step: StepRecord, tally: Tally) -> None:
    """Every sample was drawn with the temperature, top-p and top-k that the plan gives its place in the batch."""
    samples, first = step.samples, step.step * run.plan.samples_per_step
    for row, sample in enumerate(samples.sample_id.tolist()):
        asked = run.plan.sampling_of(sample - first)
        for name in ("temperature", "top_p", "top_k"):
            tally.add()
            found, needed = getattr(samples, name)[row].item(), getattr(asked, name)
            if found == needed:
                continue
            sides = Side(source="rollout", value=repr(found)), Side(source="plan", value=repr(needed))
            place = Failure(where=name, step=step.step, sample=sample, left=sides[0], right=sides[1])
            tally.fail_at(place, f"{name} is {found!r}, the plan asks for {needed!r}")


def _readback(tally: Tally, said: dict[str, Any], asked: dict[str, dict[str, Any]]) -> None:
    tally.equal(f"{layout.MANIFEST} readback", "processes", sorted(said), sorted(asked))
    for role in sorted(asked.keys() & said.keys()):
        found: Part = said[role]
        for name, value in asked[role].items():
            tally.equal(f"{layout.MANIFEST} readback {role}", name, getattr(found, name), value)
