"""Is the record whole, readable, finished, and of the plan it claims?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from rlk.evidence import layout
from rlk.evidence.checks.tally import Tally
from rlk.evidence.errors import EvidenceError
from rlk.evidence.plans import derived_again, derived_record, probed_roles, topology_record
from rlk.evidence.record import Record
from rlk.evidence.schemas import GREEDY_CONVENTION, KL_CONVENTION
from rlk.evidence.verdict import Failure
from rlk.plan.faults import injection


def files(run: Record, tally: Tally) -> None:
    """Exactly the files that the plan's steps, engines and ranks leave."""
    # The verdict and the seal are made after this check ran once, so they are looked at by their own checks.
    late = {layout.VALIDATION, layout.SUMS}
    plan = run.plan
    expected = layout.sealed_files(plan.config.steps, plan.engines, plan.ranks, probed_roles(plan)) - late
    found = set(run.files) - late
    tally.add(len(expected))
    for name in sorted(expected - found):
        tally.fail(f"{name}: missing", Failure(where=name))
    for name in sorted(found - expected):
        tally.fail(f"{name}: is no file of this run", Failure(where=name))


def schemas(run: Record, tally: Tally) -> None:
    """Every JSON and text file reads under the schema and version that this reader knows."""
    readers: tuple[Callable[[], object], ...] = (
        lambda: run.manifest,
        lambda: run.plan,
        lambda: run.metrics,
        lambda: run.trajectory,
        lambda: run.fingerprints,
        lambda: run.ray,
    )
    for read in readers:
        tally.add()
        try:
            read()
        except EvidenceError as error:
            tally.fail(str(error), Failure(where=str(error).split(":", 1)[0]))


def status(run: Record, tally: Tally) -> None:
    """The run says that it came to its end, without an error."""
    tally.equal(layout.MANIFEST, "status", run.manifest.status, "complete")
    tally.equal(layout.MANIFEST, "error", run.manifest.error, None)


def injected(run: Record, tally: Tally) -> None:
    """No fault was injected on purpose: such a run shows that checks can fail, and never that the program is right."""
    tally.add()
    if run.plan.config.inject is not None:
        tally.fail(injection(run.plan.config.inject).sentence, Failure(where=f"{layout.PLAN}: inject"))


def plan(run: Record, tally: Tally) -> None:
    """plan.json is what its own config, profile and shape give when derived again."""
    again = derived_again(run.plan)
    tally.add()
    if run.plan == again and run.plan.to_json() == again.to_json():
        return
    fields = [name for name in vars(again) if getattr(run.plan, name) != getattr(again, name)]
    name = fields[0] if fields else "text"
    was, now = (getattr(one, name, "...") for one in (run.plan, again))
    tally.fail(f"{layout.PLAN}: {name} is {was!r}, derived again it is {now!r}", Failure(where=layout.PLAN))


def manifest(run: Record, tally: Tally) -> None:
    """The manifest states the plan's command, mode, settings, topology and derived values, and our conventions."""
    said, plan = run.manifest, run.plan
    for name, found, needed in (
        ("run_id", said.run_id, plan.config.run_id),
        ("command", said.command, plan.config.command),
        ("mode", said.mode, plan.config.mode),
        ("profile", said.profile, plan.profile.name),
        ("memory.offload", said.memory.offload, plan.offload),
        ("kl_convention", said.kl_convention, KL_CONVENTION),
        ("greedy_convention", said.greedy_convention, GREEDY_CONVENTION),
    ):
        tally.equal(layout.MANIFEST, name, found, needed)
    for name, stated, planned in (
        ("requested", {key: one.model_dump() for key, one in said.requested.items()}, plan.requested()),
        ("effective", said.effective, plan.effective()),
        ("topology", said.topology.model_dump(), topology_record(plan).model_dump()),
        ("derived", said.derived.model_dump(), derived_record(plan).model_dump()),
    ):
        for key in sorted(stated.keys() | planned.keys()):
            tally.equal(layout.MANIFEST, f"{name}.{key}", stated.get(key), planned.get(key))


def steps(run: Record, tally: Tally) -> None:
    """Metrics, trajectory, step folders and weight versions each count from 0 without a gap, a repeat or an excess."""
    number = run.plan.config.steps
    _sequence(tally, layout.METRICS, "step", [line.step for line in run.metrics], number)
    _sequence(tally, layout.TRAJECTORY, "step", [line.step for line in run.trajectory], number)
    folders = {name.split("/")[1] for name in run.files if name.startswith("steps/")}
    _sequence(tally, "steps/", "step", _numbers(folders), number)
    versions = [name.split("/", 1)[1] for name in run.files if name.startswith("fingerprints/")]
    matches = [layout.FINGERPRINT_FILE.fullmatch(name) for name in versions]
    _sequence(tally, "fingerprints/", "version", [int(m[1]) if m else -1 for m in matches], number + 1)


def _numbers(folders: Iterable[str]) -> list[int]:
    """Steps of the folders in order; -1 for a name that is none."""
    return sorted(int(name) if layout.STEP_DIRECTORY.fullmatch(name) else -1 for name in folders)


def _sequence(tally: Tally, where: str, what: str, found: list[int], number: int) -> None:
    tally.add(number)
    seen = Counter(found)
    for step in range(number):
        if step not in seen:
            tally.fail(f"{where}: {what} {step} is missing", Failure(where=where, step=step))
    for step, times in sorted(seen.items()):
        if not 0 <= step < number:
            tally.fail(f"{where}: {what} {step} is not one of the {number} planned", Failure(where=where, step=step))
        elif times > 1:
            tally.fail(f"{where}: {what} {step} stands {times} times", Failure(where=where, step=step))
    if found != sorted(found):
        tally.fail(f"{where}: not in the order of {what}s: {found}", Failure(where=where))
