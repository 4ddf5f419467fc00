"""Did every process of the run exist once, and end as it should?"""

from __future__ import annotations

from rlk.evidence import layout
from rlk.evidence.checks.tally import Tally
from rlk.evidence.ray_status import CLEAN_CAUSES
from rlk.evidence.record import Record
from rlk.evidence.verdict import Failure


def ray(run: Record, tally: Tally) -> None:
    """Ray reports success, and for exactly the planned actors the state that a good end leaves.

    Dead at its own leave; alive where the manifest says that a session keeps the actors for its next run.
    """
    tally.equal(layout.RAY_STATUS, "outcome", run.ray.outcome, "SUCCEEDED")
    names = [actor.name for actor in run.ray.actors]
    tally.equal(layout.RAY_STATUS, "actors", sorted(names), sorted(_roles(run)))
    outlive = run.manifest.actors_outlive_run
    for actor in run.ray.actors:
        tally.add()
        good = actor.state == "ALIVE" if outlive else actor.state == "DEAD" and actor.cause in CLEAN_CAUSES
        if not good:
            needed = "ALIVE, in a session that goes on" if outlive else f"DEAD by {', '.join(sorted(CLEAN_CAUSES))}"
            message = f"{layout.RAY_STATUS}: {actor.name} is {actor.state} {actor.cause}, expected {needed}"
            tally.fail(message, Failure(where=actor.name))


def processes(run: Record, tally: Tally) -> None:
    """Each rank is one process of its own, and Ray, the manifest and the process itself agree on its pid."""
    reported = {role: said.pid for role, said in run.train_readback().items()}
    reported |= {role: said.pid for role, said in run.engine_readback().items()}
    actors = {actor.name: actor.pid for actor in run.ray.actors}
    seen: dict[int, str] = {}
    for role in _roles(run):
        started = [process.pid for process in run.manifest.processes if process.role == role]
        tally.equal(layout.MANIFEST, f"number of processes {role}", len(started), 1)
        for pid in started[:1]:
            tally.equal(layout.RAY_STATUS, f"pid of {role}", actors.get(role), pid)
            tally.equal(f"{layout.MANIFEST} readback", f"pid of {role}", reported.get(role), pid)
            if seen.setdefault(pid, role) != role:
                tally.fail(f"{layout.MANIFEST}: pid {pid} is both {seen[pid]} and {role}", Failure(where=role))


def _roles(run: Record) -> tuple[str, ...]:
    return layout.roles(run.plan.ranks, run.plan.engines, run.plan.engine_ranks)
